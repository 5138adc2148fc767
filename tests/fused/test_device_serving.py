"""The device's step under requests that join and leave, and with kept beginnings of prompts: the host's tokens."""

from __future__ import annotations

import pytest
import torch

from surefoot import SamplingParams
from surefoot.cache.prefix import PrefixCache
from surefoot.drafters.none import NoDrafter
from surefoot.engine.device import DeviceTarget
from surefoot.engine.runner import Ended, HostRunner, Ways, drain
from surefoot.engine.target import DecoderTarget
from surefoot.errors import InputError, NumericalError
from surefoot.model import Decoder
from surefoot.model.fused import FusedModel
from surefoot.sequence import Sequence
from tests.fused.test_device import build

CHUNK = 4
GREEDY = SamplingParams(max_new_tokens=4)


def sequence_of(prompt: list[int]) -> Sequence:
    return Sequence(0, list(prompt), GREEDY, len(prompt) + GREEDY.max_new_tokens)


def solo(decoder: Decoder, prompt: list[int]) -> list[int]:
    sequence = sequence_of(prompt)
    list(drain(HostRunner(DecoderTarget(decoder, 1, CHUNK), NoDrafter(), 0, Ways()), [sequence]))
    return sequence.output


@torch.inference_mode()
def test_requests_join_and_leave_and_prompts_are_kept(device: torch.device) -> None:
    decoder, head = build(device)
    target = DeviceTarget(FusedModel(decoder, head, 2, 2), "mtp", 1, chunk=CHUNK)
    prefixes = PrefixCache(10**7)
    runner = target.runner(Ways(budget=CHUNK, prefixes=prefixes))
    prompts = [[5, 9], [7, 1, 2, 7, 1, 2, 3, 3, 4, 4, 5], [5, 9, 1]]
    first, long, gone = (sequence_of(prompt) for prompt in prompts)
    runner.add(first)
    runner.tick()
    runner.add(long)  # its chunks are read between the steps of the first
    runner.add(gone)
    runner.tick()
    runner.cancel(first)
    ended = [event.sequence for event in runner.tick() if isinstance(event, Ended)]
    assert ended == [first]
    while runner.busy:
        if len(gone.output) == 1:
            runner.cancel(gone)
        runner.tick()
    assert (first.finish_reason, long.finish_reason) == ("cancelled", "length")
    assert long.output == solo(decoder, prompts[1])
    for sequence, prompt in ((first, prompts[0]), (gone, prompts[2])):
        assert sequence.output == solo(decoder, prompt)[: len(sequence.output)]

    again, further = sequence_of(prompts[1]), sequence_of([*prompts[1][:8], 6, 6])
    for sequence in (again, further):
        runner.add(sequence)
    while runner.busy:
        runner.tick()
    assert (again.cached_tokens, further.cached_tokens) == (10, 8)
    assert again.output == long.output
    assert further.output == solo(decoder, further.tokens[:10])
    with pytest.raises(InputError, match="drafter: expected the one in the device's step"):
        runner.add(sequence_of([1]), NoDrafter())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's arithmetic
@torch.inference_mode()
def test_a_row_of_nan_ends_its_request_alone(device: torch.device) -> None:
    decoder, _ = build(device)
    decoder.embedding[13] = torch.nan
    target = DeviceTarget(FusedModel(decoder, None, 2, 1), "none", 0)
    bad, good = sequence_of([1, 13]), sequence_of([1, 2])
    runner = target.runner(Ways())
    for sequence in (bad, good):
        runner.add(sequence)
    while runner.busy:
        runner.tick()
    assert (bad.finish_reason, bad.output) == ("error", [])
    assert isinstance(bad.error, NumericalError)
    assert good.output == solo(decoder, [1, 2])
