"""Steps of changing depth on the device: no token shows it, nor does the head's lane."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from surefoot.engine import calibrate, rehearsal
from surefoot.engine.depths import ChosenDepth, Depths, FixedDepth
from surefoot.engine.device import DeviceTarget
from surefoot.model.fused import FusedModel
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from tests.fused.test_device import build, sequences

MOST, WINDOW = 1, 2  # few rows, so that the lane must be filled often


class Random(FixedDepth):
    """Depths by dice, with long stretches of plain decoding; it counts them."""

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self._dice, self.taken = random.Random(seed), [0] * (MOST + 1)

    def choose(self, running: Seq[Sequence], size: int) -> int:
        depth = max(0, self._dice.randrange(-2, MOST + 1))
        self.taken[depth] += 1
        return depth


class Watched(DeviceTarget):
    """Notes the rows of the head's lane, keys and values, when a sequence leaves."""

    def __init__(self, device: torch.device, slots: int, depths: Depths) -> None:
        decoder, head = build(device)
        super().__init__(FusedModel(decoder, head, slots, WINDOW), "auto", MOST)
        self.depths = depths
        self.lanes: dict[int, Tensor] = {}

    def leave(self, sequence: Sequence) -> None:
        """One that is alone first takes in all that waits."""
        slot, lane, progress = sequence.slot, self.model.lane, self.model.progress
        while self.slots == 1 and progress.laned[slot] < progress.length[slot]:
            self._fill(1).launch()
        rows = torch.stack([lane.keys[slot], lane.values[slot]])
        self.lanes[slot] = rows[:, :, : int(progress.laned[slot])].clone()
        super().leave(sequence)

    def decode(self, temperature: float, *tokens: int) -> list[list[int]]:
        """So many tokens of each of the first prompts."""
        params = [SamplingParams(max_new_tokens=count, temperature=temperature, seed=11) for count in tokens]
        batch = [sequences(own, slot + 1)[slot] for slot, own in enumerate(params)]
        list(self.run(batch))
        return [sequence.output for sequence in batch]


def same_lanes(one: Watched, other: Watched) -> bool:
    """As far as both have got."""
    pairs = [(one.lanes[slot], other.lanes[slot]) for slot in range(one.slots)]
    return all(torch.equal(a[:, :, : b.shape[2]], b[:, :, : a.shape[2]]) for a, b in pairs)


@torch.inference_mode()
def test_changing_depths_show_in_no_token_nor_in_the_lane(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a negative control: states that wait for too long are overwritten (which tokens do not mind)."""
    depths = Random(1)
    always, changing = Watched(device, 1, FixedDepth(MOST)), Watched(device, 1, depths)
    tokens = always.decode(0.9, 10)
    assert changing.decode(0.9, 10) == tokens
    assert same_lanes(changing, always)
    assert changing.lanes[0].shape == always.lanes[0].shape
    assert all(depths.taken)
    monkeypatch.setattr(DeviceTarget, "_make_room", lambda *_: None)
    unfilled = Watched(device, 1, FixedDepth(0))
    assert unfilled.decode(0.9, 10) == tokens
    assert not same_lanes(unfilled, always)


@torch.inference_mode()
def test_sequences_that_change_depth_together(device: torch.device) -> None:
    """Greedy, two of them, of which one ends before the other: a slot of the batch stands empty."""
    always, changing = Watched(device, 2, FixedDepth(0)), Watched(device, 2, Random(3))
    assert changing.decode(0.0, 3, 5) == always.decode(0.0, 3, 5)
    assert same_lanes(changing, always)


@torch.inference_mode()
def test_steps_are_measured_and_chosen_among(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured target is empty again afterwards, and decodes as another does."""
    for name, value in (("BURST", 1), ("NEAR", 2), ("FAR", 12)):
        monkeypatch.setattr(rehearsal, name, value)
    monkeypatch.setattr(calibrate, "SLOW_ROUNDS", 0)
    measured, plain = Watched(device, 1, FixedDepth(0)), Watched(device, 1, FixedDepth(0))
    costs = rehearsal.measure_steps(measured, [1])
    assert (costs.batches, costs.windows, costs.context) == ((1,), (1, 2), 2)
    assert 0 < costs.pass_s(1, 1, 0) <= costs.pass_s(1, 2, 0) <= costs.pass_s(1, 2, 99)
    assert costs.draft_s(1, 1) == 0
    measured.choose_by(costs, {"mtp+ngram": (1.0,)})
    assert measured.decode(0.0, 3) == plain.decode(0.0, 3)
    assert isinstance(measured.depths, ChosenDepth)
    assert sum(measured.depths.choices.values()) > 0
    assert not measured.depths._runs
