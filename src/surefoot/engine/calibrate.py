"""Measuring what steps cost on this machine: passes of the target, and drafts of the MTP head."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import TypeVar

import torch

from surefoot.drafters.auto import DEEPEST
from surefoot.drafters.mtp import MTPDrafter
from surefoot.drafters.policy import StepCosts
from surefoot.engine.target import DecoderTarget
from surefoot.model import Decoder, DraftHead, MTPHead
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Window

NEAR, FAR = 32, 1024  # tokens of context that passes are measured behind, where there is room
WINDOWS = (1, 2, 3, 4, 6, DEEPEST + 1)
MOST_SLOTS = 16  # sequences that are measured together at most; beyond, costs go on as they did
CHAIN = 4  # tokens of the longer one of two drafts, whose difference is what a further token costs
BURST = 4  # calls in a row, as in decoding: a pass behind another one takes longer than a pass alone
ROUNDS, SLOW_ROUNDS = 5, 2
Name = TypeVar("Name")
SLOW_S = 0.1  # seconds of a burst from which fewer rounds must do


def batches_for(slots: int) -> list[int]:
    """The batch sizes to measure for up to so many sequences."""
    return sorted({size for size in (1, 4) if size < slots} | {min(slots, MOST_SLOTS)})


def measure_costs(
    decoder: Decoder, head: MTPHead | None, batches: Seq[int], draft_head: DraftHead | None = None
) -> StepCosts:
    """Costs of steps of so many sequences, in caches of their own; a second or so for a small model. What is kept of
    each call's times is the least: all else is other work of the machine."""
    max_len = min(FAR, decoder.max_len)
    windows = [size for size in WINDOWS if size + BURST <= max_len] or [1]
    context = max(0, min(NEAR, max_len - windows[-1] - BURST))
    measured = [_measure_batch(decoder, head, size, windows, context, max_len, draft_head) for size in batches]
    return StepCosts(
        tuple(batches),
        tuple(windows),
        context,
        verify=tuple(passes for passes, _, _ in measured),
        by_context=tuple(slope for _, slope, _ in measured),
        draft=tuple(draft for _, _, draft in measured),
    )


def _measure_batch(
    decoder: Decoder,
    head: MTPHead | None,
    slots: int,
    windows: Seq[int],
    context: int,
    max_len: int,
    draft_head: DraftHead | None,
) -> tuple[tuple[float, ...], tuple[float, float], tuple[float, float]]:
    """Of `slots` sequences together: seconds of passes, what context adds to them, and seconds of drafts."""
    target = DecoderTarget(decoder, slots, max_len=max_len)
    burst = min(BURST, max_len - windows[-1])
    text = torch.randint(target.vocab_size, (max_len,), generator=torch.Generator().manual_seed(1)).tolist()
    for slot in range(slots):
        for _ in target.prefill(slot, text[:context]):
            pass
        target.mark(slot)

    def read(size: int, further: int) -> None:
        """A burst of passes behind the context, and behind `further` positions that hold nothing."""
        for slot in range(slots):
            target.cache.extend(slot, further)
        for _ in range(burst):
            target.verify([Window(slot, tuple(text[:size])) for slot in range(slots)])
            for slot in range(slots):
                target.commit(slot, 1)

    def rewind() -> None:
        for slot in range(slots):
            target.rewind(slot)

    further = max_len - windows[-1] - burst - context
    calls = {(size, 0): partial(read, size, 0) for size in windows}
    ends = (windows[0], windows[-1])
    calls |= {(size, further): partial(read, size, further) for size in ends if further > NEAR}
    seconds = {key: s / burst for key, s in least(calls, rewind, decoder.device).items()}
    return *fitted(seconds, windows, further), _measure_drafts(head, slots, text, context, draft_head)


def fitted(
    seconds: Mapping[tuple[int, int], float], windows: Seq[int], further: int
) -> tuple[tuple[float, ...], tuple[float, float]]:
    """`StepCosts.verify` and `by_context` of a batch size, from the seconds of every window at no further context, and
    of the first and last one at so much."""
    passes = [seconds[size, 0] for size in windows]
    passes = [min(passes[place:]) for place in range(len(passes))]  # fewer tokens never cost more
    slope, ends = (0.0, 0.0), (windows[0], windows[-1])
    if further > NEAR and len(windows) > 1:
        added = [max(0.0, seconds[size, further] - seconds[size, 0]) / further for size in ends]
        by_token = max(0.0, added[1] - added[0]) / (ends[1] - ends[0])
        slope = (max(0.0, added[0] - by_token * ends[0]), by_token)
    return tuple(passes), slope


def _measure_drafts(
    head: MTPHead | None, slots: int, text: list[int], context: int, draft_head: DraftHead | None
) -> tuple[float, float]:
    """Seconds of a draft of one token for each slot, and of each further one."""
    if head is None:
        return 0.0, 0.0
    drafter = MTPDrafter(head, slots, draft_head=draft_head)
    hidden = torch.zeros(context + 1, head.config.hidden_size, device=head.decoder.device)
    sequences = [Sequence(slot, text[: context + 2], SamplingParams(), limit=len(text)) for slot in range(slots)]
    for sequence in sequences:
        drafter.observe(sequence, 0, hidden)
    drafter.propose(sequences, [1] * slots)  # the lane holds the context now

    def draft(depth: int) -> None:
        for _ in range(BURST):
            for sequence in sequences:
                drafter.observe(sequence, max(0, context - 1), hidden[-2:])
            drafter.propose(sequences, [depth] * slots)

    longer = min(CHAIN, len(text) - context)
    seconds = least({depth: partial(draft, depth) for depth in (1, longer)}, lambda: None, head.decoder.device)
    first, further = seconds[1] / BURST, max(0.0, seconds[longer] - seconds[1]) / BURST
    return first, further / max(1, longer - 1)


def least(
    calls: Mapping[Name, Callable[[], None]], before: Callable[[], None], device: torch.device
) -> dict[Name, float]:
    """The least seconds of each call over a few rounds in which they take turns, each after `before`."""

    def timed(call: Callable[[], None]) -> float:
        before()
        return _seconds_of(call, device)

    found = {name: timed(call) for name, call in calls.items()}
    for _ in range(SLOW_ROUNDS if max(found.values()) > SLOW_S else ROUNDS):
        found = {name: min(found[name], timed(call)) for name, call in calls.items()}
    return found


def _seconds_of(call: Callable[[], None], device: torch.device) -> float:
    """By the device's own clock, if it is a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    torch.cuda.synchronize(device)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    call()
    ended.record()
    torch.cuda.synchronize(device)
    return float(began.elapsed_time(ended)) / 1000
