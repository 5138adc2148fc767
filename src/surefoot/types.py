"""Plain data that the layers hand to one another, and the two Protocols they meet through.

One step of the loop: a drafter proposes a `Draft`, the target scores the `Window` [last token, draft...] and gives
`Scores`, verification turns both into a `Verdict`, and the target commits `1 + verdict.accepted` tokens of the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from surefoot.sequence import Sequence


@dataclass(frozen=True)
class Draft:
    """Proposed tokens of one sequence. `probs` [K, V] float32 is the very distribution each token was drawn from;
    None says that the drafter was certain (a point mass on each token)."""

    tokens: tuple[int, ...] = ()
    probs: Tensor | None = None
    source: str = ""


@dataclass(frozen=True)
class Window:
    """What the target reads of one sequence in one verify pass: the last emitted token, then the draft."""

    slot: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Scores:
    """The target's answer to a window of W tokens: `logits` [W, V], and the post-norm `hidden` [W, H] for drafters
    that read it (None for targets that do not give it). Row i follows window token i."""

    logits: Tensor
    hidden: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """How many draft tokens were kept, and the one token that follows them: the replacement for the first rejected
    draft token, or the bonus token after a fully accepted draft."""

    accepted: int
    token: int


class ReadsPrompts(Protocol):
    """The part of a `Target` that reads prompts."""

    def prefill(self, slot: int, tokens: Seq[int]) -> Iterator[tuple[int, Tensor | None]]:
        """Empty the slot and read `tokens` into it, chunk by chunk; yields (position of the chunk's first token,
        post-norm hidden [n, H] or None) after each chunk. No tokens: the slot is emptied and nothing is yielded."""


class Target(ReadsPrompts, Protocol):
    """The model whose output is promised. A slot is one sequence's place in its caches."""

    vocab_size: int
    max_len: int
    slots: int

    def verify(self, windows: Seq[Window]) -> list[Scores]:
        """Score one window per slot. Every window must be committed before the slot's next one."""

    def commit(self, slot: int, keep: int) -> None:
        """Make the window's first `keep` tokens permanent (1 <= keep <= W) and forget the rest."""

    def release(self, slot: int) -> None:
        """Forget the slot's sequence."""


@dataclass(frozen=True)
class Kept:
    """Copies of what a slot holds of its sequence's positions `start .. stop - 1`, in the CPU's memory, and of what it
    carries on from there; the owner knows the order of the tensors."""

    start: int
    stop: int
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Memory of the copies."""
        return sum(tensor.nbytes for tensor in self.tensors)


@runtime_checkable
class ResumableTarget(ReadsPrompts, Protocol):
    """What a Target offers besides, so that a prompt's beginning need not be read twice.

    Prompts are read in chunks that begin at multiples of `chunk`. A state depends on where the chunks before it ended,
    in its last bits: so only one that stands at a multiple of `chunk`, or at the very end of the tokens to be read, is
    the one that reading would give.
    """

    chunk: int

    def keep(self, slot: int, start: int, stop: int) -> Kept:
        """Copy positions `start .. stop - 1` while `stop` tokens have been read. No window may be open."""

    def resume(self, slot: int, tokens: Seq[int], kept: Seq[Kept]) -> Iterator[tuple[int, Tensor]]:
        """`prefill`, but for tokens that are put back from copies, which follow one another: from position 0 on, or
        (if the first copy begins later) behind what has been read of the same tokens. Always yields hidden states."""


@runtime_checkable
class Resumable(Protocol):
    """A Drafter says by `part` that it may be shown a prompt from a later position on: None if it needs nothing for
    that, else the name of what it has to be given back (a `ResumableDrafter`), the same for all that keep the same."""

    part: str | None


@runtime_checkable
class ResumableDrafter(Resumable, Protocol):
    """What such a Drafter offers besides."""

    def keep(self, sequence: Sequence, start: int, stop: int) -> Kept:
        """Copy what it holds of positions `start .. stop - 1` after observing the first `stop`."""

    def resume(self, sequence: Sequence, kept: Seq[Kept]) -> None:
        """Take copies that follow one another for what would have been observed: from position 0 on, or behind what
        was."""


class Drafter(Protocol):
    """Anything that proposes tokens. It never sees the target's caches, the acceptance rule or the engine."""

    name: str

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """At most `depths[i]` tokens (possibly 0) that may follow `sequences[i]`."""

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """Tokens `position .. position + n - 1` of the sequence are committed; `hidden` [n, H] are the target's
        post-norm hidden states there. The prompt is the first thing observed, in chunks. `sequence.tokens` already
        holds the token that follows the last of them."""

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence."""
