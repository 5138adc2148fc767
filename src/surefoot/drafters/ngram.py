"""N-gram prompt lookup: what followed the last tokens when they stood in the text before.

The method is Saxena's prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding): no model, no training,
and good wherever the output repeats its prompt or itself. `propose` is the plain definition, for loops of one's own;
`NgramDrafter` finds the same place through an index that grows with the text, so that a step costs the same after 100
tokens and after 100,000.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from surefoot.errors import InputError, shown
from surefoot.sampling import require_int
from surefoot.sequence import Sequence
from surefoot.types import Draft

MatchRule = Literal["latest", "first"]

AFTER_ONE = 3  # draft tokens that a match of a single token is good for: a quarter of them begin well (docs/ngram.md)
NEAR = 4  # copied tokens after which a refused one is a near miss
AFTER_MISS = 2  # matched tokens that the place behind a near miss is as good as: three in five go on rightly
LONGEST = 32  # a match is measured up to this length; beyond it every match is equally good


@dataclass(frozen=True)
class Match:
    """An earlier place where the text's last `length` tokens stood; `start` is the position of the token after it. (Of
    a near miss, `length` is what the place is worth.)"""

    length: int
    start: int


def propose(
    tokens: Seq[int],
    recent: Seq[int],
    max_ngram: int = 5,
    max_draft: int = 4,
    match: MatchRule = "latest",
    min_ngram: int = 2,
) -> list[int]:
    """The at most `max_draft` tokens that follow an occurrence in `tokens` of the last tokens of `recent`.

    The longest suffix of `recent` that occurs with something after it wins, from `max_ngram` tokens down to
    `min_ngram`; among its occurrences the `match` rule decides. Empty if there is none. `tokens` alone is searched: for
    the whole text, hand it over in both arguments. Pure; reads all of `tokens`.

    Raises InputError for sizes below 1, `max_ngram` below `min_ngram`, or an unknown rule.
    """
    _check(max_ngram, min_ngram, match)
    require_int("max_draft", max_draft, low=1)
    for length in range(min(max_ngram, len(recent)), min_ngram - 1, -1):
        suffix = list(recent[-length:])
        ends = range(length, len(tokens))
        for end in ends if match == "first" else reversed(ends):
            if list(tokens[end - length : end]) == suffix:
                return list(tokens[end : end + max_draft])
    return []


class NgramIndex:
    """Where each n-gram of a growing list of tokens is followed by what.

    An n-gram is entered once the token after it is known, so what is found always has a continuation. A token costs
    `max_ngram - min_ngram + 1` dictionary entries when it arrives, a look-up at most as many reads; neither depends on
    how long the list is.
    """

    def __init__(self, tokens: list[int], max_ngram: int = 5, min_ngram: int = 2, match: MatchRule = "latest") -> None:
        _check(max_ngram, min_ngram, match)
        self._tokens = tokens
        self._lengths = range(min_ngram, max_ngram + 1)
        self._latest = match == "latest"
        self._starts: dict[tuple[int, ...], int] = {}
        self._known = 0

    def update(self) -> None:
        """Take in the tokens appended since the last call."""
        tokens, starts = self._tokens, self._starts
        for start in range(max(self._known, 1), len(tokens)):
            before = tuple(tokens[max(0, start - self._lengths[-1]) : start])
            for length in self._lengths:
                if length > len(before):
                    break
                if self._latest:
                    starts[before[-length:]] = start
                else:
                    starts.setdefault(before[-length:], start)
        self._known = len(tokens)

    def find(self) -> Match | None:
        """Where the list's longest known suffix stood before; None if nowhere. Call after `update`."""
        tokens = self._tokens
        suffix = tuple(tokens[-self._lengths[-1] :])
        for length in reversed(self._lengths):
            if length <= len(suffix) and (start := self._starts.get(suffix[-length:])) is not None:
                # Longer agreement does not change the place, but says how far it can be trusted.
                longest = min(LONGEST, start)
                while length < longest and tokens[start - length - 1] == tokens[-length - 1]:
                    length += 1
                return Match(length, start)
        return None


@dataclass
class _Known:
    """A running sequence's n-grams, and how many positions the last copy's source lay before it."""

    sequence: Sequence
    index: NgramIndex
    distance: int | None = None

    def behind_near_miss(self) -> Match | None:
        """The place in the last copy's source behind the token that the last one stands for, if the `NEAR` tokens
        before it were those of the source. (They differ: else an n-gram would have been found.)"""
        tokens = self.sequence.tokens
        if self.distance is None or (start := len(tokens) - self.distance) <= NEAR:
            return None
        near = tokens[start - 1 - NEAR : start - 1] == tokens[-1 - NEAR : -1]
        return Match(AFTER_MISS, start) if near else None


class NgramDrafter:
    """Drafts what followed the longest known suffix of prompt and output.

    `max_ngram` and `min_ngram` bound the suffixes that are looked up; `match` chooses among the occurrences of one
    ("latest" suits text that changes as it grows). A draft that reaches the end of the text goes on with its own
    tokens, which continues a text that repeats itself. It stops after a token that would end the output. With
    `min_ngram` 1, a match of one token gives a short draft, which pays where a few more tokens cost little to verify.
    With `reanchor`, a copy that met one other token goes on behind the token which that one replaced, unless the new
    tokens are known from elsewhere: so an edit does not lose its source.

    Raises InputError for a length below 1, `max_ngram` below `min_ngram`, or an unknown rule.
    """

    name = "ngram"
    part: str | None = None  # its index is made from the tokens alone

    def __init__(
        self, max_ngram: int = 5, min_ngram: int = 2, match: MatchRule = "latest", reanchor: bool = True
    ) -> None:
        _check(max_ngram, min_ngram, match)
        self._settings = (max_ngram, min_ngram, match)
        self._reanchor = reanchor
        self._known: dict[int, _Known] = {}  # by slot

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """At most `depths[i]` tokens for each sequence, certain ones (`probs` None); empty where nothing matches."""
        return [self.draft(s, self.find(s), depth) for s, depth in zip(sequences, depths, strict=True)]

    def find(self, sequence: Sequence) -> Match | None:
        """The place the next draft would be copied from, for those who want to judge it first."""
        known = self._of(sequence)
        known.index.update()
        found = known.index.find()
        return known.behind_near_miss() if found is None and self._reanchor else found

    def draft(self, sequence: Sequence, match: Match | None, depth: int) -> Draft:
        """The draft that copies at most `depth` tokens from a match `find` has given."""
        if match is None or depth < 1:
            return Draft(source=self.name)
        self._of(sequence).distance = len(sequence.tokens) - match.start
        if match.length == 1:
            depth = min(depth, AFTER_ONE)
        tokens = sequence.tokens[match.start : match.start + depth]
        period = len(sequence.tokens) - match.start
        while len(tokens) < depth:
            tokens.append(tokens[-period])
        for place, token in enumerate(tokens):
            if token in sequence.stop_ids:
                tokens = tokens[: place + 1]
                break
        return Draft(tuple(tokens), source=self.name)

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """Index the sequence's new tokens (during prefill: the whole prompt)."""
        self._of(sequence).index.update()

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._known.pop(sequence.slot, None)

    def _of(self, sequence: Sequence) -> _Known:
        known = self._known.get(sequence.slot)
        if known is None or known.sequence is not sequence:
            known = self._known[sequence.slot] = _Known(sequence, NgramIndex(sequence.tokens, *self._settings))
        return known


def _check(max_ngram: int, min_ngram: int, match: str) -> None:
    require_int("min_ngram", min_ngram, low=1)
    require_int("max_ngram", max_ngram, low=1)
    if max_ngram < min_ngram:
        raise InputError(f"max_ngram: expected at least min_ngram = {min_ngram}, found {max_ngram}")
    if match not in get_args(MatchRule):
        raise InputError(f"match: expected one of {get_args(MatchRule)}, found {shown(match)}")
