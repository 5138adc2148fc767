"""Running requests: into slots as they come, step by step, out again.

A tick lets waiting requests into free slots, reads some of their prompts, advances those that are read by a step, and
lets out what has ended. Requests may be added and cancelled between any two ticks. What one puts out does not depend on
the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from surefoot.cache.prefix import PrefixCache
from surefoot.engine.choice import ChosenDrafters
from surefoot.engine.loop import StepRecord, step
from surefoot.engine.prompts import Progress, Prompts, read
from surefoot.engine.stats import Clock, TimedDrafter, TimedTarget
from surefoot.model import Decoder
from surefoot.sequence import FinishReason, Sequence
from surefoot.types import Drafter, Target


@dataclass(frozen=True)
class Started:
    """The sequence has a slot, and its prompt began to be read."""

    sequence: Sequence


@dataclass(frozen=True)
class Ended:
    """The sequence has a `finish_reason`, and an `error` if that is "error". Nothing more comes of it."""

    sequence: Sequence


Event = Started | StepRecord | Ended


@dataclass(frozen=True)
class Ways:
    """How requests are run: `clock` adds up times by phase, `progress(done, total)` counts a prompt's tokens while they
    are read, a tick reads about `budget` tokens of prompts (None: all there are), and `prefixes` has beginnings of
    prompts that need not be read."""

    clock: Clock | None = None
    progress: Progress | None = None
    budget: int | None = None
    prefixes: PrefixCache | None = None


class Runs(Protocol):
    """Runs requests, in one thread.

    Of every sequence that was added, the events are `Started`, its steps, and `Ended`, in this order; of one that ends
    before it has a slot, `Ended` alone.
    """

    @property
    def busy(self) -> bool:
        """Whether a tick has anything to do."""

    @property
    def running(self) -> int:
        """Sequences with a slot."""

    def add(self, sequence: Sequence, drafter: Drafter | None = None) -> None:
        """Run the sequence, after those that were added before; `drafter` instead of the runner's own."""

    def cancel(self, sequence: Sequence) -> None:
        """End the sequence at the beginning of the next tick, wherever it stands, if it has not ended until then. May
        be called in the middle of a tick."""

    def tick(self) -> list[Event]:
        """Do a little for everyone; what came of it, in order.

        An error about one sequence ends that sequence. Raises what nobody expected; see `fail`.
        """

    def fail(self, error: Exception) -> list[Event]:
        """End every sequence that has a slot by this error; what has happened since the last tick."""

    def close(self) -> None:
        """Let go of everything, without another word."""


class Runner(ABC):
    """What runners have in common: who waits, whose prompt is read, who runs, who has been cancelled. See `Runs`."""

    def __init__(self, slots: int, ways: Ways) -> None:
        self._clock = ways.clock or Clock()
        self._prompts = Prompts(slots, self._read, ways.budget, ways.progress)
        self._running: list[Sequence] = []
        self._cancelled: list[Sequence] = []
        self._events: list[Event] = []

    @property
    def busy(self) -> bool:
        """Whether anyone waits or runs, or something is to be told."""
        return bool(self._prompts.busy or self._running or self._cancelled or self._events)

    @property
    def running(self) -> int:
        """Those whose prompts are read, and those that are stepped."""
        return len(self._running) + len(self._prompts.held())

    def add(self, sequence: Sequence, drafter: Drafter | None = None) -> None:
        """Let it wait for a slot."""
        self._choose(sequence, drafter)
        self._prompts.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Note it for the next tick."""
        self._cancelled.append(sequence)

    def tick(self) -> list[Event]:
        """Let out who was cancelled, let in who waits, read prompts, make a step."""
        cancelled, self._cancelled = self._cancelled, []
        for sequence in cancelled:
            self._end(sequence, "cancelled")
        with self._clock.phase("prefill_s"):
            turns = self._prompts.read()
        self._events += [Started(sequence) for sequence in turns.started]
        for sequence, error in turns.failed:
            self._let_go(sequence, "error", error)
        for sequence in turns.ready:
            self._enter(sequence)
            self._running.append(sequence)
        with self._clock.phase("decode_s"):
            self._advance()
        return self._take_events()

    def fail(self, error: Exception) -> list[Event]:
        """End those that have slots."""
        for sequence in [*self._running, *self._prompts.held()]:
            with suppress(Exception):  # what is broken may be broken here, too
                self._end(sequence, "error", error)
        return self._take_events()

    def close(self) -> None:
        """Let go of all."""
        for sequence in [*self._prompts.waiting, *self._prompts.held(), *self._running]:
            self._end(sequence, None)
        self._events, self._cancelled = [], []

    def _end(self, sequence: Sequence, reason: FinishReason | None, error: Exception | None = None) -> None:
        """End a sequence that has not ended yet."""
        begun = self._prompts.withdraw(sequence)
        if begun or sequence in self._running:
            self._let_go(sequence, reason, error)
        elif begun is not None:
            self._forget(sequence)
            self._note(sequence, reason, error)

    def _let_go(self, sequence: Sequence, reason: FinishReason | None, error: Exception | None = None) -> None:
        """End a sequence that is in its slot."""
        if sequence in self._running:
            self._running.remove(sequence)
        self._prompts.release(sequence)
        self._note(sequence, reason, error)
        self._leave(sequence)

    def _note(self, sequence: Sequence, reason: FinishReason | None, error: Exception | None) -> None:
        if sequence.finish_reason is None:
            sequence.finish_reason, sequence.error = reason, error
        self._events.append(Ended(sequence))

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    @abstractmethod
    def _choose(self, sequence: Sequence, drafter: Drafter | None) -> None:
        """Note the sequence's drafter."""

    @abstractmethod
    def _forget(self, sequence: Sequence) -> None:
        """Forget a sequence that never was in a slot."""

    @abstractmethod
    def _read(self, sequence: Sequence) -> Iterator[int]:
        """Read the prompt into the slot chunk by chunk; how many of its tokens have been read."""

    @abstractmethod
    def _enter(self, sequence: Sequence) -> None:
        """The prompt has been read: steps follow."""

    @abstractmethod
    def _advance(self) -> None:
        """Advance those that run, note the events, and let go of those that have ended."""

    @abstractmethod
    def _leave(self, sequence: Sequence) -> None:
        """Empty the slot."""


class HostRunner(Runner):
    """Runs requests by the host's loop. Sequences with different drafters share the target's passes."""

    def __init__(self, target: Target, drafter: Drafter, draft_length: int, ways: Ways) -> None:
        super().__init__(target.slots, ways)
        self._whole, self._own, self._depth, self._prefixes = target, drafter, draft_length, ways.prefixes
        self._drafters = ChosenDrafters(target)
        self._drafter, self._target = TimedDrafter(self._drafters, self._clock), TimedTarget(target, self._clock)

    def _choose(self, sequence: Sequence, drafter: Drafter | None) -> None:
        self._drafters.choose(sequence, self._own if drafter is None else drafter)

    def _forget(self, sequence: Sequence) -> None:
        self._drafters.forget(sequence)

    def _read(self, sequence: Sequence) -> Iterator[int]:
        # What a drafter does while a prompt is read counts as prefill.
        return read(sequence, self._drafters.of(sequence), self._whole, self._prefixes)

    def _enter(self, sequence: Sequence) -> None:
        """It is in its slot already."""

    def _advance(self) -> None:
        batch = list(self._running)
        if not batch:
            return
        failed = self._drafters.failed
        try:
            self._events += step(batch, self._drafter, self._target, self._depth, failed.setdefault)
        except Exception as error:  # about all of them, or nobody knows whom
            failed.update(dict.fromkeys(batch, error))
        for sequence in batch:
            if sequence.finish_reason is not None or sequence in failed:
                self._let_go(sequence, "error", failed.get(sequence))

    def _leave(self, sequence: Sequence) -> None:
        self._whole.release(sequence.slot)
        self._drafters.release(sequence)


class SplitRunner:
    """Two runners as one: what a step of the device's own cannot do (`SamplingParams.needs_host`) runs by the host's
    loop, which is built for the first such request, in slots of its own. See `Runs`."""

    def __init__(self, device: Runs, build_host: Callable[[], Runs]) -> None:
        self._runners = [device]
        self._build_host = build_host
        self._events: list[Event] = []

    @property
    def busy(self) -> bool:
        """Whether either is."""
        return bool(self._events) or any(runner.busy for runner in self._runners)

    @property
    def running(self) -> int:
        """Of both."""
        return sum(runner.running for runner in self._runners)

    def add(self, sequence: Sequence, drafter: Drafter | None = None) -> None:
        """To the one that can run it; the host's loop takes its own drafter."""
        if not sequence.params.needs_host:
            self._runners[0].add(sequence, drafter)
            return
        if len(self._runners) == 1:
            self._runners.append(self._build_host())
        self._runners[1].add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Wherever it is."""
        for runner in self._runners:
            runner.cancel(sequence)

    def tick(self) -> list[Event]:
        """A tick of each that is busy."""
        for runner in self._runners:
            if runner.busy:
                self._events += runner.tick()
        return self._take_events()

    def fail(self, error: Exception) -> list[Event]:
        """Both."""
        for runner in self._runners:
            self._events += runner.fail(error)
        return self._take_events()

    def close(self) -> None:
        """Both."""
        for runner in self._runners:
            runner.close()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def run(
    sequences: Iterable[Sequence],
    drafter: Drafter,
    target: Target,
    draft_length: int,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> Generator[StepRecord, None, None]:
    """Decode all sequences, as many at a time as the target has slots, and yield every step of every sequence: `drain`
    over the host's loop."""
    return drain(HostRunner(target, drafter, draft_length, Ways(clock, progress)), sequences)


def drain(runner: Runs, sequences: Iterable[Sequence]) -> Generator[StepRecord, None, None]:
    """Run all sequences to their ends and yield every step. An error of one of them is raised. Closing the iterator
    early, or an error, releases every slot."""
    for sequence in sequences:
        runner.add(sequence)
    try:
        while runner.busy:
            for event in runner.tick():
                if isinstance(event, StepRecord):
                    yield event
                elif event.sequence.error is not None:
                    raise event.sequence.error
    finally:
        runner.close()


@runtime_checkable
class RunsItself(Protocol):
    """A target with a drafter of its own in its step: a `runner`, and what callers ask of a target otherwise."""

    vocab_size: int
    max_len: int
    slots: int
    chunk: int
    decoder: Decoder

    @property
    def drafter(self) -> Drafter:
        """The one in its step."""

    def runner(self, ways: Ways) -> Runs:
        """What runs requests; one at a time."""

    def plain(self) -> RunsItself:
        """The same target without drafts."""

    def score(self, tokens: Seq[int]) -> Tensor:
        """The logits after each of the tokens, [T, V] float32."""
