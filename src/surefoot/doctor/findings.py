"""What the doctor says: findings, each with a code that stays the same from version to version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that was found. An "error" means no text, wrong text, or drafts that are not accepted; a "warning" that
    it may; a "note" is good to know. `advice` says what to do; only notes may come without."""

    severity: Severity
    code: str
    sentence: str
    advice: str = ""


def listing(names: Iterable[str], most: int = 8) -> str:
    """Names in a sentence, cut after so many."""
    every = list(names)
    more = len(every) - most
    return ", ".join(every if more <= 0 else [*every[:most], f"and {more} more"])
