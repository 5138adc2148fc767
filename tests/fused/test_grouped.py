"""The mixture of experts for many rows against its reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.kernels.fused.grouped import mix_experts, mix_experts_reference, tile_rows
from surefoot.kernels.quantise import FLOAT8, Weight, from_stored, quantise

HIDDEN, WIDTH, EXPERTS = 70, 37, 6  # no multiples of a tile's


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(kind: str, dtype: torch.dtype, device: torch.device, hidden: int, width: int) -> tuple[Weight, Weight]:
    """gate_up and down: plain, or in 8 bits with scales for rows or squares."""
    made: list[Weight] = []
    for seed, shape in enumerate(((EXPERTS, 2 * width, hidden), (EXPERTS, hidden, width))):
        plain = (2 * noise(*shape, seed=seed) / shape[-1] ** 0.5).to(device, dtype)
        if kind == "plain":
            made.append(plain)
        elif kind == "rows":
            made.append(quantise(plain))
        else:
            squares = noise(EXPERTS, -(-shape[1] // 128), -(-shape[2] // 128), seed=seed + 5).abs() + 0.3
            made.append(from_stored(plain.to(FLOAT8), squares.to(device), dtype))
    return made[0], made[1]


def choices(rows: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random ones, none of expert 4, the last expert in every row."""
    score = noise(rows, EXPERTS - 1, seed=9)
    score[:, 4] = -torch.inf
    chosen = torch.cat([score.topk(count, dim=-1).indices, torch.full((rows, 1), EXPERTS - 1)], dim=1)
    return chosen.to(device), noise(rows, count + 1, seed=3).to(device)


def compare(x: Tensor, pair: tuple[Weight, Weight], chosen: Tensor, share: Tensor, tolerance: float) -> Tensor:
    expected, found = (torch.full_like(x, torch.nan) for _ in range(2))
    mix_experts_reference(x, *pair, chosen, share, expected)
    mix_experts(x, *pair, chosen, share, found)
    assert expected.float().abs().mean() > 0.2  # there is something to see
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
    return found


# bfloat16 is that loose for the interpreter, which cuts it short instead of rounding.
TYPES = [(torch.float32, 2e-5), (torch.float16, 1e-2), (torch.bfloat16, 0.15)]


@pytest.mark.parametrize("dtype, tolerance", TYPES, ids=str)
@pytest.mark.parametrize("rows, count", [(1, 1), (3, 2), (50, 4)])
def test_parity(device: torch.device, rows: int, count: int, dtype: torch.dtype, tolerance: float) -> None:
    pair = weights("plain", dtype, device, HIDDEN, WIDTH)
    compare(noise(rows, HIDDEN, seed=7).to(device, dtype), pair, *choices(rows, count, device), tolerance)


@pytest.mark.parametrize("dtype, tolerance", TYPES[:2], ids=str)
@pytest.mark.parametrize("kind", ["rows", "squares"])
def test_parity_with_weights_in_8_bits(device: torch.device, kind: str, dtype: torch.dtype, tolerance: float) -> None:
    pair = weights(kind, dtype, device, 150, 140)
    compare(noise(9, 150, seed=7).to(device, dtype), pair, *choices(9, 2, device), tolerance)


@pytest.mark.parametrize("sizes", [(64, 32), (128, 64), (33, 129)], ids=str)
def test_parity_of_sizes(device: torch.device, sizes: tuple[int, int]) -> None:
    pair = weights("plain", torch.float32, device, *sizes)
    compare(noise(20, sizes[0], seed=7).to(device), pair, *choices(20, 2, device), 2e-5)


@pytest.mark.parametrize("rows", [40, 300])
def test_all_rows_choose_the_same(device: torch.device, rows: int) -> None:
    """One expert with many tiles, the others with none."""
    chosen = torch.full((rows, 1), 3, device=device)
    pair = weights("plain", torch.float32, device, HIDDEN, WIDTH)
    x = noise(rows, HIDDEN, seed=7).to(device)
    compare(x, pair, chosen, torch.ones(rows, 1, device=device), 2e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's arithmetic is numpy's
def test_neighbours_that_are_not_numbers(device: torch.device) -> None:
    pair = weights("plain", torch.float32, device, HIDDEN, WIDTH)
    chosen, share = choices(20, 2, device)
    x = noise(20, HIDDEN, seed=7).to(device)
    expected = compare(x, pair, chosen, share, 2e-5)
    x[4:9] = torch.nan
    found = torch.empty_like(x)
    mix_experts(x, *pair, chosen, share, found)
    kept = [*range(4), *range(9, 20)]
    assert torch.equal(found[kept], expected[kept])


def test_tiles_are_as_large_as_pays() -> None:
    assert [tile_rows(rows, 257) for rows in (9, 1800, 36_864, 73_728, 10**7)] == [16, 16, 64, 128, 128]
    for rows in (1, 100, 5000):  # every choice has a tile, however the experts share them
        size = tile_rows(rows, 5)
        for each in range(rows // 4 + 1):
            assert sum(-(-count // size) for count in (rows - 4 * each, *[each] * 4)) <= rows // size + 5
