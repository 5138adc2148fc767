"""The acceptance rules alone. Laws are computed, not sampled, wherever a rule's randomness is an argument.

One long file: both rules are put to the same laws, cases and bad input, and share what computes them.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot import verify
from surefoot.errors import InputError, NumericalError
from surefoot.sampling import SamplingParams
from surefoot.types import Draft, Verdict

Row = list[float]
Law = dict[tuple[int, ...], float]
Judge = Callable[[tuple[int, ...], list[Row], list[Row] | None, list[float]], Verdict]

COUPLED = SamplingParams(temperature=1.0, seed=11)
REJECTION = SamplingParams(temperature=1.0, seed=11, acceptance="rejection")


# ---------------------------------------------------------------- small cases


@pytest.mark.parametrize(
    "draft, choices, accepted, token",
    [
        ((5, 7, 3), (5, 9, 0, 0), 1, 9),
        ((3, 7, 2), (3, 7, 2, 9), 3, 9),
        ((42, 43), (7, 0, 0), 0, 7),
        ((10, 11, 2, 12), (10, 11, 2, 50, 51), 3, 50),
        ((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 77, 0, 0, 0, 0, 0), 3, 77),
        ((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 77, 0, 0), 6, 77),
        ((), (4,), 0, 4),
    ],
)
def test_exact_small_cases(draft: tuple[int, ...], choices: tuple[int, ...], accepted: int, token: int) -> None:
    assert verify.accept_exact(draft, choices) == Verdict(accepted, token)
    logits = torch.zeros(len(choices), 80)
    logits[range(len(choices)), list(choices)] = 1.0
    assert verify.verify(Draft(draft), logits, SamplingParams(), position=9) == Verdict(accepted, token)
    certain = logits.mul(1000).softmax(-1)  # the p/q rule on point masses says the same, whatever the uniforms
    for u in (0.0, 0.5, 1 - 2**-53):
        assert verify.accept(draft, certain, None, [u] * len(choices)) == Verdict(accepted, token)


def test_exact_lengths_must_agree() -> None:
    with pytest.raises(InputError, match="choices: expected 3, one more than draft tokens, found 2"):
        verify.accept_exact((1, 2), (1, 2))


unit = st.floats(0, 1, exclude_max=True)


@settings(max_examples=40, deadline=None)
@given(st.lists(unit, min_size=4, max_size=4))
def test_equal_distributions_accept_everything(u: list[float]) -> None:
    p = [[0.2, 0.5, 0.3]] * 4
    verdict = verify.accept([1, 0, 2], p, p[:3], u)
    assert verdict.accepted == 3


@settings(max_examples=40, deadline=None)
@given(unit, unit)
def test_disjoint_distributions_reject(u: float, v: float) -> None:
    assert verify.accept([0], [[0.0, 1.0], [0.5, 0.5]], [[1.0, 0.0]], [u, v]) == Verdict(0, 1)
    assert verify.accept([0], [[0.0, 1.0], [0.5, 0.5]], None, [u, v]) == Verdict(0, 1)
    # A drafted token that the draft distribution does not have.
    assert verify.accept([1], [[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0]], [u, v]) == Verdict(0, 1)


@settings(max_examples=40, deadline=None)
@given(unit)
def test_the_residual_is_all_on_what_the_draft_lacked(v: float) -> None:
    assert verify.accept([1], [[0.9, 0.1], [0.5, 0.5]], [[0.1, 0.9]], [0.5, v]) == Verdict(0, 0)
    assert verify.accept([1], [[0.9, 0.1], [0.5, 0.5]], [[0.1, 0.9]], [0.11, v]).accepted == 1


def test_an_empty_draft_draws_one_token() -> None:
    empties: list[Any] = [[], (), torch.empty(0), torch.empty(0, dtype=torch.int64), np.array([])]
    no_probs: list[Any] = [None, [], torch.empty(0, 2)]
    for empty in empties:
        for draft_probs in no_probs:
            assert verify.accept(empty, [[0.25, 0.75]], draft_probs, [0.2]) == Verdict(0, 0)
            assert verify.accept(empty, [[0.25, 0.75]], draft_probs, [0.3]) == Verdict(0, 1)


def test_lists_arrays_and_tensors_are_equal() -> None:
    tokens, p, q, u = [1, 0], [[0.3, 0.7], [0.5, 0.5], [0.1, 0.9]], [[0.5, 0.5], [0.2, 0.8]], [0.4, 0.1, 0.05]
    expected = verify.accept(tokens, p, q, u)
    readonly = np.array(p)
    readonly.setflags(write=False)
    assert verify.accept(np.array(tokens), readonly, np.array(q), np.array(u)) == expected
    assert verify.accept(np.array(tokens, np.int32), np.array(p, np.float32), q, tuple(u)) == expected
    assert verify.accept(torch.tensor(tokens), torch.tensor(p), torch.tensor(q), torch.tensor(u)) == expected


@pytest.mark.parametrize(
    "kind",
    [
        lambda a: a[::-1].copy()[::-1],
        lambda a: np.asfortranarray(a),
        lambda a: np.repeat(a, 2, axis=0)[::2],
        lambda a: a.astype(a.dtype.newbyteorder(">")),
        lambda a: a.astype(object),
        lambda a: a.astype(np.longdouble) if a.dtype.kind == "f" else a.astype(np.uint64),
        lambda a: a.astype(np.float16) if a.dtype.kind == "f" else a.astype(np.uint16),
        lambda a: memoryview(a),
        lambda a: [Fraction(x) for x in a] if a.ndim == 1 and a.dtype.kind == "f" else a,
        lambda a: list(a),
    ],
    ids=["reversed", "columns first", "strided", "big-endian", "object", "long", "short", "buffer", "fraction", "rows"],
)
def test_arrays_of_every_layout_are_equal(kind: Callable[[Any], Any]) -> None:
    tokens, p, q, u = (
        [1, 0],
        [[0.25, 0.75], [0.5, 0.5], [0.125, 0.875]],
        [[0.5, 0.5], [0.25, 0.75]],
        [0.375, 0.125, 0.0625],
    )
    arrays = [kind(np.array(value)) for value in (tokens, p, q, u)]
    assert verify.accept(*arrays) == verify.accept(tokens, p, q, u)


# ---------------------------------------------------------------- wrong arguments

P3 = [[0.5, 0.5]] * 3
Q2 = [[0.5, 0.5]] * 2
U3 = [0.1] * 3


@pytest.mark.parametrize(
    "args, message",
    [
        (([0], P3, Q2, U3), r"draft_tokens: expected \[2\], one fewer than rows of target_probs, found \[1\]"),
        (([0, 0, 0], P3, Q2, U3), r"draft_tokens: expected \[2\]"),
        (([0, 2], P3, Q2, U3), r"draft_tokens\[1\]: expected a token id from 0 to 1, found 2"),
        (([0, -1], P3, Q2, U3), r"draft_tokens\[1\]: .* from 0 to 1, found -1"),
        (([0.0, 1.0], P3, Q2, U3), r"draft_tokens\[0\]: .*found 0.0"),
        (([0, 0], P3, Q2[:1], U3), r"draft_probs: expected \[2, 2\], found \[1, 2\]"),
        (([0, 0], P3, [[0.2, 0.3, 0.5]] * 2, U3), r"draft_probs: expected \[2, 2\], found \[2, 3\]"),
        (([0, 0], P3, Q2, U3[:2]), r"uniforms: expected \[3\], one for each row of target_probs, found \[2\]"),
        (([0, 0], P3, Q2, [0.1, 0.1, 1.0]), r"uniforms: expected numbers in \[0, 1\), found 1.0"),
        (([0, 0], P3, Q2, [0.1, -0.1, 0.2]), r"uniforms: expected numbers in \[0, 1\), found -0.1"),
        (([0, 0], P3, Q2, [0.1, math.nan, 0.2]), r"uniforms: expected numbers in \[0, 1\), found nan"),
        (([0, 0], [[0.5, 0.5], [math.nan, 0.5], [1, 0]], Q2, U3), "target_probs: .*found nan"),
        (([0, 0], [[0.5, 0.5], [1.5, -0.5], [1, 0]], Q2, U3), "target_probs: .*at least 0, found -0.5"),
        (([0, 0], P3, [[0.5, 0.5], [0.5, 0.4]], U3), "draft_probs: .*sum to 1, found 0.9 in row 1"),
        (([0, 0], [[math.inf, 0.5]] * 3, Q2, U3), "target_probs: .*sum to 1, found inf in row 0"),
        (([0, 0], [0.5, 0.5], Q2, U3), r"target_probs: expected rows of probabilities, \[n, V\], found \[2\]"),
        (([0, 0], [[0.5, 0.5], [1.0]], Q2, U3), "target_probs: expected a rectangular array of numbers, found list"),
        (([0, 0], "abc", Q2, U3), "target_probs: expected a rectangular array of numbers, found str"),
        ((None, P3, Q2, U3), "draft_tokens: expected a list of token ids, found None"),
        (([0, 10**30], P3, Q2, U3), r"draft_tokens\[1\]: .*found 1000000000000000000000000000000"),
        (([0, True], P3, Q2, U3), r"draft_tokens\[1\]: .*found True"),
        (([0, 1j], P3, Q2, U3), r"draft_tokens\[1\]: .*found 1j"),
        ((torch.empty(2, device="meta"), P3, Q2, U3), "draft_tokens: expected a list of token ids"),
        (([0, 0], [[10**400, 0.5]] * 3, Q2, U3), "target_probs: .*found an integer too large for one in list"),
        (([0, 0], np.array(P3, complex), Q2, U3), "target_probs: .*found ndarray of complex128"),
        (([0, 0], torch.tensor(P3, dtype=torch.complex64), Q2, U3), "target_probs: .*torch.complex64"),
        (([0, 0], torch.tensor(P3).to_sparse(), Q2, U3), "target_probs: .*sparse"),
        (([0, 0], torch.empty(3, 2, device="meta"), Q2, U3), "target_probs: .*meta"),
        (([0, 0], np.array([["0.5", "0.5"]] * 3), Q2, U3), "target_probs: .*found ndarray of <U3"),
        (([0, 0], np.array([["0.5", "0.5"]] * 3, object), Q2, U3), "target_probs: .*found ndarray"),
        (([0, 0], np.array([[None, 1.0]] * 3, object), Q2, U3), "target_probs: .*found ndarray"),
        (([0, 0], {1, 2}, Q2, U3), "target_probs: .*found set"),
        (([0, 0], P3, None, [0.1, 0.2, 10**400]), "uniforms: .*found an integer too large"),
        (([0, 0], P3, None, [0.1, 0.2, 0.3j]), "uniforms: .*complex128"),
    ],
)
def test_input_errors_name_the_argument(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        verify.accept(*args)


@pytest.mark.parametrize(
    "logits",
    [
        [[1.0, 2.0]],
        None,
        np.zeros((1, 2)),
        torch.zeros(1, 0),
        torch.zeros(1, 1, 2),
        torch.tensor(1.0),
        torch.zeros(1, 2, dtype=torch.complex64),
        torch.zeros(1, 2, device="meta"),
        torch.eye(2).to_sparse(),
    ],
    ids=lambda logits: f"{type(logits).__name__} {list(getattr(logits, 'shape', ()))}",
)
@pytest.mark.parametrize("params", [SamplingParams(), COUPLED, REJECTION])
def test_what_is_no_logits(logits: Any, params: SamplingParams) -> None:
    calls: list[Callable[[], object]] = [
        lambda: verify.choose(logits, params, 0),
        lambda: verify.process(logits, params),
        lambda: verify.probabilities(logits, params),
        lambda: verify.verify(Draft(), logits, params, 0),
        lambda: verify.draft_token(logits, params, 0),
    ]
    for call in calls:
        with pytest.raises(InputError, match="logits: expected "):
            call()


def test_other_wrong_arguments_beside_logits() -> None:
    row: Any = torch.zeros(1, 2)
    nothing: Any = None
    for call in (verify.choose, verify.process, verify.probabilities):
        with pytest.raises(InputError, match="params: expected SamplingParams, found None"):
            call(row, nothing, 0)
        with pytest.raises(InputError, match=r"position: expected an integer, found 1\.5"):
            call(row, COUPLED, 1.5)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InputError, match="draft_tokens: expected a list of token ids, found None"):
        verify.accept_exact(nothing, [1])
    with pytest.raises(InputError, match=r"choices\[0\]: expected a token id of at least 0, found 'a'"):
        verify.accept_exact([], ["a"])  # type: ignore[list-item]  # wrong on purpose
    assert verify.accept_exact(torch.tensor([1]), np.array([1, 2])) == Verdict(1, 2)  # type: ignore[arg-type]


def test_verify_checks_shapes() -> None:
    with pytest.raises(InputError, match=r"logits: expected \[3, V\] for 2 draft tokens, found \[2, 4\]"):
        verify.verify(Draft((1, 2)), torch.zeros(2, 4), COUPLED, 5)
    with pytest.raises(InputError, match=r"draft.probs: expected \[1, 4\], found \[1, 3\]"):
        verify.verify(Draft((1,), torch.ones(1, 3) / 3), torch.zeros(2, 4), REJECTION, 5)


@pytest.mark.parametrize("params", [SamplingParams(), COUPLED, REJECTION])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_name_their_position(params: SamplingParams, bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1] = torch.full((4,), bad) if bad == -math.inf else torch.tensor([0.0, -math.inf, bad, 1.0])
    with pytest.raises(NumericalError, match="position 101"):
        verify.verify(Draft((1, 2)), logits, params, 100)
    with pytest.raises(NumericalError, match="position 7"):
        verify.draft_token(logits[1], params, 7)
    fine = torch.tensor([[-math.inf, 0.0, -math.inf]])
    assert verify.verify(Draft(), fine, params, 100) == Verdict(0, 1)


# ---------------------------------------------------------------- rounding


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(u: float) -> None:
    assert verify.accept([], [[0.0, 0.4, 0.6, 0.0]], None, [u]).token in (1, 2)
    assert verify.accept([], [[0.0, 0.3997, 0.5997, 0.0]], None, [u]).token in (1, 2)  # sums to less than 1
    tenths = [[0.0] + [0.1] * 10 + [0.0]]  # the float sum is 0.9999999999999999
    assert 1 <= verify.accept([], tenths, None, [u]).token <= 10
    # The point mass covers all but rounding: the residual is empty, the target's own row stands in.
    assert verify.accept([1], [[0.0, 0.9999], [1.0, 0.0]], None, [1 - 2**-53, u]) == Verdict(0, 1)
    # The draft dominates by rounding alone.
    assert verify.accept([0], [[0.5, 0.4999], [1.0, 0.0]], [[0.5002, 0.4999]], [1 - 2**-53, u]).token in (0, 1)


def test_edges_belong_to_the_token_above() -> None:
    tokens = [verify.accept([], [[0.25, 0.0, 0.5, 0.25]], None, [u]).token for u in (0, 0.2499, 0.25, 0.7499, 0.75)]
    assert tokens == [0, 0, 2, 2, 3]


# ---------------------------------------------------------------- the exact law of the p/q rule


def target_row(prefix: tuple[int, ...]) -> Row:
    rows = ([0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.0, 0.45, 0.55], [1.0, 0.0, 0.0], [0.25, 0.35, 0.4])
    return rows[(sum(prefix) + 2 * len(prefix)) % 5]


def close_row(prefix: tuple[int, ...]) -> Row:
    rows = ([0.4, 0.4, 0.2], [0.2, 0.2, 0.6], [0.1, 0.4, 0.5], [0.7, 0.3, 0.0])
    return rows[(sum(prefix) + len(prefix)) % 4]


def adversarial_row(prefix: tuple[int, ...]) -> Row:
    """Large where the target is small, and zero somewhere."""
    target = target_row(prefix)
    order = sorted(range(3), key=target.__getitem__)
    row = [0.0] * 3
    row[order[0]], row[order[1]] = 0.9, 0.1
    return row


def argmax_row(prefix: tuple[int, ...]) -> Row:
    row = close_row(prefix)
    return [float(token == row.index(max(row))) for token in range(3)]


def exact_law(
    propose: Callable[[tuple[int, ...]], Row],
    depth: int,
    judge: Judge,
    claim: Callable[[tuple[int, ...]], Row] | None = None,
    point_mass: bool = False,
) -> Law:
    """The joint law of the next depth + 1 tokens if drafts come from `propose` (and are said to come from `claim`) and
    `judge` decides on them.

    Between the break points of a uniform the verdict is constant, so summing interval lengths is exact. Tokens behind
    the verdict's last one follow the target's own law.
    """
    law: Law = defaultdict(float)
    for draft in itertools.product(range(3), repeat=depth):
        prefixes = [draft[:i] for i in range(depth + 1)]
        chance = math.prod(propose(x)[token] for x, token in zip(prefixes, draft, strict=False))
        if chance == 0.0:
            continue
        target, claimed = [target_row(x) for x in prefixes], [(claim or propose)(x) for x in prefixes[:depth]]
        edges = [acceptance_edges(p, q, x) for p, q, x in zip(target, claimed, draft, strict=False)]
        edges.append(last_edges(target, claimed))
        for box in itertools.product(*(itertools.pairwise(axis) for axis in edges)):
            weight = chance * math.prod(high - low for low, high in box)
            if weight < 1e-15:
                continue
            middles = [(low + high) / 2 for low, high in box]
            verdict = judge(draft, target, None if point_mass else claimed, middles)
            spread(law, (*draft[: verdict.accepted], verdict.token), weight, depth + 1)
    return law


def acceptance_edges(p: Row, q: Row, token: int) -> list[float]:
    """Where a draft token's uniform changes the verdict, also if p and q were swapped."""
    ratios = [p[token] / q[token] if q[token] else 0.0, q[token] / p[token] if p[token] else 0.0]
    return sorted({0.0, 1.0, *(ratio for ratio in ratios if ratio < 1)})


def last_edges(target: list[Row], drafted: list[Row]) -> list[float]:
    """Every break point of the last draw, whichever row it is from, also if p and q were swapped."""
    edges = {0.0, 1.0}
    for p, q in zip(target, [*drafted, target[-1]], strict=True):
        for weights in (p, q, np.subtract(p, q).clip(0), np.subtract(q, p).clip(0)):
            if np.sum(weights) > 0:
                edges |= set((np.cumsum(weights) / np.sum(weights)).clip(0, 1).tolist())
    return sorted(edges)


def spread(law: Law, tokens: tuple[int, ...], weight: float, length: int) -> None:
    if len(tokens) == length:
        law[tokens] += weight
        return
    for token, probability in enumerate(target_row(tokens)):
        if probability:
            spread(law, (*tokens, token), weight * probability, length)


def target_law(length: int) -> Law:
    law: Law = defaultdict(float)
    spread(law, (), 1.0, length)
    return law


def distance(one: Law, other: Law) -> float:
    return sum(abs(one.get(x, 0.0) - other.get(x, 0.0)) for x in {*one, *other}) / 2


PROPOSERS = {"close": close_row, "adversarial": adversarial_row, "target": target_row}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", PROPOSERS)
def test_law_of_sampled_drafts(name: str, depth: int) -> None:
    law = exact_law(PROPOSERS[name], depth, verify.accept)
    assert distance(law, target_law(depth + 1)) < 1e-9


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_law_of_point_mass_drafts(depth: int) -> None:
    expected = target_law(depth + 1)
    assert distance(exact_law(argmax_row, depth, verify.accept, point_mass=True), expected) < 1e-9
    if depth < 3:
        assert distance(exact_law(argmax_row, depth, verify.accept), expected) < 1e-9  # the same as a one-hot row


def test_control_softmax_q_for_argmax_drafts_is_noticed() -> None:
    law = exact_law(argmax_row, 1, verify.accept, claim=close_row)
    assert distance(law, target_law(2)) > 0.05


def test_control_swapped_target_and_draft_are_noticed() -> None:
    def judge(draft: tuple[int, ...], p: list[Row], q: list[Row] | None, u: list[float]) -> Verdict:
        assert q is not None
        return verify.accept(draft, [*q, p[-1]], p[:-1], u)

    assert distance(exact_law(close_row, 1, judge), target_law(2)) > 0.05


@pytest.mark.parametrize("shared", [False, True])
def test_control_a_last_draw_keyed_like_the_acceptance_is_noticed(shared: bool) -> None:
    p, q = [0.5, 0.3, 0.2], [0.2, 0.1, 0.7]
    law = [0.0] * 3
    for token, chance in enumerate(q):
        first, second = acceptance_edges(p, q, token), last_edges([p, p], [q])
        first = sorted({*first, *second}) if shared else first
        for low, high in itertools.pairwise(first):
            u = (low + high) / 2
            for start, end in [(low, high)] if shared else list(itertools.pairwise(second)):
                verdict = verify.accept([token], [p, p], [q], [u, (start + end) / 2])
                weight = high - low if shared else (high - low) * (end - start)
                law[token if verdict.accepted else verdict.token] += chance * weight
    error = sum(abs(x - y) for x, y in zip(law, p, strict=True)) / 2
    assert error > 0.02 if shared else error < 1e-9


rows = st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)


@settings(max_examples=40, deadline=None)
@given(rows, rows)
def test_law_of_one_draft_token_for_any_pair(p: list[int], q: list[int]) -> None:
    """Accepted mass plus residual mass is the target, and the acceptance rate is 1 - TV."""
    target, drafted = [x / sum(p) for x in p], [x / sum(q) for x in q]
    law, kept = [0.0] * 4, 0.0
    for token, chance in enumerate(drafted):
        if not chance:
            continue
        threshold = min(1.0, target[token] / chance)
        law[token] += chance * threshold
        kept += chance * threshold
        if threshold > 1e-12:
            below = verify.accept([token], [target, target], [drafted], [threshold * (1 - 1e-9), 0.5])
            assert below.accepted == 1
        if threshold > 1 - 1e-9:
            continue
        for low, high in itertools.pairwise(last_edges([target], [])):
            if high - low < 1e-12:
                continue
            above = verify.accept([token], [target] * 2, [drafted], [threshold * (1 + 1e-9), (low + high) / 2])
            assert above.accepted == 0
            assert target[above.token] > drafted[above.token]
        residual = [max(0.0, x - y) for x, y in zip(target, drafted, strict=True)]
        for replacement, mass in enumerate(residual):
            law[replacement] += chance * (1 - threshold) * mass / sum(residual)
            if mass:
                u = (sum(residual[:replacement]) + mass / 2) / sum(residual)
                above = verify.accept([token], [target] * 2, [drafted], [threshold * (1 + 1e-9), u])
                assert above == Verdict(0, replacement)
    assert law == pytest.approx(target, abs=1e-9)
    assert kept == pytest.approx(1 - sum(abs(x - y) for x, y in zip(target, drafted, strict=True)) / 2)


# ---------------------------------------------------------------- the coupled rule


def chi_square_limit(cells: int, tests: int) -> float:
    """A chi-square bound that `tests` honest tests pass together with probability above 1 - 1e-6 (Laurent, Massart)."""
    x = math.log(tests / 1e-6)
    return cells - 1 + 2 * math.sqrt((cells - 1) * x) + 2 * x


def chi_square(counts: Tensor, probs: Tensor) -> float:
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0].double() * counts.sum()
    return float(((counts[probs > 0] - expected) ** 2 / expected).sum())


FILTERS: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"temperature": 0.3}]


@pytest.mark.parametrize("setting", FILTERS)
def test_choices_have_the_target_law(setting: dict[str, Any]) -> None:
    n = 40_000
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, 1.2, -3.0])
    for seed in (1, 2**64 - 1):
        params = SamplingParams(**{"temperature": 0.9, "seed": seed, **setting})
        tokens = verify.choose(logits.expand(n, -1), params, position=17)
        counts = torch.bincount(torch.tensor(tokens), minlength=6)
        assert chi_square(counts, verify.probabilities(logits[None], params)[0]) < chi_square_limit(6, 10)
        pairs = torch.tensor(tokens[0::2]) * 6 + torch.tensor(tokens[1::2])  # successive positions are independent
        probs = verify.probabilities(logits[None], params)[0].double()
        joint = torch.bincount(pairs, minlength=36)
        assert chi_square(joint, torch.outer(probs, probs).flatten()) < chi_square_limit(36, 10)


def test_control_another_law_is_noticed() -> None:
    tokens = verify.choose(torch.zeros(40_000, 3), COUPLED, 0)
    counts = torch.bincount(torch.tensor(tokens), minlength=3)
    assert chi_square(counts, torch.tensor([0.31, 0.345, 0.345])) > chi_square_limit(3, 10)


def test_choices_depend_on_seed_and_position_alone() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=2.0, seed=5, top_p=0.9)
    together = verify.choose(logits, params, position=30)
    assert together == [verify.choose(logits[i : i + 1], params, 30 + i)[0] for i in range(8)]
    assert together == verify.choose(logits, params, position=30)
    assert together != verify.choose(logits, SamplingParams(temperature=2.0, seed=6, top_p=0.9), position=30)
    assert together != verify.choose(logits, params, position=31)


@pytest.mark.parametrize("tv", [0.1, 0.4, 0.8])
def test_coupled_drafts_match_as_often_as_promised(tv: float) -> None:
    n = 20_000
    p, q = torch.tensor([0.5 + tv / 2, 0.5 - tv / 2]), torch.tensor([0.5 - tv / 2, 0.5 + tv / 2])
    ours = verify.choose(p.log().expand(n, -1), COUPLED, 0)
    theirs = verify.choose(q.log().expand(n, -1), COUPLED, 0)
    matched = sum(a == b for a, b in zip(ours, theirs, strict=True)) / n
    assert matched > (1 - tv) / (1 + tv) - 4 * math.sqrt(0.25 / n)
    single = [verify.draft_token(q.log(), COUPLED, position) for position in range(50)]
    assert [token for token, _ in single] == theirs[:50]
    assert all(probs is None for _, probs in single)


def test_a_peaked_target_accepts_nearly_as_in_greedy_decoding() -> None:
    """cases.md 12: acceptance must not vanish as soon as the temperature is above 0."""
    logits = torch.randn(201, 64, generator=torch.Generator().manual_seed(3)) * 2
    logits[:, 7] = logits.amax(-1) + 1.0
    for acceptance in ("coupled", "rejection"):
        params = SamplingParams(temperature=0.1, seed=1, acceptance=acceptance)
        assert verify.verify(Draft((7,) * 8), logits[:9], params, 0).accepted == 8
        kept = [verify.verify(Draft((7,)), logits[i : i + 2], params, i).accepted for i in range(100)]
        assert sum(kept) > 97


# ---------------------------------------------------------------- the p/q rule with keyed randomness


def test_draft_tokens_are_drawn_from_the_distribution_handed_over() -> None:
    """cases.md 8, 9: also from bfloat16 logits, under every filter."""
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, 1.2, -3.0]).bfloat16()
    for setting in FILTERS:
        params = SamplingParams(**{"temperature": 0.9, "acceptance": "rejection", **setting})
        tokens, probs = [], torch.empty(0)
        for position in range(600):
            token, handed = verify.draft_token(logits, params, position)
            assert handed is not None
            tokens.append(token)
            probs = handed
        assert torch.equal(probs, verify.probabilities(logits[None], params)[0])
        counts = torch.bincount(torch.tensor(tokens), minlength=6)
        assert chi_square(counts, probs) < chi_square_limit(6, 5)


def test_start_gives_a_fresh_draft_draw() -> None:
    logits = torch.zeros(1000)
    draws = {verify.draft_token(logits, REJECTION, 50, start)[0] for start in range(20)}
    assert len(draws) > 15
    assert verify.draft_token(logits, REJECTION, 50, 3)[0] == verify.draft_token(logits, REJECTION, 50, 3)[0]
    coupled = {verify.draft_token(logits, COUPLED, 50, start)[0] for start in range(20)}
    assert len(coupled) == 1


@pytest.mark.parametrize("keyed_alike", [False, True])
def test_law_of_keyed_rejection(keyed_alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft, acceptance and last draw all from Philox. Keyed alike (vllm-project/vllm#47386) the law is wrong."""
    if keyed_alike:
        plain = verify.uniforms

        def alike(seed: int, positions: Any, purpose: verify.Purpose, *args: Any, **kwargs: Any) -> Tensor:
            return plain(seed, positions, verify.Purpose.ACCEPT, *args, **kwargs)

        monkeypatch.setattr("surefoot.verify.acceptance.uniforms", alike)
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    logits = p.log().expand(2, -1)
    counts = torch.zeros(3)
    for position in range(800):
        token, probs = verify.draft_token(q.log(), REJECTION, position)
        assert probs is not None
        verdict = verify.verify(Draft((token,), probs[None]), logits, REJECTION, position)
        counts[token if verdict.accepted else verdict.token] += 1
    assert (chi_square(counts, p) < chi_square_limit(3, 1)) is not keyed_alike


def test_verify_uses_the_documented_keys() -> None:
    """A draft token's uniform is ACCEPT at its own position; the last draw is LAST at the window's first."""
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    q = torch.randn(3, 6, generator=torch.Generator().manual_seed(3)).softmax(-1)
    for position in range(30):
        draws = [verify.uniforms(11, [position + i], verify.Purpose.ACCEPT).item() for i in range(3)]
        draws.append(verify.uniforms(11, [position], verify.Purpose.LAST).item())
        draft = (position % 6, position % 5, position % 4)
        for probs in (q, None):
            got = verify.verify(Draft(draft, probs), logits, REJECTION, position)
            assert got == verify.accept(draft, verify.probabilities(logits, REJECTION), probs, draws)


# ---------------------------------------------------------------- ties


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [3, 1000, 8192])
def test_ties_go_to_the_lowest_id(dtype: torch.dtype, vocab_size: int) -> None:
    logits = torch.zeros(4, vocab_size, dtype=dtype)
    for row, (low, high) in enumerate([(0, 1), (1, 2), (0, vocab_size - 1), (vocab_size // 2, vocab_size - 1)]):
        logits[row, [low, high]] = 2.5
    expected = [0, 1, 0, vocab_size // 2]
    assert verify.choose(logits, SamplingParams(), 0) == expected
    assert [verify.draft_token(row, SamplingParams(), 0)[0] for row in logits] == expected
    assert verify.probabilities(logits, SamplingParams()).argmax(-1).tolist() == expected
