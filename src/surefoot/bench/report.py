"""What a run found: everything that the JSON file, the table and the plot show."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surefoot.bench.cost import Ceiling, StepBytes
from surefoot.bench.lossless import Verdict
from surefoot.bench.machine import Machine
from surefoot.bench.measure import LIBRARY, Row
from surefoot.bench.turns import Spread


@dataclass(frozen=True)
class Report:
    """A run that was found lossless. `config`: every option in force; `sizes`: the model's; `passes`: milliseconds of
    "verify N" and "draft"; `library_equal`: prompts to which `transformers` gave the same tokens, None if it was not
    asked; `notes`: sentences that belong to the figures."""

    model: str
    random_weights: bool
    lossless: Verdict
    config: dict[str, Any]
    sizes: dict[str, Any]
    device: str
    machine: Machine
    step_bytes: StepBytes
    ceiling: Ceiling
    passes: dict[str, Spread]
    rows: list[Row]
    library_equal: int | None
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
        derived = {"step_bytes": asdict(self.step_bytes) | step, "share_of_ceiling": self.share_of_ceiling}
        return asdict(self) | derived

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
