"""Timing calls that take turns, so that what slows the machine for a while slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

Action = Callable[[], object]

BURST = 4  # timings of one action in a row, after a call that is not timed


@dataclass(frozen=True)
class Spread:
    """What repeated measurements gave."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Seq[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def nothing() -> None:
    """Does just that."""


def take_turns(
    actions: Mapping[str, Action],
    rounds: int,
    before: Action = nothing,
    wait: Action = nothing,
    calls: int = 1,
    after: Action = nothing,
) -> dict[str, Spread]:
    """Milliseconds of a call of each action. In every round each has one turn: `before`, a call that warms up, then
    BURST timings of `calls` calls each; `after`. `wait` returns when the device has done what it was given."""
    samples: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            before()
            action()
            samples[name] += [1000 * timed(action, wait, calls) for _ in range(BURST)]
            after()
    return {name: Spread.of(values) for name, values in samples.items()}


def timed(action: Action, wait: Action = nothing, calls: int = 1) -> float:
    """Seconds of one call, the mean of `calls` in a row."""
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        action()
    wait()
    return (time.perf_counter() - start) / calls


def median_ratio(over: Seq[float], under: Seq[float]) -> float:
    """The median of the ratios taken pair by pair, so that what slows both of a pair does not count."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
