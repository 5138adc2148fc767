"""Drafts of a set acceptance on the device, against the reference and against the host's drafter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.bench.synthetic import Continuations, SyntheticDrafter, SyntheticStep
from surefoot.drafters.mtp import MTPDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.engine import Engine
from surefoot.engine.device import DeviceTarget
from surefoot.engine.target import DecoderTarget
from surefoot.model.fused import FusedModel
from surefoot.sampling import SamplingParams
from surefoot.verify.fused.synthetic import overwrite_drafts, overwrite_drafts_reference
from tests.fused.test_device import CONFIG, build

PROMPTS = [[5, 9, 5, 9, 5], [7, 1, 2]]


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_the_kernel_gives_what_the_reference_gives(device: torch.device, depth: int) -> None:
    generator = torch.Generator().manual_seed(depth)
    vocab_size, slots, sequences = 11, 40, [*range(39, -1, -1), -1]
    known = torch.randint(vocab_size, (slots, 64), generator=generator, dtype=torch.int32).to(device)
    length = torch.randint(50, (slots,), generator=generator, dtype=torch.int32).to(device)
    taking_part = torch.tensor(sequences, dtype=torch.int32, device=device)
    shares = torch.linspace(1.0, 0.0, depth, dtype=torch.float64).to(device)

    def run(function: object) -> Tensor:
        drafts = torch.full((len(sequences), depth), -9, dtype=torch.int32, device=device)
        assert callable(function)
        function(drafts, taking_part, length, known, shares, vocab_size=vocab_size)
        return drafts

    drafts = run(overwrite_drafts)
    assert torch.equal(drafts, run(overwrite_drafts_reference))
    assert drafts[-1].tolist() == [-9] * depth  # which takes no part
    agree = torch.stack([known[s, int(length[s]) + 1 :][:depth] for s in sequences[:-1]]) == drafts[:-1]
    assert agree[:, 0].all()  # a share of 1
    assert depth == 1 or not agree[:, -1].any()  # of 0
    assert depth == 1 or bool((agree[:, :-1] >= agree[:, 1:]).all())


@torch.inference_mode()
def test_a_step_does_what_the_host_does(device: torch.device) -> None:
    shares, params = (0.7, 0.4), SamplingParams(max_new_tokens=7)
    decoder, head = build(device)
    host = DecoderTarget(decoder, 2)
    plain = [answer.token_ids for answer in Engine(host, NoDrafter(), 0).generate(PROMPTS, params)]
    texts = Continuations()
    texts.learn(PROMPTS, plain)
    model = FusedModel(decoder, head, 2, 3)
    target = DeviceTarget(model, "mtp", 2, overwrite=SyntheticStep(model, shares, texts))
    drafter = SyntheticDrafter(MTPDrafter(head, 2), shares, texts, CONFIG.vocab_size)
    ours = Engine(target, target.drafter, 2).generate(PROMPTS, params)
    theirs = Engine(host, drafter, 2).generate(PROMPTS, params)
    for number, expected in enumerate(plain):
        assert ours[number].token_ids == theirs[number].token_ids == expected
        assert ours[number].stats.accepted_by_position == theirs[number].stats.accepted_by_position
        assert 3 <= ours[number].stats.steps == theirs[number].stats.steps < 7
