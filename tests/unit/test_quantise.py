"""Weights of 8 bits: what the numbers stand for, and layers that are built of them."""

from __future__ import annotations

import pytest
import torch

from surefoot.kernels import quantise as module
from surefoot.kernels.linear import BlockLinear, LinearFactory
from surefoot.kernels.quantise import FLOAT8, GROUP, LARGEST, Quantised, from_blocks, merge, quantise


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
    dense = from_blocks(weight, scale, torch.float32).dense()
    for row, column in ((0, 0), (127, 128), (128, 127), (199, 299)):
        assert dense[row, column] == weight[row, column].float() * scale[row // GROUP, column // GROUP]


def test_merged_rows_keep_their_scales() -> None:
    first, second = quantise(random(3, 200)), from_blocks(random(5, 200).to(FLOAT8), random(1, 2), torch.float32)
    both = merge([first, second])
    assert isinstance(both, Quantised)
    assert torch.equal(both.dense(), torch.cat([first.dense(), second.dense()]))


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
