"""What a request brings beside its tokens: rules, stop strings, the wish for the prompt's log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

from torch import Tensor

from surefoot.engine.text import OutputText
from surefoot.errors import InputError
from surefoot.loading.tokenizer import Tokenizer, require_tokenizer
from surefoot.model import Decoder
from surefoot.sampling import SamplingParams
from surefoot.sequence import TokenLogprobs
from surefoot.verify.logprobs import token_logprobs
from surefoot.verify.rules import Grammar, Rules, Thinking, check_ids

if TYPE_CHECKING:
    from surefoot.engine.structured import Grammars

THINK, END_THINK = "<think>", "</think>"
PROMPT_ROWS = 64  # of a prompt's logits at once: a large vocabulary's take a megabyte each


class Intake:
    """What requests need to know of a model: its tokenizer, if it has one, its decoder, if it can be asked."""

    def __init__(self, tokenizer: Tokenizer | None, decoder: Decoder | None, eos_token_ids: Seq[int]) -> None:
        self._tokenizer, self._decoder, self._eos_token_ids = tokenizer, decoder, tuple(eos_token_ids)

    @cached_property
    def size(self) -> int | None:
        """How many ids have a token, where that is known; a vocabulary's ids behind them are padding."""
        return None if self._tokenizer is None else self._tokenizer.vocab_size or None

    def rules(self, params: SamplingParams, prompt: Seq[int], stop_ids: Iterable[int], vocab_size: int) -> Rules | None:
        """The request's rules; None if the history has no say and no id is padding.

        Raises InputError for ids that the vocabulary does not have, a grammar that is none, or a thinking budget where
        no token opens thoughts; TokenizerError where only a tokenizer could help.
        """
        check_ids(params, vocab_size)
        if not params.ruled and (self.size is None or self.size >= vocab_size):
            return None
        stop_ids = tuple(stop_ids)
        wants_thinking = params.thinking_budget is not None or params.structured is not None
        thinking = self._thinking if wants_thinking else None
        if params.thinking_budget is not None and thinking is None:
            require_tokenizer(self._tokenizer, "thinking_budget")
            raise InputError(f"thinking_budget: expected a tokenizer with {THINK} and {END_THINK}, found none of them")
        return Rules(params, prompt, stop_ids=stop_ids, size=self.size, thinking=thinking,
                     grammar=self._grammar(params, stop_ids))  # fmt: skip

    def text(self, params: SamplingParams) -> OutputText | None:
        """What looks out for the request's stop strings, if it has any. Raises TokenizerError without a tokenizer."""
        if not params.stop:
            return None
        return OutputText(require_tokenizer(self._tokenizer, "stop"), params.stop, params.min_new_tokens)

    def prompt_reader(self, params: SamplingParams, prompt: Seq[int]) -> PromptLogprobs | None:
        """What scores the prompt, if that is asked for. Raises InputError for a target that hides its states."""
        if params.prompt_logprobs is None:
            return None
        if self._decoder is None:
            raise InputError("prompt_logprobs: expected a checkpoint's target, found one of another kind")
        return PromptLogprobs(self._decoder, prompt, params.prompt_logprobs)

    def _grammar(self, params: SamplingParams, stop_ids: Seq[int]) -> Grammar | None:
        return None if params.structured is None else self._grammars.build(params.structured, stop_ids)

    @cached_property
    def _grammars(self) -> Grammars:
        tokenizer = require_tokenizer(self._tokenizer, "structured")
        if find_spec("llguidance") is None:
            raise InputError(
                "structured: expected the package llguidance (pip install 'surefoot[structured]'), found none"
            )
        from surefoot.engine.structured import Grammars

        return Grammars(tokenizer, self._eos_token_ids)

    @cached_property
    def _thinking(self) -> Thinking | None:
        if self._tokenizer is None:
            return None
        start, end = (self._tokenizer.backend.token_to_id(text) for text in (THINK, END_THINK))
        return None if start is None or end is None else Thinking(start, end)


class PromptLogprobs:
    """See `surefoot.sequence.PromptReader`. The first token has nothing in front of it, and None for an entry."""

    def __init__(self, decoder: Decoder, prompt: Seq[int], count: int) -> None:
        self._decoder, self._prompt, self._count = decoder, list(prompt), count
        self.logprobs: list[TokenLogprobs | None] = [None]

    def read(self, position: int, hidden: Tensor) -> None:
        """The states [n, H] of the prompt's tokens from `position` on, each of which scores the token behind it."""
        rows = (row for part in hidden.split(PROMPT_ROWS) for row in self._decoder.bulk_logits(part))
        tokens = self._prompt[position + 1 :]
        self.logprobs += [token_logprobs(row, token, self._count) for row, token in zip(rows, tokens, strict=False)]
