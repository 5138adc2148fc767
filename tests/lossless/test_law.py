"""The promise, on targets small enough to check it whole.

The exact law of `engine.loop.step` at temperature > 0 under the p/q rule is computed: `Dice` walks through every
outcome of the drafter's draws and of verification's uniforms. Greedy and coupled decoding are compared token by token
with plain decoding. Cases are those of docs/acceptance.md's two rules and of public bug reports, by their number.

One long file: every drafter, rule and control is put to the one enumeration of the law.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot import verify
from surefoot.drafters import mtp
from surefoot.drafters.none import NoDrafter
from surefoot.engine import loop
from surefoot.errors import InputError, NumericalError
from surefoot.prove.enumeration import Dice, EveryOutcome, Law, distance, every_verdict, exact_law, loop_law
from surefoot.prove.statistics import goodness_of_fit
from surefoot.prove.table import (
    Argmax,
    Liar,
    Right,
    Row,
    Sampled,
    Scripted,
    Sometimes,
    TableTarget,
    Wrong,
    decode,
    decode_batch,
    hashed_rows,
)
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Draft, Drafter
from surefoot.verify import Rules, acceptance, probabilities
from surefoot.verify.rules import Thinking
from tests.fakes import ListGrammar, Ragged

PROMPT = (1, 2, 0, 1)
DRAFTERS: dict[str, Callable[[Row, Row], Drafter]] = {
    "right": lambda target, other: Right(target),
    "wrong": lambda target, other: Wrong(target),
    "sometimes": lambda target, other: Sometimes(target),
    "argmax": lambda target, other: Argmax(other),
    "sampled": lambda target, other: Sampled(other),
    "ragged": lambda target, other: Ragged(Sometimes(target)),
}


def rows_near(row: Row, distance: float, vocab_size: int) -> Row:
    """A drafter's rows: the target's with some of another table mixed in."""
    noise = hashed_rows(vocab_size, salt=99, scale=distance)
    return lambda prefix: row(prefix) + noise(prefix)


def plain(row: Row, vocab_size: int, params: SamplingParams, stop: tuple[int, ...] = ()) -> list[int]:
    return decode(TableTarget(row, vocab_size), NoDrafter(), params, 0, PROMPT, stop).output


# ---------------------------------------------------------------- the exact law of the p/q rule


def step_law(
    drafter: Scripted,
    params: SamplingParams,
    depth: int,
    stop: Seq[int] = (),
    every: Callable[[Dice, Scripted], Scripted] = EveryOutcome,
    **rules: Any,
) -> Law:
    """The exact law of the first three tokens that the loop puts out."""
    law = loop_law(TARGET, drafter, params, depth, PROMPT, stop, every, **rules)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-6)
    return law


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_k": 2},
    {"temperature": 1.5, "top_p": 0.8, "min_p": 0.1},
]
TARGET = hashed_rows(3, salt=1)
OTHER = hashed_rows(3, salt=2)


def params_of(setting: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_new_tokens": 3, "acceptance": "rejection", **setting, **more})


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", [Sampled(OTHER), Argmax(OTHER), Wrong(TARGET)], ids=lambda d: str(d.name))
@pytest.mark.parametrize("depth", [1, 2])
def test_exact_law_of_the_loop(drafter: Scripted, depth: int, setting: dict[str, Any]) -> None:
    """cases.md 8, 9, 10, 13: three tokens over one, two or three steps, every outcome."""
    params = params_of(setting)
    law = step_law(drafter, params, depth)
    assert distance(law, exact_law(TARGET, params, PROMPT, 3)) < 1e-5


def pulled(tokens: Seq[int], logits: Tensor) -> Tensor:
    """A processor that looks back: a token is the likelier the longer ago it last came."""
    ages = [next((age for age, old in enumerate(reversed(tokens)) if old == token), 9) for token in range(3)]
    return logits + torch.tensor(ages) * 0.7


STOP = (2,)
GRAMMAR: dict[str, Any] = {"grammar": lambda: ListGrammar([[0], [0, 1], [1, 0, 0], [1, 1]], STOP, 3)}
THINKING = {"thinking": Thinking(start=0, end=2)}  # the prompt has opened thoughts
RULED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.6}, {}),
    ({"logit_bias": {0: 1.5, 2: -0.5}, "bad_words_ids": ((1, 0), (1, 0, 1)), "temperature": 0.7, "top_k": 2}, {}),
    ({"typical_p": 0.9, "frequency_penalty": 1.5, "allowed_token_ids": (0, 2)}, {}),
    ({"min_new_tokens": 2, "processors": (pulled,)}, {"stop": STOP}),
    ({"thinking_budget": 1, "presence_penalty": 1.0}, THINKING),
    ({"presence_penalty": 1.0}, {"stop": STOP, **GRAMMAR}),
    ({"thinking_budget": 1}, {"stop": (1,), **THINKING, "grammar": lambda: ListGrammar([[0, 0], [2, 0]], (1,), 3)}),
]


class Unruled(Argmax):
    """Draws from its own rows as they are, so that the rules refuse some of its drafts."""

    def ruled(self, sequence: Sequence, prefix: tuple[int, ...]) -> Tensor:
        return self.row(prefix)[None]

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        return 0, probabilities(self.ruled(sequence, prefix), sequence.params)[0]  # `EveryOutcome` draws


@pytest.mark.parametrize("setting, rules", RULED)
@pytest.mark.parametrize(
    "drafter", [Sampled(OTHER), Argmax(OTHER), Unruled(OTHER)], ids=["sampled", "argmax", "unruled"]
)
@pytest.mark.parametrize("depth", [0, 2])
def test_exact_law_under_rules(drafter: Scripted, depth: int, setting: dict[str, Any], rules: dict[str, Any]) -> None:
    """cases.md 7, 8, 13, 14, 33: each position sees the drafts before it, in p and in q."""
    params = params_of(setting)
    law = step_law(drafter, params, depth, **rules)
    expected = exact_law(TARGET, params, PROMPT, 3, **rules)
    assert len(expected) > 1
    assert distance(law, expected) < 1e-5


@pytest.mark.parametrize("setting, rules", RULED[:2] + RULED[3:6])
def test_control_rules_that_ignore_earlier_drafts_are_noticed(
    setting: dict[str, Any], rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = params_of(setting)
    expected = exact_law(TARGET, params, PROMPT, 3, **rules)
    own = Rules.rows

    def blind(self: Rules, logits: Tensor, history: Seq[int], draft: Seq[int]) -> Tensor:
        return torch.cat([own(self, row[None], history, ()) for row in logits])

    monkeypatch.setattr(Rules, "rows", blind)
    law = step_law(Argmax(OTHER), params, 2, **rules)
    assert distance(law, expected) > 0.02


def test_control_a_drawn_draft_that_a_grammar_cuts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why `_by_grammar` leaves drawn drafts whole."""
    params, rules = params_of({}), GRAMMAR | {"stop": STOP}
    own = loop._by_grammar

    def cut(sequence: Sequence, draft: Draft, forced: tuple[int, ...], failed: loop.Failed) -> Draft:
        assert sequence.rules is not None
        count = sequence.rules.cut(sequence.tokens, draft.tokens)
        probs = None if draft.probs is None or not count else draft.probs[:count]
        return own(sequence, Draft(draft.tokens[:count], probs), forced, failed)

    monkeypatch.setattr(loop, "_by_grammar", cut)
    law = step_law(Unruled(OTHER), params, 2, **rules)
    assert distance(law, exact_law(TARGET, params, PROMPT, 3, **rules)) > 0.02


def test_exact_law_without_a_drafter() -> None:
    params = params_of({})
    assert distance(step_law(Sampled(OTHER), params, 0), exact_law(TARGET, params, PROMPT, 3)) < 1e-5


def test_control_a_drafter_that_lies_about_q_is_noticed() -> None:
    """cases.md 8: draws from one distribution, hands over another."""
    params = params_of({})
    law = step_law(Liar(OTHER, lie=TARGET), params, 2)
    assert distance(law, exact_law(TARGET, params, PROMPT, 3)) > 0.02


def test_control_softmax_q_for_an_argmax_draft_is_noticed() -> None:
    """cases.md 10."""

    class SoftArgmax(Argmax):
        def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
            return super().token(sequence, prefix)[0], self.row(prefix).softmax(-1)

    class Certain(EveryOutcome):
        def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
            return self.inner.token(sequence, prefix)

    params = params_of({})
    law = step_law(SoftArgmax(OTHER), params, 1, every=Certain)
    assert distance(law, exact_law(TARGET, params, PROMPT, 3)) > 0.02


# ---------------------------------------------------------------- drafts that end where the head is not sure


class Unsure(Scripted):
    """Drafts by the MTP drafter's own chain, over a table's rows in the place of a head's."""

    def __init__(self, row: Row, min_confidence: float, accepts: Callable[..., bool] = mtp._Chain.accepts) -> None:
        super().__init__()
        self.row, self.min_confidence, self.accepts = row, min_confidence, accepts
        self.lengths: dict[int, set[int]] = defaultdict(set)  # by the most that there may be

    def _draft(self, sequence: Sequence, depth: int) -> Draft:
        chain, hidden = mtp._Chain(sequence, depth, len(sequence.tokens) - 2, torch.zeros(1, 1)), torch.zeros(1)
        while depth and self.accepts(chain, self.row((*sequence.tokens, *chain._tokens)), hidden, self.min_confidence):
            pass
        self.lengths[depth].add(len(chain._tokens))
        return chain.draft()


def chain_law(drafter: Unsure, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> dict[Any, float]:
    """The exact law of what the loop puts out over every draw of the chain and of verification."""
    dice, law = Dice(), defaultdict[tuple[int, ...], float](float)

    def rolled(logits: Tensor, params: SamplingParams, position: int, start: int) -> tuple[int, Tensor]:
        probs = probabilities(logits[None], params)[0]
        return dice.roll(probs.tolist()), probs

    monkeypatch.setattr(mtp, "draft_token", rolled)
    with every_verdict(dice):
        for _ in dice.outcomes():
            law[tuple(decode(TableTarget(TARGET, 3), drafter, params, 3, PROMPT).output)] += dice.chance
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-6)
    return law


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("min_confidence", [0.0, 0.3, 0.5])
def test_exact_law_of_drafts_that_end_by_confidence(
    min_confidence: float, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params, drafter = params_of(setting, max_new_tokens=4), Unsure(OTHER, min_confidence)
    law = chain_law(drafter, params, monkeypatch)
    assert distance(law, exact_law(TARGET, params, PROMPT, 4)) < 1e-5
    assert drafter.lengths[3] == ({2, 3} if min_confidence else {3})  # it depends on what was drawn before


def test_control_a_chain_that_drops_what_it_drew_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cut-off, but by the drawn token's own probability, and in front of it."""

    def picky(chain: mtp._Chain, logits: Tensor, hidden: Tensor, min_confidence: float) -> bool:
        more = mtp._Chain.accepts(chain, logits, hidden, 0.0)
        if chain._probs[-1][chain._tokens[-1]] >= min_confidence:
            return more
        chain._tokens.pop()
        chain._probs.pop()
        return False

    params = params_of({})
    law = chain_law(Unsure(OTHER, 0.4, picky), params, monkeypatch)
    assert distance(law, exact_law(TARGET, params, PROMPT, 3)) > 0.02


# ---------------------------------------------------------------- laws with the engine's own randomness


def sampled_law(drafter: Drafter, acceptance_rule: str, seeds: int, depth: int = 2) -> dict[Any, int]:
    counts: dict[Any, int] = defaultdict(int)
    for seed in range(seeds):
        params = params_of({}, seed=seed, acceptance=acceptance_rule, max_new_tokens=2)
        counts[tuple(decode(TableTarget(TARGET, 3), drafter, params, depth, PROMPT).output)] += 1
    return counts


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_law_over_many_seeds(rule: str) -> None:
    """cases.md 11, 18: seeds 0, 1, 2, ... are independent, and so are a seed's own draws."""
    law = exact_law(TARGET, params_of({}), PROMPT, 2)
    assert goodness_of_fit(sampled_law(Sampled(OTHER), rule, 1200), law) > 1e-6


@pytest.mark.parametrize("kind", ["liar", "keyed alike"])
def test_control_many_seeds_notice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    law = exact_law(TARGET, params_of({}), PROMPT, 2)
    drafter = Liar(OTHER, lie=TARGET) if kind == "liar" else Sampled(OTHER)
    if kind == "keyed alike":
        own = verify.uniforms

        def alike(seed: int, positions: Any, purpose: Any, start: int = 0, device: Any = "cpu") -> Tensor:
            return own(seed, positions, verify.Purpose.ACCEPT, 0, device)

        monkeypatch.setattr(acceptance, "uniforms", alike)
    assert goodness_of_fit(sampled_law(drafter, "rejection", 1200), law) < 1e-6


# ---------------------------------------------------------------- token by token

VOCAB = 7
IDENTITY = [
    SamplingParams(max_new_tokens=30),
    SamplingParams(max_new_tokens=30, temperature=1.0, seed=3),
    SamplingParams(max_new_tokens=30, temperature=0.7, top_p=0.9, top_k=4, min_p=0.05, seed=2**64 - 1),
]
BIG = hashed_rows(VOCAB, salt=5)
NEAR = rows_near(BIG, 1.0, VOCAB)


@pytest.mark.parametrize("params", IDENTITY, ids=["greedy", "coupled", "coupled filtered"])
@pytest.mark.parametrize("depth", range(1, 9))
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_same_tokens_as_plain_decoding(name: str, depth: int, params: SamplingParams) -> None:
    target = TableTarget(BIG, VOCAB)
    run = decode(target, DRAFTERS[name](BIG, NEAR), params, depth, PROMPT)
    assert run.output == plain(BIG, VOCAB, params)
    accepted, drafted = sum(r.accepted for r in run.records), sum(len(r.draft.tokens) for r in run.records)
    assert accepted + len(run.records) >= 30  # every step adds one token of its own, but for a cut
    if name == "right":
        assert len(run.records) == math.ceil(30 / (depth + 1))
        assert accepted >= drafted - 1
    if name == "wrong":
        assert accepted == 0
        assert len(run.records) == 30


@pytest.mark.parametrize("params", IDENTITY, ids=["greedy", "coupled", "coupled filtered"])
def test_the_same_tokens_where_drafts_end_by_confidence(params: SamplingParams) -> None:
    drafter = Unsure(NEAR, 0.3)
    assert decode(TableTarget(BIG, VOCAB), drafter, params, 5, PROMPT).output == plain(BIG, VOCAB, params)
    assert len(drafter.lengths[5]) > 2


@pytest.mark.parametrize("hidden", [False, True])
def test_one_token_at_a_time_means_one_verify_each(hidden: bool) -> None:
    target = TableTarget(BIG, VOCAB, hidden=hidden)
    assert len(decode(target, Right(BIG), SamplingParams(max_new_tokens=9), 0, PROMPT).records) == 9
    assert target.verified == 9
    assert decode(target, Right(BIG), SamplingParams(max_new_tokens=9), 4, PROMPT[:1]).output  # a prompt of one token


def test_always_wrong_over_a_long_text() -> None:
    """cases.md 21, on the table."""
    params = SamplingParams(max_new_tokens=500)
    rows = hashed_rows(VOCAB, salt=8, order=4)
    assert decode(TableTarget(rows, VOCAB), Wrong(rows), params, 3, PROMPT).output == plain(rows, VOCAB, params)


@pytest.mark.parametrize("params", IDENTITY, ids=["greedy", "coupled", "coupled filtered"])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8])
def test_the_budget_is_met_exactly(budget: int, name: str, params: SamplingParams) -> None:
    """cases.md 3, 4: without end-of-sequence ids the output has the budget's length, at every depth."""
    params = SamplingParams(**{**vars(params), "max_new_tokens": budget})
    expected = plain(BIG, VOCAB, params)
    for depth in (1, 4, 8):
        run = decode(TableTarget(BIG, VOCAB), DRAFTERS[name](BIG, NEAR), params, depth, PROMPT)
        assert run.output == expected
        assert len(run.output) == budget
        assert run.sequence.finish_reason == "length"
        assert all(len(record.draft.tokens) < budget for record in run.records)


@pytest.mark.parametrize("params", IDENTITY, ids=["greedy", "coupled", "coupled filtered"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_first_of_several_stop_ids_ends_the_output(name: str, params: SamplingParams) -> None:
    """cases.md 1: as first token, inside a draft, as replacement and as bonus token."""
    free = plain(BIG, VOCAB, params)
    for stop in itertools.combinations(range(VOCAB), 2):
        ends = [i for i, token in enumerate(free) if token in stop]
        expected = free[: ends[0] + 1] if ends else free
        for depth in (1, 3, 8):
            run = decode(TableTarget(BIG, VOCAB), DRAFTERS[name](BIG, NEAR), params, depth, PROMPT, stop)
            assert run.output == expected
            assert run.sequence.finish_reason == ("stop" if ends else "length")
            assert sum(record.emitted for record in run.records) == len(expected)
            assert all(0 <= record.accepted <= len(record.draft.tokens) for record in run.records)


def test_a_stop_inside_an_accepted_chunk() -> None:
    """cases.md 2: the target wants 10 11 2 20 21 22, 2 stops, the budget is 5."""
    text = [10, 11, 2, 20, 21, 22, 0]

    def row(prefix: tuple[int, ...]) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(text[min(len(prefix) - 1, 6)]), 30).float() * 50

    for params in (SamplingParams(max_new_tokens=5), params_of({}, max_new_tokens=5)):
        run = decode(TableTarget(row, 30), Right(row), params, 5, (1,), stop=(2,))
        assert run.output == [10, 11, 2]
        assert run.sequence.finish_reason == "stop"
        assert [(record.emitted, record.accepted, record.verdict.accepted) for record in run.records] == [(3, 3, 4)]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_acceptance_at_a_low_temperature_is_close_to_greedy(rule: str) -> None:
    """cases.md 12."""
    peaked = hashed_rows(VOCAB, salt=5, scale=6.0)
    near = rows_near(peaked, 0.3, VOCAB)

    def rate(params: SamplingParams) -> float:
        records = decode(TableTarget(peaked, VOCAB), Sampled(near), params, 3, PROMPT).records
        return sum(r.accepted for r in records) / sum(len(r.draft.tokens) for r in records)

    greedy = rate(SamplingParams(max_new_tokens=100))
    assert greedy > 0.8
    warm = params_of({}, temperature=0.1, seed=4, acceptance=rule, max_new_tokens=100)
    assert abs(rate(warm) - greedy) < 0.15


def test_a_greedy_request_among_sampled_ones() -> None:
    """cases.md 15, 18: each request's tokens are those it gets alone, whatever its neighbours."""
    requests = [
        ((1, 2), SamplingParams(max_new_tokens=20)),
        ((1, 2), SamplingParams(max_new_tokens=25, temperature=1.0, seed=1)),
        ((1, 2), SamplingParams(max_new_tokens=25, temperature=1.0, seed=2)),
        ((3,), SamplingParams(max_new_tokens=12, temperature=0.9, seed=1, acceptance="rejection")),
        ((1, 2), SamplingParams(max_new_tokens=25, temperature=1.0, seed=1)),
    ]
    runs = decode_batch(TableTarget(BIG, VOCAB), Sampled(NEAR), requests, 3)
    for (prompt, params), run in zip(requests, runs, strict=True):
        assert run.output == decode(TableTarget(BIG, VOCAB), Sampled(NEAR), params, 3, prompt).output
    assert runs[1].output == runs[4].output
    assert runs[1].output != runs[2].output


def test_draws_do_not_repeat_from_step_to_step() -> None:
    """behaviour.md, defect 9: on a flat target a seed that starts anew every step would repeat itself."""
    for rule in ("coupled", "rejection"):
        params = params_of({}, acceptance=rule, max_new_tokens=60, seed=9)
        output = decode(TableTarget(lambda _: torch.zeros(1000), 1000), NoDrafter(), params, 0, PROMPT).output
        assert len(set(output)) > 50


def test_a_banned_token_never_appears() -> None:
    """cases.md 13: a logit of -inf in the target's rows, and a drafter that loves the token."""

    def row(prefix: tuple[int, ...]) -> Tensor:
        return BIG(prefix).index_fill(0, torch.tensor([4]), -math.inf)

    def loving(prefix: tuple[int, ...]) -> Tensor:
        return BIG(prefix).index_fill(0, torch.tensor([4]), 3.0)

    for rule, drafter in itertools.product(("coupled", "rejection"), (Sampled(loving), Argmax(loving))):
        params = params_of({}, acceptance=rule, max_new_tokens=100)
        run = decode(TableTarget(row, VOCAB), drafter, params, 3, PROMPT)
        assert 4 not in run.output
        assert any(4 in record.draft.tokens for record in run.records)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        params_of({}),
        params_of({}, acceptance="coupled"),
        SamplingParams(presence_penalty=1.0, allowed_token_ids=(1, 2)),
        params_of({"repetition_penalty": 1.2, "typical_p": 0.5}),
    ],
)
def test_a_row_of_nan_is_an_error_that_names_the_position(params: SamplingParams) -> None:
    """cases.md 16: nothing is emitted from such a window."""

    def row(prefix: tuple[int, ...]) -> Tensor:
        return torch.full((VOCAB,), math.nan) if len(prefix) == 6 else BIG(prefix)

    with pytest.raises(NumericalError, match="position 6"):
        decode(TableTarget(row, VOCAB), Argmax(BIG), params, 3, PROMPT)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_placeholder_ids_never_reach_the_target(token: int) -> None:
    """cases.md 17."""

    class Placeholder(Argmax):
        def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
            return token, None

    target = TableTarget(BIG, VOCAB)
    with pytest.raises(InputError, match=rf"drafter 'argmax': tokens\[0\]: expected .* to {VOCAB - 1}, found {token}"):
        decode(target, Placeholder(BIG), SamplingParams(), 2, PROMPT)
    assert target.verified == 0
