"""What a request's history does to its logits, at every position of a draft.

Target rows and draft rows pass through the same `Rules`, of a sequence's own, before `verify` and `draft_token`: each
row sees the tokens in front of it, the earlier tokens of its draft included. In this order: ids without a token are
excluded; the caller's processors; allowed ids; bad words; stop ids before `min_new_tokens`; the grammar; the forced end
of thinking; logit_bias; penalties. `verify.distribution` does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from surefoot.errors import InputError, shown
from surefoot.sampling import LogitsProcessor, SamplingParams, check_token_ids
from surefoot.sequence import Sequence


class Grammar(Protocol):
    """A grammar that has read the beginning of a text."""

    def push(self, token: int) -> bool:
        """Read a token; False, and nothing is read, if it may not come here."""

    def pop(self, count: int) -> None:
        """Take back the last `count` tokens that were read."""

    def mask(self) -> Tensor:
        """Which tokens may come here, bool [T], ends aside; ids from T on may not."""

    def ends(self) -> tuple[int, ...]:
        """The stop ids that may come here: none, unless the text is complete."""

    def complete(self) -> bool:
        """Whether nothing but a stop id may come."""

    def forced(self) -> list[int]:
        """The usual tokens of what has to come, if anything has."""


@dataclass(frozen=True)
class Thinking:
    """The ids of `<think>` and `</think>`."""

    start: int
    end: int

    def is_open(self, tokens: Seq[int]) -> bool:
        """Whether a text of these tokens ends within thoughts."""
        return next((token == self.start for token in reversed(tokens) if token in (self.start, self.end)), False)


@dataclass(frozen=True)
class _Place:
    """Where a text stands: whether within thoughts, how many tokens these have taken, whether the grammar has begun,
    and whether the text has not ended yet (by a stop id, or by a token that the grammar refused)."""

    thinking: bool
    thoughts: int
    begun: bool
    going: bool = True


def ruled(sequence: Sequence, logits: Tensor, draft: Seq[int] = ()) -> Tensor:
    """The logits [n, V] of the last n positions of the sequence and a draft behind it, by the sequence's rules."""
    return logits if sequence.rules is None else sequence.rules.rows(logits, sequence.tokens, draft)


def draft_row(sequence: Sequence, logits: Tensor, draft: Seq[int]) -> Tensor | None:
    """A drafter's logits [V] behind what it has drafted, by the sequence's rules; None where they leave nothing of what
    it can draft (a reduced vocabulary, for one), so that the draft ends there."""
    if sequence.rules is None:
        return logits
    row = sequence.rules.rows(logits[None], sequence.tokens, draft)[0]
    return None if bool((row == -math.inf).all()) else row


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise InputError for an id among the parameters that a vocabulary of this size does not have."""
    check_token_ids("logit_bias", list(dict(params.logit_bias)), vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for index, word in enumerate(params.bad_words_ids):
        check_token_ids(f"bad_words_ids[{index}]", word, vocab_size)


class Rules:
    """See `surefoot.sequence.Rules`. One sequence's, whose history may only grow.

    `size` is how many ids have a token (None: all), `prompt` the prompt's tokens. All that is remembered of the
    history, and of a draft while its rows are made, is here: counts, thoughts, the grammar's place in the text. The
    grammar begins with the output, or behind the thoughts that the prompt has opened.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Seq[int],
        *,
        stop_ids: Iterable[int] = (),
        size: int | None = None,
        thinking: Thinking | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self._params, self._prompt, self._size = params, tuple(prompt), size
        self._stop_ids = sorted(stop_ids)
        self._thinking, self._grammar = thinking, grammar
        inside = thinking is not None and thinking.is_open(prompt)
        self._place = _Place(inside, 0, begun=not inside)
        self._known = len(prompt)
        self._pushed: list[
            tuple[int, _Place, bool]
        ] = []  # of a draft: token, place before, whether the grammar read it
        self._words = [word for word in params.bad_words_ids if len(word) > 1]
        self._dense: _Dense | None = None  # made when the first rows show the size of the vocabulary

    def rows(self, logits: Tensor, history: Seq[int], draft: Seq[int]) -> Tensor:
        """The last n positions' logits [n, V] by the rules, a copy in float32. Raises InputError for an id that the
        logits do not have, a processor that does not give logits back, and a grammar that has grown too complex."""
        self._catch_up(history)
        rows = logits.to(torch.float32, copy=True)
        if self._dense is None:
            self._dense = _Dense(self._params, rows[0], self._size, self._prompt, history[len(self._prompt) :])
        seen = len(draft) + 1 - len(rows)  # draft tokens that the first row sees
        with self._drafting():
            for token in draft[:seen]:
                self._push(token)
            for row in rows:
                self._dense.exclude(row, history, draft[:seen])
                self._exclude(row, history, draft[:seen])
                self._dense.shift(row)
                for token in draft[seen : seen + 1]:
                    self._push(token)
                seen += 1
        return rows

    def cut(self, history: Seq[int], draft: Seq[int]) -> int:
        """How many draft tokens the grammar takes, a stop id behind a complete text included."""
        self._catch_up(history)
        if self._grammar is None:
            return len(draft)
        with self._drafting():
            return next((count for count, token in enumerate(draft) if not self._push(token)), len(draft))

    def forced(self, history: Seq[int]) -> list[int]:
        """What the grammar prescribes from here on; nothing within thoughts."""
        self._catch_up(history)
        grammar = self._reader()
        return [] if grammar is None else grammar.forced()

    def _reader(self) -> Grammar | None:
        """The grammar, where it is reading."""
        return self._grammar if self._place.begun and self._place.going else None

    def _catch_up(self, history: Seq[int]) -> None:
        for token in history[self._known :]:
            self._push(token)
        self._known = len(history)
        self._pushed.clear()

    @contextmanager
    def _drafting(self) -> Iterator[None]:
        """Tokens that are pushed inside are forgotten at the end."""
        try:
            yield
        finally:
            if self._grammar is not None:
                self._grammar.pop(sum(read for _, _, read in self._pushed))
            for token, place, _ in reversed(self._pushed):
                self._place = place
                if self._dense is not None:
                    self._dense.count(token, -1)
            self._pushed.clear()

    def _push(self, token: int) -> bool:
        """One more token; whether the grammar takes it, which takes all before it begins and nothing behind the end."""
        before = place = self._place
        grammar, read, taken = self._reader(), False, place.going
        if grammar is not None:
            ends = token in grammar.ends()
            read = not ends and grammar.push(token)
            taken = ends or read
            place = replace(place, going=read)
        if self._thinking is not None:
            if token == self._thinking.start:
                place = replace(place, thinking=True)
            elif token == self._thinking.end:
                place = replace(place, thinking=False, begun=True)
            elif place.thinking:
                place = replace(place, thoughts=place.thoughts + 1)
        self._place = place
        if self._dense is not None:
            self._dense.count(token, 1)
        self._pushed.append((token, before, read))
        return taken

    def _exclude(self, row: Tensor, history: Seq[int], draft: Seq[int]) -> None:
        """What may not come here because of what came before."""
        for word in self._words:
            rest = len(word) - 1
            if (*history[-rest:], *draft)[-rest:] == word[:-1]:
                row[word[-1]] = -math.inf
        grammar, place = self._reader(), self._place
        waiting = self._grammar is not None and not place.begun
        early = len(history) + len(draft) - len(self._prompt) < self._params.min_new_tokens
        if waiting or (early and not (grammar is not None and grammar.complete())):
            row[self._stop_ids] = -math.inf
        if grammar is not None:
            allowed = torch.zeros(len(row), dtype=torch.bool)
            mask = grammar.mask()[: len(row)]
            allowed[: len(mask)] = mask
            allowed[list(grammar.ends())] = True
            row.masked_fill_(~allowed.to(row.device), -math.inf)
        budget = self._params.thinking_budget
        if self._thinking is not None and budget is not None and place.thinking and place.thoughts >= budget:
            end = row[self._thinking.end].clone()
            row.fill_(-math.inf)
            row[self._thinking.end] = torch.where(end == -math.inf, 0.0, end)  # comes, whatever else said no


class _Dense:
    """What the rules know of every token at once: the ids that are out of the question, biases, and counts."""

    def __init__(
        self, params: SamplingParams, like: Tensor, size: int | None, prompt: Seq[int], output: Seq[int]
    ) -> None:
        vocab_size, device = len(like), like.device
        check_ids(params, vocab_size)
        self._params = params
        self._banned = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._banned[vocab_size if size is None else size :] = True
        self._without_token = self._banned.clone()
        if params.allowed_token_ids is not None:
            self._banned[:] = True
            self._banned[list(params.allowed_token_ids)] = False
            self._banned |= self._without_token
        self._banned[[word[0] for word in params.bad_words_ids if len(word) == 1]] = True
        bias = dict(params.logit_bias)
        self._biased = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        self._counts: Tensor | None = None
        if params.penalised:
            self._prompted = torch.zeros_like(self._banned)
            self._prompted[list(prompt)] = True
            self._counts = torch.zeros_like(like)
            for token in output:
                self.count(token, 1)

    def count(self, token: int, by: int) -> None:
        """So many more of this token in the output."""
        if self._counts is not None:
            self._counts[token] += by

    def exclude(self, row: Tensor, history: Seq[int], draft: Seq[int]) -> None:
        """Let the caller's processors see the row, then take out what may never come."""
        if self._params.processors:
            row.masked_fill_(self._without_token, -math.inf)
            for processor in self._params.processors:
                row.copy_(_processed(processor, [*history, *draft], row))
        row.masked_fill_(self._banned, -math.inf)

    def shift(self, row: Tensor) -> None:
        """Add the biases, then the penalties."""
        params = self._params
        if len(self._biased):
            row[self._biased] += self._bias
        if self._counts is None:
            return
        emitted = self._counts > 0
        if params.repetition_penalty != 1.0:
            changed = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
            row.copy_(torch.where(self._prompted | emitted, changed, row))
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            row -= params.frequency_penalty * self._counts + params.presence_penalty * emitted


def _processed(processor: LogitsProcessor, tokens: list[int], row: Tensor) -> Tensor:
    """What the processor makes of the row, which it sees in memory of its own: alignment can choose a kernel."""
    changed = processor(tokens, row.clone())
    if not isinstance(changed, Tensor) or changed.shape != row.shape or not changed.dtype.is_floating_point:
        found = f"{changed.dtype} {list(changed.shape)}" if isinstance(changed, Tensor) else shown(changed)
        raise InputError(f"processor: expected logits {list(row.shape)}, found {found}")
    return changed
