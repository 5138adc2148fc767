"""Plain data that the layers hand to one another, and the two Protocols they meet through.

One step of the loop: a drafter proposes a `Draft`, the target scores the `Window` [last token, draft...] and gives
`Scores`, verification turns both into a `Verdict`, and the target commits `1 + verdict.accepted` tokens of the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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


class Target(Protocol):
    """The model whose output is promised. A slot is one sequence's place in its caches."""

    vocab_size: int
    max_len: int
    slots: int

    def prefill(self, slot: int, tokens: Seq[int]) -> Iterator[tuple[int, Tensor | None]]:
        """Empty the slot and read `tokens` into it, chunk by chunk; yields (position of the chunk's first token,
        post-norm hidden [n, H] or None) after each chunk. No tokens: the slot is emptied and nothing is yielded."""

    def verify(self, windows: Seq[Window]) -> list[Scores]:
        """Score one window per slot. Every window must be committed before the slot's next one."""

    def commit(self, slot: int, keep: int) -> None:
        """Make the window's first `keep` tokens permanent (1 <= keep <= W) and forget the rest."""

    def release(self, slot: int) -> None:
        """Forget the slot's sequence."""


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
