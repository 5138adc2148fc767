"""What comes back for a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from surefoot.engine.stats import Stats
from surefoot.loading.tokenizer import Tokenizer, require_tokenizer
from surefoot.sequence import FinishReason, TokenLogprobs


@dataclass(frozen=True)
class Generation:
    """`token_ids` are the new tokens, an ending stop token included, or up to the one that completed a stop string;
    `finish_reason` is "stop" or "length".

    `logprobs` has an entry for each of them, and `prompt_logprobs` for each token of the prompt (None for the first,
    which nothing comes before), if they were asked for. `further` are the other choices of a request for several.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = field(default=None, repr=False)
    further: tuple[Generation, ...] = ()
    cut_text: str | None = field(default=None, repr=False)

    @property
    def choices(self) -> list[Generation]:
        """All `n` choices, this one first."""
        return [self, *self.further]

    @property
    def text(self) -> str:
        """The tokens as text, special tokens left out, up to the first stop string (`cut_text`, where there were any to
        look for). Raises TokenizerError if the model has no tokenizer."""
        if self.cut_text is not None:
            return self.cut_text
        return require_tokenizer(self.tokenizer, "Generation.text").decode(self.token_ids)
