"""What a request's steps came to, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from surefoot.engine.loop import StepRecord
from surefoot.sequence import Sequence
from surefoot.types import Draft, Drafter, Scores, Target, Window


@dataclass
class Seconds:
    """Time by phase. `decode_s` is the sum of the steps, of which `draft_s`, `verify_s` and `commit_s` are the
    drafter's, the target's and the caches' parts; what a drafter does with the prompt belongs to `prefill_s`."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0


@dataclass
class Counts:
    """What steps came to. `proposed` and `accepted` count draft tokens; those behind the end of the output count as
    neither. Lists are by draft position, first position first."""

    steps: int = 0
    tokens: int = 0
    proposed_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    @property
    def proposed(self) -> int:
        """Draft tokens that verification judged."""
        return sum(self.proposed_by_position)

    @property
    def accepted(self) -> int:
        """Draft tokens that were kept and emitted."""
        return sum(self.accepted_by_position)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / proposed draft tokens; 0 if none were proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per step; plain decoding has 1."""
        return self.tokens / self.steps if self.steps else 0.0

    def add(self, record: StepRecord) -> None:
        """Count one step."""
        self.steps += 1
        self.tokens += record.emitted
        judged = len(record.draft.tokens) if record.emitted > record.accepted else record.emitted
        missing = len(record.draft.tokens) - len(self.proposed_by_position)
        self.proposed_by_position += [0] * missing
        self.accepted_by_position += [0] * missing
        for position in range(judged):
            self.proposed_by_position[position] += 1
        for position in range(record.accepted):
            self.accepted_by_position[position] += 1


@dataclass
class Stats(Counts, Seconds):
    """One request's counts, and the seconds spent while it ran (shared with the requests that ran beside it).
    `cached_tokens` of its prompt were not read, but known from an earlier one."""

    cached_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of decoding, prefill not counted."""
        return self.tokens / self.decode_s if self.decode_s else 0.0


@dataclass
class Clock(Seconds):
    """Seconds by phase, running on."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    def since(self, earlier: Clock) -> dict[str, float]:
        """Seconds by phase from `earlier` to now."""
        return {name: value - getattr(earlier, name) for name, value in vars(self).items()}

    def copy(self) -> Clock:
        """The times as they stand."""
        return Clock(**vars(self))


class TimedTarget:
    """A target whose calls are timed; the loop does not know."""

    def __init__(self, target: Target, clock: Clock) -> None:
        self._target, self._clock = target, clock
        self.vocab_size, self.max_len, self.slots = target.vocab_size, target.max_len, target.slots
        self.prefill, self.release = target.prefill, target.release

    def verify(self, windows: Seq[Window]) -> list[Scores]:
        """Timed as `verify_s`."""
        with self._clock.phase("verify_s"):
            return self._target.verify(windows)

    def commit(self, slot: int, keep: int) -> None:
        """Timed as `commit_s`."""
        with self._clock.phase("commit_s"):
            self._target.commit(slot, keep)


class TimedDrafter:
    """A drafter whose calls are timed; the loop does not know."""

    def __init__(self, drafter: Drafter, clock: Clock) -> None:
        self._drafter, self._clock = drafter, clock
        self.name, self.release = drafter.name, drafter.release

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """Timed as `draft_s`."""
        with self._clock.phase("draft_s"):
            return self._drafter.propose(sequences, depths)

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """Timed as `draft_s`."""
        with self._clock.phase("draft_s"):
            self._drafter.observe(sequence, position, hidden)
