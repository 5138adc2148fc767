"""The drafter that proposes nothing: plain decoding through the same loop, the reference for every other drafter."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from surefoot.sequence import Sequence
from surefoot.types import Draft


class NoDrafter:
    """Proposes an empty draft for every sequence."""

    name = "none"
    part: str | None = None

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """One empty draft per sequence, whatever the depths."""
        return [Draft(source=self.name) for _ in sequences]

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """Nothing to remember."""

    def release(self, sequence: Sequence) -> None:
        """Nothing to forget."""
