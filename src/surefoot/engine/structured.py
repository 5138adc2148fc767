"""Grammars by llguidance, behind `verify.rules.Grammar`. Imported where a request asks for structured output.

`pip install 'surefoot[structured]'` brings the library; nothing else imports it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from torch import Tensor

from surefoot.errors import InputError, TokenizerError, shown
from surefoot.loading.tokenizer import Tokenizer
from surefoot.sampling import StructuredOutput

T = TypeVar("T")
CACHED = 32  # compiled grammars that are kept for requests to come


class Grammars:
    """The grammars of one tokenizer. Raises TokenizerError for a tokenizer that the library does not know."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> None:
        try:
            ids = list(eos_token_ids) or None
            self._tokenizer = LLTokenizer(tokenizer.backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=ids)
        except Exception as error:  # whatever the library finds wrong
            raise TokenizerError(f"structured: expected a tokenizer that llguidance knows, found: {error}") from error
        self._compiled = lru_cache(CACHED)(self._compile)

    def build(self, wanted: StructuredOutput, stop_ids: Iterable[int]) -> MatcherGrammar:
        """The grammar at the beginning of its text. Stop ids that are special tokens may come where the text is
        complete; others are text like any. Raises InputError for a grammar that is none, and if no stop id could come.
        """
        ends = tuple(token for token in sorted(stop_ids) if self._tokenizer.is_special_token(token))
        if not ends:
            raise InputError("structured: expected an end-of-sequence id that ends the output (ignore_eos off), found "
                             f"stop ids {sorted(stop_ids)}")  # fmt: skip
        return MatcherGrammar(self._compiled(wanted).deep_copy(), ends, self._tokenizer)

    def _compile(self, wanted: StructuredOutput) -> LLMatcher:
        try:
            limits = LLParserLimits(verbose_errors=False)
            matcher = LLMatcher(self._tokenizer, _source(wanted), log_level=0, limits=limits)
            fault = matcher.get_error() if matcher.is_error() else ""
        except Exception as error:  # of a converter: whatever it finds wrong
            raise InputError(f"structured: expected a grammar that can be compiled, found: {error}") from error
        if fault:
            raise InputError(f"structured: expected a grammar that can be compiled, found: {shown(fault)}")
        return matcher


class MatcherGrammar:
    """See `verify.rules.Grammar`; T is the number of ids that have a token. Raises InputError where the library gives
    up on a grammar that has grown too complex."""

    def __init__(self, matcher: LLMatcher, ends: tuple[int, ...], tokenizer: LLTokenizer) -> None:
        self._matcher, self._ends, self._size = matcher, ends, tokenizer.vocab_size
        self._no_text = (*ends, *tokenizer.eos_tokens)

    def push(self, token: int) -> bool:
        """Read a token, if it may come here."""
        known = token < self._size and token not in self._no_text  # of others the library makes an error for good
        return known and self._checked(self._matcher.try_consume_tokens([token])) == 1

    def pop(self, count: int) -> None:
        """Take back the last tokens."""
        if count:
            self._checked(self._matcher.rollback(count))

    def mask(self) -> Tensor:
        """Which tokens may come here, bool [T]."""
        bits = np.frombuffer(self._checked(self._matcher.compute_bitmask()), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_))
        allowed[list(self._no_text)] = False
        return allowed

    def ends(self) -> tuple[int, ...]:
        """The stop ids that may come here."""
        return self._ends if self._checked(self._matcher.is_accepting()) else ()

    def complete(self) -> bool:
        """Whether nothing but a stop id may come."""
        return self._checked(self._matcher.is_stopped())

    def forced(self) -> list[int]:
        """The tokens of the text that has to come; often with others that spell it differently."""
        return self._checked(self._matcher.compute_ff_tokens())

    def _checked(self, answer: T) -> T:
        if self._matcher.is_error():
            found = self._matcher.get_error().splitlines()[0]
            raise InputError(f"structured: expected a grammar of bounded complexity, found: {found}")
        return answer


def _source(wanted: StructuredOutput) -> str:
    """The grammar in the library's own notation."""
    if wanted.json_schema is not None:
        assert isinstance(wanted.json_schema, str)
        # White space between the parts could go on for ever, and a model that likes it never comes to the end. A schema
        # that wants it says so itself, in its "x-guidance".
        return LLMatcher.grammar_from_json_schema(wanted.json_schema, defaults={"whitespace_flexible": False})
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        # The strings of a Lark grammar are those of JSON.
        return LLMatcher.grammar_from_lark(
            "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        )
    assert wanted.grammar is not None
    return LLMatcher.grammar_from_lark(any_to_lark(wanted.grammar))
