"""What a proof found: sections of checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Check:
    """One thing that was tried: what, whether it held, and what was seen. `table` has further lines, by column."""

    name: str
    passed: bool
    seen: str
    table: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Section:
    """Checks of one kind. `claim` says what they show when all of them hold, `notes` what they leave open."""

    title: str
    claim: str
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether there were checks, and all held."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def check(self, name: str, run: Callable[[], Check]) -> None:
        """Add what `run` finds. An error in it is a check that failed: a broken engine may break in any way."""
        try:
            self.checks.append(run())
        except Exception as error:
            self.failed(name, error)

    def failed(self, name: str, error: Exception) -> None:
        """Add a check that could not be made."""
        self.checks.append(Check(name, False, f"{type(error).__name__}: {' '.join(str(error).split()) or 'raised'}"))


@dataclass(frozen=True)
class Report:
    """A proof of one model on one machine. `config`: every option in force."""

    model: str
    device: str
    config: dict[str, Any]
    versions: dict[str, str]
    sections: list[Section]
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Whether every section did."""
        return all(section.passed for section in self.sections)

    @property
    def failures(self) -> list[str]:
        """Section and name of what failed."""
        return [f"{section.title}: {check.name}"
                for section in self.sections for check in section.checks if not check.passed]  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        sections = [asdict(section) | {"passed": section.passed} for section in self.sections]
        return asdict(self) | {"passed": self.passed, "failures": self.failures, "sections": sections}

    def save(self, file: Path) -> None:
        """Write it as JSON."""
        file.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
