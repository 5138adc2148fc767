"""A progress bar on standard error for what turns out to take long. Nothing is drawn unless a person can see it."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class LateBar:
    """Called with (done, total); draws a bar once the work has lasted longer than `after` seconds, and removes it at
    the end. Each time the count starts anew, the next of the labels names it. Silent if standard error is not a
    terminal."""

    def __init__(self, *labels: str, after: float = 0.5) -> None:
        self._label, *self._labels = labels
        self._begin = time.monotonic() + after
        self._shown = sys.stderr.isatty()
        self._done = 0
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> LateBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` units are ready."""
        if done < self._done and self._labels:
            self._label = self._labels.pop(0)
        self._done = done
        if not self._shown or time.monotonic() < self._begin:
            return
        if self._progress is None or self._task is None:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(self._label, total=total)
            self._progress.start()
        self._progress.update(self._task, description=self._label, completed=done, total=total)
