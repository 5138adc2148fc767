"""Measuring what a device's own steps cost, by replaying them behind tokens that mean nothing. Imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from surefoot.drafters.policy import StepCosts
from surefoot.engine.calibrate import BURST, FAR, NEAR, fitted, least
from surefoot.engine.device import DeviceTarget


def measure_steps(target: DeviceTarget, batches: Seq[int]) -> StepCosts:
    """Costs of the target's steps of every depth: `verify` is of whole steps, by their windows, so `draft` is 0. All
    slots must be idle; they are afterwards, and what they had read of prompts is forgotten."""
    windows = range(1, target.most + 2)
    room = min(FAR, target.max_len) - BURST * windows[-1]  # for the tokens of a burst
    near = max(1, min(NEAR, room))
    measured = [_measure_batch(target, size, windows, near, max(0, room - near)) for size in batches]
    return StepCosts(
        tuple(batches),
        tuple(windows),
        near,
        verify=tuple(steps for steps, _ in measured),
        by_context=tuple(slope for _, slope in measured),
        draft=((0.0, 0.0),) * len(measured),
    )


def _measure_batch(
    target: DeviceTarget, size: int, windows: Seq[int], near: int, further: int
) -> tuple[tuple[float, ...], tuple[float, float]]:
    """Of the steps for `size` slots: seconds by window, and what further context adds."""

    def burst(window: int) -> None:
        for _ in range(BURST):
            target.replay(size, window - 1)

    def timed(windows: Seq[int], context: int) -> dict[tuple[int, int], float]:
        calls: dict[tuple[int, int], Callable[[], None]] = {
            (window, context - near): partial(burst, window) for window in windows
        }
        return least(calls, lambda: target.rehearse(size, context), target.decoder.device)

    try:
        seconds = timed(windows, near)
        if further > NEAR:
            seconds |= timed((windows[0], windows[-1]), near + further)
    finally:
        target.rest()
    return fitted({key: s / BURST for key, s in seconds.items()}, windows, further)
