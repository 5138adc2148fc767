"""One request while it runs: its tokens, its slot, and when it ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from surefoot.sampling import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass
class Sequence:
    """Prompt and output of one request. `tokens` holds both; the last one has been emitted but not yet read by the
    target. `stop_ids` end the output; `limit` is the length (prompt included) at which it ends in any case."""

    slot: int
    tokens: list[int]
    params: SamplingParams
    limit: int
    stop_ids: frozenset[int] = frozenset()
    prompt_length: int = field(init=False)
    finish_reason: FinishReason | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def output(self) -> list[int]:
        """The emitted tokens."""
        return self.tokens[self.prompt_length :]

    @property
    def room(self) -> int:
        """How many more tokens may be emitted."""
        return self.limit - len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> int:
        """Emit tokens until one ends the sequence; returns how many were emitted. Sets `finish_reason`."""
        emitted = 0
        for token in tokens:
            if self.finish_reason is not None:
                break
            self.tokens.append(token)
            emitted += 1
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.limit:
                self.finish_reason = "length"
        return emitted
