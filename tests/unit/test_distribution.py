import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TypicalLogitsWarper

from surefoot.errors import NumericalError
from surefoot.sampling import SamplingParams
from surefoot.verify.distribution import probabilities, process
from tests.fakes import assert_same_kept

NEG = -math.inf


def reference(row: list[float], params: SamplingParams) -> list[float]:
    """The definition, in Python floats: the distribution after temperature, top_k, top_p, min_p."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if params.greedy:
        return [float(token == order[0]) for token in range(len(row))]
    weights = [math.exp((value - row[order[0]]) / params.temperature) for value in row]
    kept = order[: params.top_k] if params.top_k else order
    total, before, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if before < params.top_p * total:
            nucleus.append(token)
        before += weights[token]
    kept = [token for token in nucleus if weights[token] >= params.min_p]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(row))]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-12, 12), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.integers(0, 13),
    st.sampled_from([1.0, 0.97, 0.63, 0.31, 1e-9]),
    st.sampled_from([0.0, 0.037, 0.41, 1.0]),
)
def test_agrees_with_the_definition(
    values: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = [value / 3 for value in values]  # integers: many ties
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = probabilities(torch.tensor([row]), params)[0].tolist()
    assert probs == pytest.approx(reference(row, params), abs=1e-6)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"typical_p": 0.6},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"top_k": 50, "top_p": 0.9, "typical_p": 0.5, "min_p": 0.3},
    {"temperature": 0.0, "top_k": 2},
]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_row_has_the_same_bits_alone_and_in_company(setting: dict[str, Any], dtype: torch.dtype) -> None:
    params = SamplingParams(**{"temperature": 0.7, **setting})
    logits = (torch.randn(6, 1001, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    together = process(logits, params)
    assert together.dtype == torch.float32
    assert probabilities(logits, params).sum(-1).tolist() == pytest.approx([1.0] * 6, abs=1e-5)
    for row in range(6):
        assert torch.equal(together[row], process(logits[row : row + 1], params)[0])


def test_filters_that_are_off_leave_the_softmax() -> None:
    logits = torch.randn(3, 9)
    assert torch.allclose(probabilities(logits, SamplingParams(temperature=1.0)), logits.softmax(-1))
    assert torch.allclose(probabilities(logits, SamplingParams(temperature=0.4)), (logits / 0.4).softmax(-1))


def test_ties_at_the_border_keep_the_lowest_ids() -> None:
    row = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]])
    top_k = process(row, SamplingParams(temperature=1.0, top_k=3))
    assert top_k.tolist() == [[-1.0, 0.0, NEG, 0.0, NEG]]
    flat = torch.zeros(1, 10, dtype=torch.bfloat16)
    assert process(flat, SamplingParams(temperature=1.0, top_p=0.35)).isfinite().tolist() == [[True] * 4 + [False] * 6]
    assert process(flat, SamplingParams(temperature=1.0, top_k=1)).isfinite().tolist() == [[True] + [False] * 9]
    assert process(flat, SamplingParams()).isfinite().tolist() == [[True] + [False] * 9]


def test_top_p_is_taken_over_what_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of (4/7, 3/7) the first reaches 0.5 alone; of the whole row it would not reach 0.5.
    kept = process(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.5)).isfinite()
    assert kept.tolist() == [[True, False, False, False]]
    kept = process(logits, SamplingParams(temperature=1.0, top_p=0.5)).isfinite()
    assert kept.tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("top_k, min_p", [(0, 0.0), (20, 0.05)])
@pytest.mark.parametrize("vocab_size", [1001, 8192, 248_320])
def test_devices_that_round_otherwise_keep_the_same_but_at_the_border(
    vocab_size: int, top_k: int, min_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests on a GPU ask of it, asked of softmaxes that round otherwise, and of one that is wrong."""
    logits = (torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=top_k, min_p=min_p)
    expected = process(logits, params)
    softmax = torch.Tensor.softmax

    def kept_with(other: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "softmax", lambda rows, dim: other(rows, dim))
            return process(logits, params)

    assert_same_kept(kept_with(lambda rows, dim: softmax(rows.double(), dim)), expected, logits, params)
    for error in (-5e-5, 5e-5):
        moved = kept_with(lambda rows, dim: softmax(rows, dim) * (1 + error))  # noqa: B023  # called right away
        assert_same_kept(moved, expected, logits, params)
        if vocab_size == 248_320 and not top_k:
            assert not torch.equal(moved.isfinite(), expected.isfinite())  # the border itself does move
    if not top_k:
        with pytest.raises(AssertionError):
            assert_same_kept(kept_with(lambda rows, dim: softmax(rows, dim) * 1.03), expected, logits, params)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-9, 0.2, 0.55, 0.9, 0.999]), st.integers(2, 40), st.booleans())
def test_typical_p_is_that_of_transformers(seed: int, typical_p: float, size: int, ties: bool) -> None:
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(seed)) * 2
    logits = logits.round() if ties else logits
    logits[:, 0] = NEG
    ours = process(logits, SamplingParams(temperature=1.0, typical_p=typical_p))
    theirs = TypicalLogitsWarper(typical_p)(torch.zeros(2, 1, dtype=torch.int64), logits.double())
    if not ties:  # where two tokens are equally far from the entropy, rounding decides
        assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert ours.amax(-1).tolist() == [0.0, 0.0]
    if torch.equal(ours.isfinite(), theirs.isfinite()):
        assert torch.allclose(ours.softmax(-1), theirs.softmax(-1).float(), atol=1e-6)


def test_typical_p_by_hand() -> None:
    """The entropy of (1/2, 1/4, 1/8, 1/8) is 1.75 bits: 1/4 lies nearest to it (2 bits), then 1/2 (1 bit)."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()

    def kept(mass: float, **more: Any) -> list[bool]:
        return process(logits, SamplingParams(temperature=1.0, typical_p=mass, **more)).isfinite()[0].tolist()

    assert kept(0.2) == [False, True, False, False]
    assert kept(0.25) == [False, True, False, False]
    assert kept(0.26) == [True, True, False, False]
    assert kept(0.76) == [True] * 4
    assert kept(0.2, min_p=1.0) == [False, True, False, False]  # min_p asks the likeliest that is left
    assert kept(0.8, top_k=2) == [True, True, False, False]
    # Over what top_k left: the entropy of (2/3, 1/3) is 0.92 bits, and 0.58 lies nearer to it than 1.58.
    assert kept(0.6, top_k=2) == [True, False, False, False]


def test_excluded_tokens_stay_excluded() -> None:
    row = torch.tensor([[NEG, 0.0, NEG, -1.0]])
    for setting in SETTINGS:
        probs = probabilities(row, SamplingParams(**{"temperature": 1.0, **setting}))
        assert probs[0, 0] == probs[0, 2] == 0
        assert probs.sum().item() == pytest.approx(1.0)
    assert process(row, SamplingParams(temperature=1.0, top_k=3)).isfinite().sum() == 2


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_tiny_temperatures_become_greedy_without_overflow(temperature: float) -> None:
    row = torch.tensor([[10.0, 30.0, 29.0]])
    assert probabilities(row, SamplingParams(temperature=temperature)).tolist() == [[0.0, 1.0, 0.0]]


def test_large_logits_do_not_overflow() -> None:
    row = torch.tensor([[3e38, -3e38, 3e38]])
    assert probabilities(row, SamplingParams(temperature=0.1)).tolist() == [[0.5, 0.0, 0.5]]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("bad, found", [(math.nan, "NaN"), (math.inf, r"\+inf"), (NEG, "every token at -inf")])
def test_a_row_that_is_not_finite_names_its_position(setting: dict[str, Any], bad: float, found: str) -> None:
    logits = torch.zeros(3, 5)
    logits[1] = bad if bad == NEG else torch.tensor([0.0, bad, 0.0, NEG, 0.0])
    with pytest.raises(NumericalError, match=f"position 42: expected finite numbers or -inf, found {found}"):
        process(logits, SamplingParams(**{"temperature": 1.0, **setting}), position=41)


def test_logits_are_not_changed() -> None:
    logits = torch.randn(2, 8)
    before = logits.clone()
    process(logits, SamplingParams(temperature=0.5, top_k=2, top_p=0.5, min_p=0.5))
    assert torch.equal(logits, before)
