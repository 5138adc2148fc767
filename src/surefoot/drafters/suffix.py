"""Suffix-automaton drafting: what most often followed the longest end of the text that is known, here or in earlier
requests.

The idea is SuffixDecoding's (Oliaro et al. 2024, arXiv 2411.04975): what requests repeat is drafted from where it was
read or written before, and a draft is as long as its match is good. In place of a suffix tree, a suffix automaton
(Blumer et al. 1985): it knows matches of any length with at most two states a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from surefoot.errors import InputError
from surefoot.sampling import require_int
from surefoot.sequence import Sequence
from surefoot.types import Draft

CAPACITY = 32_768  # tokens of earlier requests that are known
SEGMENTS = 4  # automata that hold them; the oldest is forgotten as a whole
LONGEST = 64  # a match in earlier requests is measured over so many tokens
COUNTED = 32  # of the strings that end at a token, the longest so many kinds are counted
MIN_MATCH = 1
MIN_CHANCE = 0.2  # four tokens for every matched one


class Place(NamedTuple):
    """Where a string of `length` tokens leads in an automaton."""

    state: int
    length: int


ROOT = Place(0, 0)


class SuffixAutomaton:
    """Every string that occurs in the texts that were added, with what followed it and how often.

    A state stands for all strings that end at the same places; its link leads to the longest string that is an end of
    them and ends elsewhere, too. A token takes constant time to add on average, and at most two states. Counts are
    exact for the `COUNTED` longest kinds of strings that end at a token, and too small for shorter ones.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._length, self._link = [0], [-1]
        self._count, self._latest = [0], [0]  # how often a state's strings occur, and where they last ended
        self._last = 0
        self.size = 0

    @property
    def states(self) -> int:
        """How many there are; the root is one."""
        return len(self._next)

    def begin(self) -> None:
        """The next token begins another text."""
        self._last = 0

    def add(self, token: int) -> None:
        """The text goes on with this token."""
        last, following = self._last, self._next
        if token in following[last]:  # of an earlier text
            new = self._only(last, token)
        else:
            new = self._state(self._length[last] + 1, {}, 0, 0)
            while last >= 0 and token not in following[last]:
                following[last][token] = new
                last = self._link[last]
            self._link[new] = 0 if last < 0 else self._only(last, token)
        self._last = new
        self.size += 1
        for _ in range(COUNTED):
            if new <= 0:
                break
            self._count[new] += 1
            self._latest[new] = self.size
            new = self._link[new]

    def repeated(self) -> Place:
        """The longest end of the text that also ends somewhere else."""
        link = self._link[self._last]
        return ROOT if link < 0 else Place(link, self._length[link])

    def after(self, place: Place, tokens: Iterable[int]) -> Place:
        """The longest known end of a place's string and these tokens."""
        state, length = place
        for token in tokens:
            while token not in self._next[state] and state:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return Place(state, length)

    def continued(self, place: Place) -> tuple[int, float, Place] | None:
        """What most often follows a place's string (of equals what did last), in which share of its places, and where
        it leads; if nothing does, what follows its longest end that something does. None if there is none."""
        state, length = place
        while state and not self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if not state:
            return None
        counts, latest, following = self._count, self._latest, self._next[state]
        token, then = max(following.items(), key=lambda item: (counts[item[1]], latest[item[1]]))
        share = counts[then] / sum(counts[other] for other in following.values())
        return token, share, Place(then, length + 1)

    def _only(self, state: int, token: int) -> int:
        """The state whose longest string is that of `state` and the token, which is known to follow."""
        found = self._next[state][token]
        length = self._length[state] + 1
        if self._length[found] == length:
            return found
        clone = self._state(length, dict(self._next[found]), self._count[found], self._latest[found])
        self._link[clone], self._link[found] = self._link[found], clone
        while state >= 0 and self._next[state].get(token) == found:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _state(self, length: int, following: dict[int, int], count: int, latest: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(-1)
        self._count.append(count)
        self._latest.append(latest)
        return len(self._next) - 1


@dataclass(frozen=True)
class SuffixMatch:
    """The automata that know the end of a text, and where in them; `length` is of the longest match."""

    length: int
    places: tuple[tuple[SuffixAutomaton, Place], ...]


@dataclass
class _Reader:
    """What is known of a running sequence: its own text, and where it stands in those of earlier requests, each with
    the sizes that text and automaton had then."""

    sequence: Sequence
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    places: dict[SuffixAutomaton, tuple[int, int, Place]] = field(default_factory=dict)

    def update(self) -> None:
        for token in self.sequence.tokens[self.own.size :]:
            self.own.add(token)

    def find(self, earlier: Iterable[SuffixAutomaton]) -> list[tuple[SuffixAutomaton, Place]]:
        """The places in its own text and in earlier ones."""
        tokens, held = self.sequence.tokens, self.places
        self.places = {}
        for automaton in earlier:
            known, size, place = held.get(automaton, (0, 0, ROOT))
            if size != automaton.size or known < len(tokens) - LONGEST:  # what has grown may know more of the end
                known, place = max(0, len(tokens) - LONGEST), ROOT
            self.places[automaton] = (len(tokens), automaton.size, automaton.after(place, tokens[known:]))
        return [(self.own, self.own.repeated()), *((automaton, at) for automaton, (_, _, at) in self.places.items())]


class SuffixDrafter:
    """Drafts what most often followed the end of the text, earlier in it or in earlier requests of the same drafter.

    A match of L tokens is held to go on rightly for n more with chance L / (L + n), times the share of places where it
    went on like this. A draft ends where that chance falls below `min_chance`, or after a token that would end the
    output; of several places the one whose draft has the most expected tokens is copied from. Matches shorter than
    `min_match` draft nothing. The last `capacity` tokens of earlier requests are known, the oldest quarter is forgotten
    at a time; 0 keeps requests apart. Requests that the p/q rule judges draft from their own text alone: their tokens
    (not their law) depend on their drafts, and may not depend on other requests.

    Raises InputError for a `min_match` below 1, a negative `capacity`, or a `min_chance` that is no probability.
    """

    name = "suffix"
    part: str | None = None  # made from the tokens alone

    def __init__(self, min_match: int = MIN_MATCH, min_chance: float = MIN_CHANCE, capacity: int = CAPACITY) -> None:
        require_int("min_match", min_match, low=1)
        require_int("capacity", capacity, low=0)
        if not 0.0 <= min_chance <= 1.0:
            raise InputError(f"min_chance: expected a probability, found {min_chance}")
        self._min_match, self._min_chance = min_match, min_chance
        self._room = -(-capacity // SEGMENTS)  # of a segment, tokens
        self._segments: deque[SuffixAutomaton] = deque(maxlen=SEGMENTS)
        self._readers: dict[int, _Reader] = {}  # by slot

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """At most `depths[i]` tokens for each sequence, certain ones (`probs` None)."""
        return [self.draft(s, self.find(s), depth) for s, depth in zip(sequences, depths, strict=True)]

    def find(self, sequence: Sequence) -> SuffixMatch | None:
        """Where the next draft would be copied from, for those who want to judge it first."""
        reader = self._reader(sequence)
        reader.update()
        places = reader.find(() if sequence.params.by_ratio else self._segments)
        good = tuple(found for found in places if found[1].length >= self._min_match)
        return SuffixMatch(max(place.length for _, place in good), good) if good else None

    def draft(self, sequence: Sequence, match: SuffixMatch | None, depth: int) -> Draft:
        """The best draft of at most `depth` tokens from a match `find` has given."""
        places = () if match is None else match.places
        drafts = [self._copy(*place, depth, sequence.stop_ids) for place in places]
        tokens, _ = max(drafts, key=lambda draft: draft[1], default=((), 0.0))  # of equals from the text itself
        return Draft(tokens, source=self.name)

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """Take in the sequence's new tokens (during prefill: the whole prompt)."""
        self._reader(sequence).update()

    def release(self, sequence: Sequence) -> None:
        """The sequence is an earlier one now."""
        self._readers.pop(sequence.slot, None)
        if not self._room:
            return
        if self._segments:
            self._segments[-1].begin()
        for token in sequence.tokens[-SEGMENTS * self._room :]:
            if not self._segments or self._segments[-1].size == self._room:
                self._segments.append(SuffixAutomaton())
            self._segments[-1].add(token)

    def _copy(
        self, automaton: SuffixAutomaton, place: Place, depth: int, stop_ids: frozenset[int]
    ) -> tuple[tuple[int, ...], float]:
        """A draft, and how many of its tokens are expected to be kept."""
        tokens: list[int] = []
        chance, expected = 1.0, 0.0
        while len(tokens) < depth and (found := automaton.continued(place)) is not None:
            token, share, place = found
            chance *= share * (place.length - 1) / place.length
            if chance < self._min_chance:
                break
            tokens.append(token)
            expected += chance
            if token in stop_ids:
                break
        return tuple(tokens), expected

    def _reader(self, sequence: Sequence) -> _Reader:
        reader = self._readers.get(sequence.slot)
        if reader is None or reader.sequence is not sequence:
            reader = self._readers[sequence.slot] = _Reader(sequence)
        return reader
