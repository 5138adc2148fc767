"""Weights of 8 bits: what the numbers stand for, and layers that are built of them."""

from __future__ import annotations

import pytest
import torch

from surefoot.kernels import quantise as module
from surefoot.kernels.experts import pack_experts
from surefoot.kernels.linear import BlockLinear, LinearFactory, weight_of, weights_of
from surefoot.kernels.quantise import (
    FLOAT8,
    GROUP,
    LARGEST,
    Quantised,
    Weight,
    dense_of,
    from_stored,
    in_halves,
    merge,
    quantise,
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_scaled_to_the_largest_number(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 100)  # three rows at once
    weight = (random(2, 7, 30) * torch.arange(7)[:, None]).to(dtype)  # a row of zeros among them
    cut = quantise(weight)
    assert cut.weight.dtype == FLOAT8
    assert cut.scale.shape == (2, 7, 1)
    assert cut.weight.float().abs().amax(-1)[:, 1:].eq(LARGEST).all()
    dense = cut.dense()
    assert dense.dtype == dtype
    assert not dense[:, 0].any()
    # Three bits of mantissa, and below the smallest normal number steps of 2^-9.
    error = (dense.float() - weight.float()).abs()
    assert (error <= 0.07 * weight.float().abs() + 2.0**-10 * cut.scale).all()
    assert error.any()


def test_squares_of_published_checkpoints() -> None:
    weight, scale = random(200, 300).to(FLOAT8), random(2, 3, seed=1).abs()
    dense = from_stored(weight, scale, torch.float32).dense()
    for row, column in ((0, 0), (127, 128), (128, 127), (199, 299)):
        assert dense[row, column] == weight[row, column].float() * scale[row // GROUP, column // GROUP]


def test_numbers_in_halves_stand_for_the_same() -> None:
    for weight in (
        quantise(random(3, 5, 2 * GROUP)),
        from_stored(random(7, 384).to(FLOAT8), random(1, 3), torch.float32),
    ):
        halved = in_halves(weight)
        assert halved.halved
        assert in_halves(halved) is halved
        numbers, lanes = weight.weight.float(), halved.weight.float()
        assert torch.equal(lanes[..., 0::2][..., :64], numbers[..., :64])
        assert torch.equal(lanes[..., 1::2][..., :64], numbers[..., 64:GROUP])
        assert torch.equal(halved.dense(), weight.dense())
        assert torch.equal(halved.unbind()[1].dense(), weight.dense()[1])
    broken = quantise(random(3, 200))
    assert in_halves(broken) is broken


def test_merged_rows_keep_their_scales() -> None:
    first, second = quantise(random(3, 200)), from_stored(random(5, 200).to(FLOAT8), random(1, 2), torch.float32)
    both = merge([first, second])
    assert isinstance(both, Quantised)
    assert torch.equal(both.dense(), torch.cat([first.dense(), second.dense()]))


def test_among_whole_rows_all_are_whole() -> None:
    first, second = quantise(random(3, 200).bfloat16()), random(5, 200, seed=1).bfloat16()
    both = merge([first, second])
    assert isinstance(both, torch.Tensor)
    assert torch.equal(both, torch.cat([first.dense(), second]))


def stored(kind: str, *shape: int, seed: int) -> Weight:
    """Random numbers with scales for squares, for rows or for the whole; or a plain tensor."""
    numbers = random(*shape, seed=seed)
    if kind == "plain":
        return numbers
    *lead, rows, columns = shape
    counts = {"squares": (-(-rows // GROUP), -(-columns // GROUP)), "rows": (rows, 1), "whole": (1, 1)}[kind]
    scale = 0.5 + torch.rand(*lead, *counts, generator=torch.Generator().manual_seed(seed))
    return from_stored(numbers.to(FLOAT8), scale, torch.float32)


KINDS = ("squares", "rows", "whole", "plain")


@pytest.mark.parametrize("routed", KINDS)
@pytest.mark.parametrize("shared", KINDS)
@pytest.mark.parametrize("widths", [(250, 140), (60, 300), (60, 100)], ids=str)
def test_packed_experts_stand_for_what_they_did(routed: str, shared: str, widths: tuple[int, int]) -> None:
    width, shared_width = widths
    tensors = {
        "experts.gate_up_proj": stored(routed, 3, 2 * width, 150, seed=1),
        "experts.down_proj": stored(routed, 3, 150, width, seed=2),
        "shared_expert.gate_proj.weight": stored(shared, shared_width, 150, seed=3),
        "shared_expert.up_proj.weight": stored(shared, shared_width, 150, seed=4),
        "shared_expert.down_proj.weight": stored(shared, 150, shared_width, seed=5),
        "gate.weight": random(3, 150, seed=6),
        "shared_expert_gate.weight": random(1, 150, seed=7),
    }
    plain = {name: dense_of(tensor) for name, tensor in tensors.items()}
    found = pack_experts(tensors.pop, lambda weight: weight)
    expected = pack_experts(plain.pop, lambda weight: weight)
    assert not tensors
    for ours, theirs in ((found.gate_up, expected.gate_up), (found.down, expected.down)):
        assert isinstance(ours, Quantised) == ("plain" not in (routed, shared))
        assert torch.equal(dense_of(ours), dense_of(theirs))
    assert torch.equal(found.router, expected.router)


@pytest.mark.parametrize("kinds", [("squares", "squares"), ("squares", "plain", "plain"), ("rows", "plain", "squares")])
def test_layers_beside_one_another(kinds: tuple[str, ...]) -> None:
    """As few as leave every weight as it is, and the sums of one layer of plain weights."""
    parts = [stored(kind, 30 + i, 200, seed=i) for i, kind in enumerate(kinds)]
    layer = LinearFactory(pack=False).beside(*parts)
    weights = weights_of(layer)
    assert [isinstance(weight, Quantised) for weight in weights] == [kind != "plain" for kind in dict.fromkeys(kinds)]
    assert weights[-1] is parts[-1] or len(set(kinds)) < 3
    x = random(4, 200, seed=9)
    expected = x @ torch.cat([dense_of(part) for part in parts]).T
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.bulk(x), expected, rtol=1e-4, atol=1e-4)
    outputs = torch.tensor([1, 40, 0])
    torch.testing.assert_close(dense_of(layer.rows(outputs)), torch.cat([dense_of(part) for part in parts])[outputs])
    cut = LinearFactory(pack=False, quantise=True)
    assert isinstance(weight_of(cut.beside(*parts)), Quantised)
    assert isinstance(weight_of(cut(*parts)), Quantised)


def test_a_factory_cuts_what_it_merges() -> None:
    first, second = random(3, 40), random(5, 40, seed=1)
    factory = LinearFactory(pack=False, quantise=True)
    layer = factory(first, second)
    assert isinstance(layer, BlockLinear)
    assert isinstance(layer.weight, Quantised)
    x = random(4, 40, seed=2)
    expected = x @ torch.cat([quantise(first).dense(), quantise(second).dense()]).T
    for out in (layer(x), layer.bulk(x)):
        torch.testing.assert_close(out, expected)
    whole = factory.whole(first)
    assert isinstance(whole, BlockLinear)
    assert whole.weight is first
