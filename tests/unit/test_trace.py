"""The trace script's judgement of a profile, and what it says without a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import trace
from benchmarks.trace import LAUNCH, Event, kernels, problems, table

EVENTS = [
    Event(LAUNCH, 0, 10, False),
    Event("cudaGraphLaunch", 2, 8, False),
    Event("cudaEventSynchronize", 12, 20, False),  # waits for the step before, as it may
    Event(LAUNCH, 30, 40, False),
    Event("linear", 5, 25, True),
    Event("linear", 35, 45, True),
    Event("accept", 45, 55, True),
    Event("Memcpy DtoH (Device -> Pinned)", 56, 58, True),
    Event(LAUNCH, 5, 45, True),  # the mark, as profilers repeat it
]


def test_a_profile_without_waits() -> None:
    assert problems(EVENTS, 2) == []


@pytest.mark.parametrize(
    "event, named",
    [
        (Event("cudaStreamSynchronize", 31, 33, False), "cudaStreamSynchronize inside a launch"),
        (Event("cudaDeviceSynchronize", 0, 1, False), "cudaDeviceSynchronize inside a launch"),
        (Event("Memcpy DtoH (Device -> Pageable)", 60, 61, True), "Memcpy DtoH (Device -> Pageable) between two steps"),
    ],
)
def test_waits_are_found(event: Event, named: str) -> None:
    assert problems([*EVENTS, event], 2) == [named]


def test_a_profile_that_missed_launches_says_nothing() -> None:
    assert problems(EVENTS, 3) == ["expected 3 launches in the profile, found 2"]


def test_kernels_are_added_up() -> None:
    rows = kernels(EVENTS)
    assert [(row.name, row.calls, row.total_us) for row in rows] == [
        ("linear", 2, 30), ("accept", 1, 10), ("Memcpy DtoH (Device -> Pinned)", 1, 2),
    ]  # fmt: skip
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert "15.00" in table(rows, 2).splitlines()[1]  # linear, a step
    assert table([replace(rows[0], name="x" * 99)], 2).count("x") == 60


def test_a_launch_runs_where_waiting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = [0]
    fake = SimpleNamespace(get_sync_debug_mode=lambda: modes[-1], set_sync_debug_mode=modes.append)
    monkeypatch.setattr(torch, "cuda", fake)
    launched: list[None] = []
    trace.guarded(lambda: modes.append("launched"), launched)()
    assert (modes, len(launched)) == ([0, "error", "launched", 0], 1)

    def fails() -> None:
        raise RuntimeError("waited")

    with pytest.raises(RuntimeError, match="waited"):
        trace.guarded(fails, launched)()
    assert (modes[-1], len(launched)) == (0, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["trace.py"])
    with pytest.raises(SystemExit) as end:
        trace.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: trace: expected a CUDA device, found none\n"
