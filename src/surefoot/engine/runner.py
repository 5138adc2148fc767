"""Running requests: into slots, step by step, out again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

from torch import Tensor

from surefoot.engine.loop import StepRecord, prefill, step
from surefoot.engine.stats import Clock, TimedDrafter, TimedTarget
from surefoot.model import Decoder
from surefoot.sequence import Sequence
from surefoot.types import Drafter, Target

Progress = Callable[[int, int], None]


@runtime_checkable
class RunsItself(Protocol):
    """A target with a drafter of its own in its step: `run` and what callers ask of a target otherwise."""

    vocab_size: int
    max_len: int
    slots: int
    decoder: Decoder
    drafter: Drafter

    def run(
        self, sequences: Iterable[Sequence], clock: Clock | None = None, progress: Progress | None = None
    ) -> Generator[StepRecord, None, None]:
        """What the function `run` does."""

    def plain(self) -> RunsItself:
        """The same target without drafts."""

    def score(self, tokens: Seq[int]) -> Tensor:
        """The logits after each of the tokens, [T, V] float32."""


def run(
    sequences: Iterable[Sequence],
    drafter: Drafter,
    target: Target,
    draft_length: int,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> Generator[StepRecord, None, None]:
    """Decode all sequences, as many at a time as the target has slots, and yield every step of every sequence.

    A sequence gets its slot when it starts; one that ends makes room for the next. Closing the iterator early, or an
    error in a step, releases every slot. `progress(done, total)` counts prompt tokens while they are read.
    """
    clock = clock or Clock()
    untimed = drafter  # what it does while a prompt is read counts as prefill
    drafter, target = TimedDrafter(drafter, clock), TimedTarget(target, clock)
    waiting = deque(sequences)
    free = list(range(min(target.slots, len(waiting))))
    running: list[Sequence] = []

    def release(sequence: Sequence) -> None:
        running.remove(sequence)
        free.append(sequence.slot)
        target.release(sequence.slot)
        drafter.release(sequence)

    try:
        while waiting or running:
            while waiting and free:
                sequence = waiting.popleft()
                sequence.slot = free.pop(0)
                running.append(sequence)
                with clock.phase("prefill_s"):
                    for done in prefill(sequence, untimed, target):
                        if progress is not None:
                            progress(done, len(sequence.tokens))
            with clock.phase("decode_s"):
                records = step(running, drafter, target, draft_length)
            for record in records:
                if record.sequence.finish_reason is not None:
                    release(record.sequence)
            yield from records
    finally:
        for sequence in list(running):
            release(sequence)
