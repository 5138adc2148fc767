"""Two drafters for one sequence: one that copies where the text agrees well, another drafter everywhere else."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from surefoot.sampling import require_int
from surefoot.sequence import Sequence
from surefoot.types import Draft, Drafter, Kept, Resumable, ResumableDrafter

MIN_MATCH = 4  # matched tokens from which a copied draft is taken before the other drafter's


class Agreement(Protocol):
    """Places in texts where a text's last `length` tokens stood before."""

    @property
    def length(self) -> int:
        """Of the longest agreement."""


M = TypeVar("M", bound=Agreement)


class Copier(Drafter, Protocol[M]):
    """A drafter that copies, and tells how well before it does."""

    def find(self, sequence: Sequence) -> M | None:
        """Where it would copy from."""

    def draft(self, sequence: Sequence, match: M | None, depth: int) -> Draft:
        """The draft of at most `depth` tokens from there."""


class Pair(Generic[M]):
    """Two drafters that both observe everything, so that either is ready at any step: one that copies, and another."""

    def __init__(self, first: Copier[M], then: Drafter) -> None:
        self._first = first
        self._then = then
        if isinstance(then, Resumable):
            self.part = then.part

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """Show both what was committed."""
        self._first.observe(sequence, position, hidden)
        self._then.observe(sequence, position, hidden)

    def keep(self, sequence: Sequence, start: int, stop: int) -> Kept:
        """What the other drafter keeps."""
        assert isinstance(self._then, ResumableDrafter)
        return self._then.keep(sequence, start, stop)

    def resume(self, sequence: Sequence, kept: Seq[Kept]) -> None:
        """Give the other drafter what it kept."""
        assert isinstance(self._then, ResumableDrafter)
        self._then.resume(sequence, kept)

    def release(self, sequence: Sequence) -> None:
        """Make both forget the sequence."""
        self._first.release(sequence)
        self._then.release(sequence)


class CombinedDrafter(Pair[M]):
    """Copies from the text if its last `min_match` tokens or more stood there before, and asks `then` otherwise.

    A copied draft costs nothing, so a long agreement beats a model's guess; a short one is often chance. Raises
    InputError if `min_match` is below 1.
    """

    def __init__(self, first: Copier[M], then: Drafter, min_match: int = MIN_MATCH) -> None:
        require_int("min_match", min_match, low=1)
        super().__init__(first, then)
        self.name = f"{then.name}+{first.name}"
        self._min_match = min_match

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """Each sequence's draft from the one or the other; `then` is asked once, for all that are left to it."""
        drafts: list[Draft | None] = []
        for sequence, depth in zip(sequences, depths, strict=True):
            match = self._first.find(sequence)
            good = match is not None and match.length >= self._min_match
            draft = self._first.draft(sequence, match, depth) if good else None
            drafts.append(draft if draft is not None and draft.tokens else None)
        left = [i for i, draft in enumerate(drafts) if draft is None]
        answers = iter(self._then.propose([sequences[i] for i in left], [depths[i] for i in left]) if left else ())
        return [next(answers) if draft is None else draft for draft in drafts]
