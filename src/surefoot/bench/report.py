"""What a run found: everything that the JSON file, the table and the plot show."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from surefoot.bench.cost import Ceiling, StepBytes
from surefoot.bench.lossless import Verdict
from surefoot.bench.machine import Machine
from surefoot.bench.measure import LIBRARY, Row
from surefoot.bench.turns import Spread
from surefoot.engine.memory import Memory


@dataclass(frozen=True)
class StartUp:
    """Seconds before the first token: loading the weights, recording each method's steps (the first one pays for what
    all share; empty without a GPU's steps), and reading the first prompt with a step behind it."""

    loading_s: float
    recording_s: dict[str, float]
    first_token_s: float

    @property
    def total_s(self) -> float:
        """From the start to the first token, all methods recorded."""
        return self.loading_s + sum(self.recording_s.values()) + self.first_token_s


@dataclass(frozen=True)
class Report:
    """A run that was found lossless. `config`: every option in force; `sizes`: the model's; `memory`: of the method
    that takes most; `passes`: milliseconds of "verify N" and "draft"; `library_equal`: prompts to which `transformers`
    gave the same tokens, None if it was not asked; `seconds`: of each stage of the run; `notes`: sentences that belong
    to the figures."""

    model: str
    random_weights: bool
    lossless: Verdict
    config: dict[str, Any]
    sizes: dict[str, Any]
    device: str
    machine: Machine
    start_up: StartUp
    memory: Memory
    step_bytes: StepBytes
    ceiling: Ceiling
    passes: dict[str, Spread]
    rows: list[Row]
    library_equal: int | None
    seconds: dict[str, float]
    notes: list[str]

    @property
    def plain(self) -> Row:
        """The row that others are compared with."""
        return next(row for row in self.rows if row.name != LIBRARY)

    @property
    def share_of_ceiling(self) -> float:
        """What plain decoding reaches of what the bandwidth allows."""
        return self.plain.tokens_per_second.median / self.ceiling.tokens_per_second

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        step = {"total": self.step_bytes.total, "draft_share": self.step_bytes.draft_share}
        return asdict(self) | {
            "start_up": asdict(self.start_up) | {"total_s": self.start_up.total_s},
            "memory": asdict(self.memory) | {"total": self.memory.total},
            "step_bytes": asdict(self.step_bytes) | step,
            "share_of_ceiling": self.share_of_ceiling,
        }


class Saved(Protocol):
    """A report of any kind."""

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""


def save(path: Path, reports: Seq[Saved]) -> None:
    """Write them as JSON: one report, or a list of several."""
    listed = [report.as_dict() for report in reports]
    path.write_text(json.dumps(listed[0] if len(listed) == 1 else listed, indent=1) + "\n", encoding="utf-8")
