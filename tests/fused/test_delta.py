"""The fused DeltaNet window: against its reference, and against itself token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.kernels.fused.delta import DeltaState, DeltaWeights, delta_window, delta_window_reference

HEADS = [(1, 1), (2, 4), (3, 9)]
DK, DV, WIDTH, LANES, TAPE = 16, 32, 4, 32, 5


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Case:
    def __init__(self, heads: tuple[int, int], device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        key_heads, value_heads = heads
        self.channels = 2 * key_heads * DK + value_heads * DV
        self.columns = self.channels + value_heads * DV + 2 * LANES
        self.width, self.device, self.dtype = value_heads * DV, device, dtype
        self.weights = DeltaWeights(
            random(WIDTH, self.channels, seed=1).to(device),
            -random(value_heads, seed=2).abs().to(device),
            random(value_heads, seed=3).to(device),
            (1 + 0.1 * random(DV, seed=4)).to(device),
            1e-6,
            LANES,
        )
        self.cache = DeltaState.allocate(3, heads, (DK, DV), self.channels, WIDTH, TAPE, dtype, device)
        for tensor in (
            self.cache.keys,
            self.cache.queries,
            self.cache.values,
            self.cache.deltas,
            self.cache.gates,
            self.cache.ring,
        ):
            tensor.fill_(torch.nan)  # nothing may be read that was not written
        self.length = torch.zeros(3, dtype=torch.int32, device=device)
        self.replay = torch.zeros(3, dtype=torch.int32, device=device)

    def run(self, function: object, slots: list[int], merged: Tensor, window: int) -> Tensor:
        out = torch.full((merged.shape[0], self.width), torch.nan, dtype=self.dtype, device=self.device)
        table = torch.tensor(slots, dtype=torch.int32, device=self.device)
        function(merged, self.weights, self.cache, table, self.length, self.replay, out, window=window)  # type: ignore[operator]
        return out

    def commit(self, slot: int, keep: int) -> None:
        self.length[slot] += keep
        self.replay[slot] = keep


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_parity(device: torch.device, heads: tuple[int, int]) -> None:
    ours, theirs = Case(heads, device), Case(heads, device)
    for step, (window, keeps) in enumerate([(3, (2, 3)), (1, (1, 1)), (5, (1, 4)), (2, (2, 1))]):
        merged = random(2 * window, ours.columns, seed=10 + step).to(device)
        found = ours.run(delta_window, [2, 0], merged, window)
        expected = theirs.run(delta_window_reference, [2, 0], merged, window)
        assert (found - expected).norm() / expected.norm() < 1e-5
        assert (ours.cache.state - theirs.cache.state).abs().max() < 1e-5
        for slot, keep in zip((2, 0), keeps, strict=True):
            ours.commit(slot, keep)
            theirs.commit(slot, keep)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_window_is_its_tokens_one_by_one(device: torch.device, heads: tuple[int, int], dtype: torch.dtype) -> None:
    plain, windowed = Case(heads, device, dtype), Case(heads, device, dtype)
    position = 0
    for window, keep in [(4, 2), (1, 1), (5, 5), (3, 1), (5, 3), (2, 2)]:
        merged = random(window, plain.columns, seed=position + window).to(dtype).to(device)
        merged[:keep] = torch.stack([random(plain.columns, seed=100 + position + i) for i in range(keep)])
        together = windowed.run(delta_window, [1], merged, window)
        for i in range(keep):
            alone = plain.run(delta_window, [1], merged[i : i + 1], 1)
            assert torch.equal(alone[0], together[i])
            plain.commit(1, 1)
        windowed.commit(1, keep)
        position += keep
    last = random(1, plain.columns, seed=99).to(dtype).to(device)
    assert torch.equal(plain.run(delta_window, [1], last, 1), windowed.run(delta_window, [1], last, 1))
    assert torch.equal(plain.cache.state[1], windowed.cache.state[1])


def test_neighbours_and_empty_places_do_no_harm(device: torch.device) -> None:
    alone, beside = Case((2, 4), device), Case((2, 4), device)
    for step in range(3):
        merged = random(2, alone.columns, seed=step).to(device)
        other = random(2, alone.columns, seed=50 + step).to(device)
        single = alone.run(delta_window, [1], merged, 2)
        joint = beside.run(delta_window, [0, -1, 1], torch.cat([other, other, merged]), 2)
        assert torch.equal(joint[4:], single)
        assert not joint[2:4].any()
        for case in (alone, beside):
            case.commit(1, 1 + step % 2)
        beside.commit(0, 2)
    assert beside.cache.state[2].abs().sum() == 0
