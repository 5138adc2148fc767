"""One request while it runs: its tokens, its slot, and when it ends."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from surefoot.sampling import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's natural log-probability, and the most probable tokens at its place with theirs, best first (of equals
    the lowest id)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Rules(Protocol):
    """What a request's history does to its logits. A sequence has its own; both target and drafter rows go through it,
    so that each position of a draft sees the draft in front of it."""

    def rows(self, logits: Tensor, history: Seq[int], draft: Seq[int]) -> Tensor:
        """Ruled logits [n, V] float32 of the last n positions: the last row sees `history` and the whole draft, each
        earlier row one draft token less. A row's bits depend on what it sees alone."""

    def cut(self, history: Seq[int], draft: Seq[int]) -> int:
        """How many draft tokens the grammar takes."""

    def forced(self, history: Seq[int]) -> list[int]:
        """Tokens that the grammar all but prescribes from here on."""


class TextWatch(Protocol):
    """The output as text, looking out for stop strings."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete."""


class PromptReader(Protocol):
    """Scores the prompt while it is read."""

    logprobs: list[TokenLogprobs | None]

    def read(self, position: int, hidden: Tensor) -> None:
        """The target's hidden states [n, H] of the prompt's tokens from `position` on."""


@dataclass(eq=False)  # one is never another, whatever they hold
class Sequence:
    """Prompt and output of one request. `tokens` holds both; the last one has been emitted but not yet read by the
    target. `stop_ids` end the output, as does `text` once a stop string is complete; `limit` is the length (prompt
    included) at which it ends in any case. `rules` are None where the history has no say; `prompt` is shown the
    target's hidden states while the prompt is read. `draft_length`, if given, bounds its drafts in place of the loop's;
    `cached_tokens` of the prompt were not read but known from an earlier one; `error` is why it ended, if by "error".
    """

    slot: int
    tokens: list[int]
    params: SamplingParams
    limit: int
    stop_ids: frozenset[int] = frozenset()
    rules: Rules | None = field(default=None, repr=False)
    text: TextWatch | None = field(default=None, repr=False)
    prompt: PromptReader | None = field(default=None, repr=False)
    draft_length: int | None = None
    prompt_length: int = field(init=False)
    finish_reason: FinishReason | None = field(init=False, default=None)
    error: Exception | None = field(init=False, default=None)
    cached_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def output(self) -> list[int]:
        """The emitted tokens."""
        return self.tokens[self.prompt_length :]

    @property
    def emitted(self) -> int:
        """How many tokens have been emitted."""
        return len(self.tokens) - self.prompt_length

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
            if self.text is not None:
                self.text.push((token,))
            if token in self.stop_ids or (self.text is not None and self.text.stopped):
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.limit:
                self.finish_reason = "length"
        return emitted
