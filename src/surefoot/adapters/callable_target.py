"""A plain function as a `Target`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor

from surefoot.errors import InputError
from surefoot.sampling import require_int
from surefoot.types import Scores, Window
from surefoot.verify.arrays import real_tensor

Forward = Callable[[list[int], int], Any]
"""forward(token_ids, position) -> logits: see `CallableTarget`."""

ANY_SIZE = 2**63 - 1  # of a vocabulary that is not known yet


class CallableTarget:
    """Wraps `forward(token_ids, position) -> logits`.

    The function reads n tokens, the first of which stands at `position`, and returns the logits after each of them:
    [n, V] (for one token [V] is enough), as a tensor, an array, or lists. Positions follow one another, except that
    `position` may be one read before: everything read from there on is then void and must be forgotten (a drafted token
    was refused). A new sequence begins at position 0. One sequence at a time.

    The result is lossless if the logits after a token depend on that token and those before it alone, not on how many
    were read at once. Raises InputError for sizes below 1, and when the logits have another
    shape or are not real numbers.
    """

    slots = 1

    def __init__(
        self, forward: Forward, *, max_len: int = 4096, vocab_size: int | None = None, prefill_chunk: int = 512
    ) -> None:
        vocab_size = ANY_SIZE if vocab_size is None else vocab_size
        for name, value in (("max_len", max_len), ("prefill_chunk", prefill_chunk), ("vocab_size", vocab_size)):
            require_int(name, value, low=1)
        self.max_len = max_len
        self.vocab_size = vocab_size
        self._forward = forward
        self._chunk = prefill_chunk
        self._length = 0

    def prefill(self, slot: int, tokens: Seq[int]) -> Iterator[tuple[int, Tensor | None]]:
        """Read the tokens from position 0 on, in chunks; yields (position, None) after each."""
        self._length = 0
        for position in range(0, len(tokens), self._chunk):
            chunk = list(tokens[position : position + self._chunk])
            self._logits(chunk)
            self._length += len(chunk)
            yield position, None

    def verify(self, windows: Seq[Window]) -> list[Scores]:
        """Logits [W, V] of each window (there is one slot, so of one)."""
        return [Scores(self._logits(list(window.tokens))) for window in windows]

    def commit(self, slot: int, keep: int) -> None:
        """The next window begins behind the kept tokens; the function forgets the others when it is called for it."""
        self._length += keep

    def release(self, slot: int) -> None:
        """Nothing to do: the next sequence begins at position 0."""

    def mark(self, slot: int) -> None:
        """Remember the position (so that a function can serve as draft model)."""
        self._mark = self._length

    def rewind(self, slot: int) -> None:
        """Go back to the marked position."""
        self._length = self._mark

    def _logits(self, tokens: list[int]) -> Tensor:
        size = "V" if self.vocab_size == ANY_SIZE else self.vocab_size
        expected = f"logits [{len(tokens)}, {size}]"
        logits = real_tensor("forward", self._forward(list(tokens), self._length), expected)
        if logits.dim() == 1 and len(tokens) == 1:
            logits = logits[None]
        fits = logits.dim() == 2 and len(logits) == len(tokens) and logits.shape[1] > 0
        if not fits or size not in ("V", logits.shape[1]):
            raise InputError(f"forward: expected {expected}, found {list(logits.shape)}")
        self.vocab_size = logits.shape[1]
        return logits.float()
