"""What comes back for a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from surefoot.engine.stats import Stats
from surefoot.loading.tokenizer import Tokenizer, require_tokenizer
from surefoot.sequence import FinishReason


@dataclass(frozen=True)
class Generation:
    """`token_ids` are the new tokens, an ending stop token included; `finish_reason` is "stop" or "length"."""

    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The tokens as text, special tokens left out. Raises TokenizerError if the model has no tokenizer."""
        return require_tokenizer(self.tokenizer, "Generation.text").decode(self.token_ids)
