"""The fused DeltaNet window: against its reference, and against itself token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.kernels.fused.delta import DeltaState, DeltaWeights, delta_window, delta_window_reference

DK, WIDTH, LANES, TAPE = 16, 4, 32, 5
Heads = tuple[int, int]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Case:
    def __init__(
        self, heads: Heads, value_dim: int, device: torch.device, dtype: torch.dtype = torch.float32, tape: int = TAPE
    ) -> None:
        key_heads, value_heads = heads
        self.channels = 2 * key_heads * DK + value_heads * value_dim
        self.columns = self.channels + value_heads * value_dim + 2 * LANES
        self.width, self.device, self.dtype = value_heads * value_dim, device, dtype
        self.weights = DeltaWeights(
            random(WIDTH, self.channels, seed=1).to(device),
            -random(value_heads, seed=2).abs().to(device),
            random(value_heads, seed=3).to(device),
            (1 + 0.1 * random(value_dim, seed=4)).to(device),
            1e-6,
            LANES,
        )
        self.cache = DeltaState.allocate(3, heads, (DK, value_dim), self.channels, WIDTH, tape, dtype, device)
        for tensor in (
            self.cache.keys,
            self.cache.decays,
            self.cache.deltas,
            self.cache.ring,
            self.cache.mixed,
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


# More columns than one program takes, of one head and of several; a key head with and without company.
@pytest.mark.parametrize(("heads", "value_dim"), [((1, 1), 64), ((2, 4), 8), ((1, 3), 16)], ids=str)
def test_parity(device: torch.device, heads: Heads, value_dim: int) -> None:
    ours, theirs = Case(heads, value_dim, device), Case(heads, value_dim, device)
    ours.cache.arrived.fill_(2**31 - value_dim // 8)  # the count may overflow
    theirs.cache.arrived.copy_(ours.cache.arrived)
    for step, (window, keeps) in enumerate([(3, (2, 3)), (5, (1, 5)), (2, (2, 1))]):
        merged = random(2 * window, ours.columns, seed=10 + step).to(device)
        found = ours.run(delta_window, [2, 0], merged, window)
        expected = theirs.run(delta_window_reference, [2, 0], merged, window)
        assert (found - expected).norm() / expected.norm() < 1e-5
        assert (ours.cache.state - theirs.cache.state).abs().max() < 1e-5
        assert torch.equal(ours.cache.arrived, theirs.cache.arrived)
        for slot, keep in zip((2, 0), keeps, strict=True):
            ours.commit(slot, keep)
            theirs.commit(slot, keep)


def test_window_and_reference_take_turns(device: torch.device) -> None:
    mixed, pure = Case((1, 2), 16, device), Case((1, 2), 16, device)
    for step, function in enumerate([delta_window, delta_window_reference, delta_window]):
        merged = random(2, mixed.columns, seed=step).to(device)
        found = mixed.run(function, [1], merged, 2)
        expected = pure.run(delta_window_reference, [1], merged, 2)
        assert (found - expected).norm() / expected.norm() < 1e-5
        mixed.commit(1, 2)
        pure.commit(1, 2)


@pytest.mark.parametrize(
    ("heads", "dtype", "tape", "steps"),
    [
        ((1, 2), torch.float32, TAPE, [(4, 2), (1, 1), (5, 5), (3, 1), (2, 2)]),
        ((1, 1), torch.float16, TAPE, [(4, 2), (1, 1), (5, 5), (3, 1), (2, 2)]),
        ((1, 1), torch.float32, 16, [(16, 15)]),
    ],
    ids=str,
)
def test_a_window_is_its_tokens_one_by_one(
    device: torch.device, heads: Heads, dtype: torch.dtype, tape: int, steps: list[tuple[int, int]]
) -> None:
    plain, windowed = Case(heads, 16, device, dtype), Case(heads, 16, device, dtype, tape)
    position = 0
    for window, keep in steps:
        merged = random(window, plain.columns, seed=position + window).to(dtype).to(device)
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
    alone, beside = Case((1, 2), 16, device), Case((1, 2), 16, device)
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
