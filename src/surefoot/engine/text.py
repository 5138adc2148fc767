"""An output as text while its tokens come: whole characters only, and nothing from the first stop string on."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from surefoot.loading.tokenizer import StreamDecoder, Tokenizer


class OutputText:
    """Tokens to text, for streams and for whole outputs alike.

    All that `push` and one last `flush` return, put together, is the text of the tokens up to the first stop string, or
    all of it; in whatever pieces the tokens come. The first is the one that is complete first (of several complete at
    the same character, the longest). What may turn out to be the beginning of one is held back. One that is complete
    before `min_new_tokens` tokens does not count. `found` is the one that was, `stopped` says whether one was;
    tokens behind the one that completed it give nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Seq[str] = (), min_new_tokens: int = 0, skip_special_tokens: bool = True
    ) -> None:
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens)
        self._stop = tuple(stop)
        self._least = min_new_tokens
        self._count = 0
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.found is not None

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        if not self._stop:
            return self._decoder.push(tokens)
        given = ""
        for token in tokens:
            if self.stopped:
                break
            self._count += 1
            given += self._take(self._decoder.push((token,)))
        return given

    def flush(self) -> str:
        """What is still held back, at the end of the output."""
        rest = "" if self.stopped else self._take(self._decoder.flush())
        rest, self._held = rest + self._held, ""
        return rest

    def _take(self, new: str) -> str:
        """Add final characters; the text that can be given now."""
        text = self._held + new
        found = self._find(text, len(self._held)) if self._count >= self._least else None
        if found is not None:
            self.found, self._held = found[1], ""
            return text[: found[0]]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _find(self, text: str, old: int) -> tuple[int, str] | None:
        """Where the stop string begins that is complete first behind the first `old` characters, and which it is."""
        ends = []
        for stop in self._stop:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), start, stop))
        return min(ends)[1:] if ends else None


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text with which the stop string begins, itself excepted."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
