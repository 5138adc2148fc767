"""How to draft next, as mathematics: what a step costs, what a draft brings, what may be risked.

A step that drafts d tokens emits 1 + a1 + a1 a2 + ... tokens on average (ai: the chance that the draft's i-th token is
kept if those before it were), and takes the time of a pass over 1 + d tokens and of the drafting. The best step is the
one with the most tokens per second (Leviathan et al. 2023, arXiv 2211.17192, section 3.3, with measured costs in the
place of one cost coefficient). Estimates are late when the text turns, so a `Guard` bounds what they can lose.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

MEMORY = 0.88  # what a judged draft counts once another has been judged: about the last eight matter
LASTING = 0.99  # the same where other sequences are concerned
PRIOR = 2.0  # how many judged drafts a prior is worth at first; it is forgotten as they are
GUARDED = 256  # tokens of a span over which a loss is bounded
UNGUARDED = 64  # tokens at a request's beginning that no span has in it
LOSS = 0.015  # of plain decoding's time over such a span that drafts may lose; what is left of 3 % is for our own work


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step's parts on one machine, measured by `engine.calibrate`.

    `verify[i][j]`: a pass and its commit, over windows of `windows[j]` tokens of `batches[i]` sequences, behind
    `context` tokens; `by_context[i]`: what each further token of context adds to it, once and for every token of the
    window; `draft[i]`: a draft of one token by the MTP head, and each further one (zeros without a head).
    """

    batches: tuple[int, ...]
    windows: tuple[int, ...]
    context: int
    verify: tuple[tuple[float, ...], ...]
    by_context: tuple[tuple[float, float], ...]
    draft: tuple[tuple[float, float], ...]

    def pass_s(self, batch: int, window: int, context: int) -> float:
        """A pass of the target and its commit."""

        def at(i: int) -> float:
            once, by_token = self.by_context[i]
            measured = _between(self.windows, self.verify[i], window)
            return measured + max(0, context - self.context) * (once + by_token * window)

        return _between(self.batches, [at(i) for i in range(len(self.batches))], batch)

    def draft_s(self, batch: int, depth: int) -> float:
        """A draft of `depth` tokens by the head."""
        if depth < 1:
            return 0.0
        return _between(self.batches, [first + (depth - 1) * further for first, further in self.draft], batch)

    def joined(self, other: StepCosts) -> StepCosts:
        """These and those of further batch sizes, measured with the same windows and context."""
        assert (self.windows, self.context) == (other.windows, other.context)
        order = sorted(range(len(self.batches) + len(other.batches)), key=[*self.batches, *other.batches].__getitem__)

        def merged(name: str) -> tuple[Any, ...]:
            both = (*getattr(self, name), *getattr(other, name))
            return tuple(both[i] for i in order)

        return StepCosts(merged("batches"), self.windows, self.context, merged("verify"), merged("by_context"),
                         merged("draft"))  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepCosts:
        """What `as_json` gave and a file has kept. Raises KeyError, TypeError or ValueError for anything else."""
        costs = cls(
            batches=tuple(int(size) for size in data["batches"]),
            windows=tuple(int(size) for size in data["windows"]),
            context=int(data["context"]),
            verify=tuple(tuple(float(s) for s in row) for row in data["verify"]),
            by_context=tuple((float(once), float(by_token)) for once, by_token in data["by_context"]),
            draft=tuple((float(first), float(further)) for first, further in data["draft"]),
        )
        rows = {len(costs.batches), len(costs.verify), len(costs.by_context), len(costs.draft)}
        if len(rows) != 1 or not costs.batches or {len(row) for row in costs.verify} != {len(costs.windows)}:
            raise ValueError("expected a row for each batch and a column for each window")
        if not all(seconds > 0 for row in costs.verify for seconds in row):
            raise ValueError("expected seconds above 0")
        return costs


def _between(places: Seq[int], values: Seq[float], place: int) -> float:
    """Linear between measured places, and on beyond the last two."""
    if len(places) == 1:
        return values[0]
    right = min(max(bisect_left(places, place), 1), len(places) - 1)
    left = right - 1
    share = (place - places[left]) / (places[right] - places[left])
    return max(values[left] + share * (values[right] - values[left]), min(values))


class Rates:
    """The chance that a draft's token is kept, by place, learned from drafts as they are judged.

    Recent drafts count more. `prior[i]` is what is held of place i at first; once the place before it has turned out
    better or worse than held, so is this one held to be.
    """

    def __init__(self, prior: Seq[float], memory: float = MEMORY) -> None:
        self._prior = tuple(prior)
        self._memory = memory
        self._weight = [PRIOR] * len(self._prior)
        self._kept = [0.0] * len(self._prior)
        self._judged = [0.0] * len(self._prior)

    def judge(self, drafted: int, kept: int) -> None:
        """A draft of `drafted` tokens of which the first `kept` were kept: the places up to the first refused one were
        judged."""
        for place in range(min(drafted, kept + 1, len(self._prior))):
            self._weight[place] *= self._memory
            self._kept[place] = self._memory * self._kept[place] + (place < kept)
            self._judged[place] = self._memory * self._judged[place] + 1

    def chances(self) -> list[float]:
        """By place."""
        chances: list[float] = []
        scale = 1.0
        for held, weight, kept, judged in zip(self._prior, self._weight, self._kept, self._judged, strict=True):
            chance = (weight * min(1.0, scale * held) + kept) / (weight + judged)
            scale = chance / held if held else 1.0
            chances.append(chance)
        return chances

    def tokens(self) -> list[float]:
        """Tokens that a step emits on average, by the length of its draft, 0 first."""
        return list(accumulate([1.0, *accumulate(self.chances(), mul)]))


@dataclass(frozen=True)
class Option:
    """A way to make the next step of a sequence: `depth` tokens drafted by `arm`, `tokens` emitted on average, and its
    share of the step, `seconds`."""

    arm: str
    depth: int
    tokens: float
    seconds: float


def fastest(menus: Seq[Seq[Option]]) -> list[Option]:
    """An option from each sequence's menu, so that all of them together have the most tokens per second.

    A ratio of sums is not the sum of ratios: a sequence's best choice is the one that gains most over the common rate,
    which depends on the choices. Dinkelbach's iteration (1967) finds both; it rises at every turn.
    """
    rate = 0.0
    while menus:
        picks = [max(menu, key=lambda option: option.tokens - rate * option.seconds) for menu in menus]
        reached = sum(pick.tokens for pick in picks) / sum(pick.seconds for pick in picks)
        if reached <= rate * (1 + 1e-9):
            return picks
        rate = reached
    return []


class Guard:
    """What a request may still lose by drafting. The unit is the time of a plain step.

    `balance` is what drafts have gained so far: tokens emitted, less the time they took. Over no span of `GUARDED`
    tokens may it fall by more than `LOSS * GUARDED`. A step is allowed if it keeps to that even with nothing kept of
    its draft; plain steps always do. Spans begin behind the first `UNGUARDED` tokens.
    """

    def __init__(self) -> None:
        self.balance = 0.0
        self._tokens = 0
        self._peaks: deque[tuple[int, float]] = deque()  # falling balances, and the tokens emitted when they stood

    def allows(self, cost: float) -> bool:
        """Whether a step may be made that takes the time of `cost` plain ones."""
        if self._tokens < UNGUARDED:
            return True
        peak = max(self.balance, self._peaks[0][1] if self._peaks else self.balance)
        return peak - (self.balance + 1 - cost) <= LOSS * GUARDED

    def add(self, tokens: int, cost: float) -> None:
        """A step emitted so many tokens and took the time of `cost` plain ones."""
        if self._tokens >= UNGUARDED:
            while self._peaks and self._peaks[-1][1] <= self.balance:
                self._peaks.pop()
            self._peaks.append((self._tokens, self.balance))
        self._tokens += tokens
        self.balance += tokens - cost
        while self._peaks and self._peaks[0][0] < self._tokens - GUARDED:
            self._peaks.popleft()


class Probes:
    """When to try again what does not seem to pay: rarely, more rarely each time that it did not, and at once when it
    did."""

    FIRST, LAST = 4, 64  # tokens from one to the next

    def __init__(self) -> None:
        self._interval = self.FIRST
        self._due = self.FIRST

    def due(self, tokens: int) -> bool:
        """Whether one is due once so many tokens have been emitted."""
        return tokens >= self._due

    def judge(self, tokens: int, kept: int) -> None:
        """A draft was judged when so many tokens had been emitted: what is being tried need not be tried soon."""
        self._interval = self.FIRST if kept else min(2 * self._interval, self.LAST)
        self._due = tokens + (1 if kept else self._interval)


@dataclass
class Experience:
    """What is known of one sequence's drafts: rates and probes by arm, and what it may lose."""

    rates: dict[str, Rates]
    probes: dict[str, Probes]
    guard: Guard = field(default_factory=Guard)

    def judge(self, arm: str, drafted: int, kept: int, emitted: int) -> None:
        """Of a draft of `drafted` tokens the first `kept` were kept; the output has `emitted` tokens now."""
        self.rates[arm].judge(drafted, kept)
        self.probes[arm].judge(emitted, kept)

    def due(self, menu: Seq[Option], emitted: int) -> list[Option]:
        """The menu's options behind its first, plain decoding, that should be tried again."""
        return [option for option in menu[1:] if self.probes[option.arm].due(emitted)]


class Lore:
    """What the drafts of all sequences have taught: chances by arm and place, in front of a sequence's own. `priors`
    are those in front of any."""

    def __init__(self, priors: Mapping[str, Seq[float]]) -> None:
        self.priors = priors
        self._shared = {arm: Rates(prior, LASTING) for arm, prior in priors.items()}

    def learned(self) -> dict[str, tuple[float, ...]]:
        """Chances by arm and place: priors for another time."""
        return {arm: tuple(rates.chances()) for arm, rates in self._shared.items()}

    def judge(self, arm: str, drafted: int, kept: int) -> None:
        """See `Rates.judge`."""
        self._shared[arm].judge(drafted, kept)


def begin(chances: Mapping[str, Seq[float]]) -> Experience:
    """A new sequence, of whose arms so much is held."""
    return Experience({arm: Rates(prior) for arm, prior in chances.items()}, {arm: Probes() for arm in chances})


def second_to(plain: Option, due: Seq[Option]) -> Option:
    """Of the options that should be tried again, the one that loses least."""
    return max(due, key=lambda option: option.tokens - option.seconds * plain.tokens / plain.seconds)
