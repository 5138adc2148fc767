"""Each request's own drafter, behind one Drafter that the loop asks."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from surefoot.engine.loop import check_drafts
from surefoot.sequence import Sequence
from surefoot.types import Draft, Drafter, Target


class ChosenDrafters:
    """Hands every sequence to the drafter chosen for it; sequences with the same one are asked about together.

    An error of a drafter is that of the sequence it was asked about, and stands in `failed`; the sequence has no draft
    then. A drafter that fails for several sequences at once is asked again about each of them alone, so it should
    change nothing before it has an answer.
    """

    name = "chosen"

    def __init__(self, target: Target) -> None:
        self._target = target
        self._chosen: dict[Sequence, Drafter] = {}
        self.failed: dict[Sequence, Exception] = {}

    def choose(self, sequence: Sequence, drafter: Drafter) -> None:
        """Its drafter, until it is released."""
        self._chosen[sequence] = drafter

    def of(self, sequence: Sequence) -> Drafter:
        """The drafter chosen for the sequence."""
        return self._chosen[sequence]

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """The drafts of all drafters, in the sequences' order."""
        groups: dict[int, tuple[Drafter, list[Sequence], list[int]]] = {}
        for sequence, depth in zip(sequences, depths, strict=True):
            drafter = self._chosen[sequence]
            _, members, rooms = groups.setdefault(id(drafter), (drafter, [], []))
            members.append(sequence)
            rooms.append(depth)
        drafts: dict[Sequence, Draft] = {}
        for group in groups.values():
            drafts |= self._ask(*group)
        return [drafts[sequence] for sequence in sequences]

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """Show it to the sequence's drafter."""
        try:
            self._chosen[sequence].observe(sequence, position, hidden)
        except Exception as error:
            self.failed.setdefault(sequence, error)

    def release(self, sequence: Sequence) -> None:
        """Make its drafter forget the sequence."""
        self.failed.pop(sequence, None)
        self._chosen.pop(sequence).release(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The choice for a sequence that its drafter has never heard of."""
        del self._chosen[sequence]

    def _ask(self, drafter: Drafter, sequences: list[Sequence], depths: list[int]) -> dict[Sequence, Draft]:
        try:
            answers = check_drafts(drafter, drafter.propose(sequences, depths), depths, self._target.vocab_size)
        except Exception as error:
            if len(sequences) == 1:
                self.failed.setdefault(sequences[0], error)
                return {sequences[0]: Draft(source=drafter.name)}
            drafts: dict[Sequence, Draft] = {}
            for sequence, depth in zip(sequences, depths, strict=True):
                drafts |= self._ask(drafter, [sequence], [depth])
            return drafts
        return dict(zip(sequences, answers, strict=True))
