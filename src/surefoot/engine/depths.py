"""How many tokens the next step on a device drafts: chosen by the host before it launches the step, while the step
before it has not landed. One depth holds for all sequences of a step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from surefoot.drafters.auto import CONTEXTS, MTP, PLAIN, PRIORS
from surefoot.drafters.policy import Experience, Lore, Option, StepCosts, begin, fastest, second_to
from surefoot.engine.loop import StepRecord
from surefoot.sequence import Sequence

STEP_PRIORS = {"mtp+ngram": PRIORS[MTP], "ngram": PRIORS["ngram-2"]}  # a copy comes at two matched tokens or more


class Depths(Protocol):
    """Chooses depths, and is told what came of them."""

    def choose(self, running: Seq[Sequence], size: int) -> int:
        """Draft tokens of the next step, which is the recorded one for `size` slots."""

    def landed(self, record: StepRecord) -> None:
        """What the oldest step of a sequence that has not landed yet did to it."""

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence and its steps."""


class FixedDepth:
    """Always the same."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def choose(self, running: Seq[Sequence], size: int) -> int:
        """That depth."""
        return self._depth

    def landed(self, record: StepRecord) -> None:
        """Nothing is learned."""

    def release(self, sequence: Sequence) -> None:
        """Nothing was noted."""


@dataclass
class _Run:
    """What is known of a sequence, and its steps in flight, oldest first: depths, and costs in plain steps."""

    known: Experience
    flying: deque[tuple[int, float]] = field(default_factory=deque)

    def allows(self, cost: float) -> bool:
        """Whether the guard takes such a step if nothing stays of it, nor of the drafts in flight."""
        return self.known.guard.allows(cost + sum(other - 1 for _, other in self.flying))


class ChosenDepth:
    """The depth that has the most tokens per second, summed over the sequences, within what each may still lose.

    `costs` are of whole steps, `arm` is what a step drafts with, `most` its longest draft. A step with a request that
    the p/q rule judges drafts `fixed` tokens, so that the request's tokens depend on nothing else. `choices` counts
    steps by arm and depth, `probed` those that were only to learn.
    """

    def __init__(self, costs: StepCosts, arm: str, most: int, fixed: int,
                 chances: Seq[float] | None = None) -> None:  # fmt: skip
        self._costs, self._arm, self._most, self._fixed = costs, arm, most, fixed
        self._lore = Lore({arm: STEP_PRIORS[arm] if chances is None else chances})
        self._runs: dict[Sequence, _Run] = {}
        self._tables: dict[tuple[int, int], list[float]] = {}
        self.choices: Counter[tuple[str, int]] = Counter()
        self.probed = 0

    def choose(self, running: Seq[Sequence], size: int) -> int:
        """The depth of the next step."""
        for sequence in running:
            if sequence not in self._runs:
                self._runs[sequence] = _Run(begin(self._lore.learned()))
        runs = [self._runs[sequence] for sequence in running]
        seconds = self._seconds(size, max(len(sequence.tokens) for sequence in running))
        if any(sequence.params.by_ratio for sequence in running):
            depth = self._fixed
        else:
            menu = self._menu(runs, seconds)
            pick = fastest([menu])[0]
            depth = pick.depth or self._probe(running, runs, menu)
        for run in runs:
            run.flying.append((depth, seconds[depth] / seconds[0]))
        self.choices[self._arm if depth else PLAIN, depth] += 1
        return depth

    def landed(self, record: StepRecord) -> None:
        """Learn how the draft fared; one that had nothing to copy was refused."""
        run = self._runs[record.sequence]
        depth, cost = run.flying.popleft()
        run.known.guard.add(record.emitted, cost)
        if depth:
            drafted = len(record.draft.tokens) or depth
            run.known.judge(self._arm, drafted, record.accepted, record.sequence.emitted)
            self._lore.judge(self._arm, drafted, record.accepted)

    def release(self, sequence: Sequence) -> None:
        """Forget it; what it taught stays."""
        self._runs.pop(sequence, None)

    def learned(self) -> dict[str, tuple[float, ...]]:
        """Chances by arm and place, as all sequences have taught them."""
        return self._lore.learned()

    def _menu(self, runs: Seq[_Run], seconds: Seq[float]) -> list[Option]:
        """What the step may be, plain decoding first."""
        tokens = [run.known.rates[self._arm].tokens() for run in runs]
        menu = [Option(PLAIN, 0, float(len(runs)), seconds[0])]
        for depth in range(1, self._most + 1):
            if all(run.allows(seconds[depth] / seconds[0]) for run in runs):
                menu.append(Option(self._arm, depth, sum(own[depth] for own in tokens), seconds[depth]))
        return menu

    def _probe(self, running: Seq[Sequence], runs: Seq[_Run], menu: list[Option]) -> int:
        """0, plain decoding, which pays best, or another depth if all sequences should try again and none does yet."""
        if any(depth for run in runs for depth, _ in run.flying):
            return 0
        due = [run.known.due(menu, sequence.emitted) for sequence, run in zip(running, runs, strict=True)]
        if not all(due):
            return 0
        self.probed += 1
        return second_to(menu[0], due[0]).depth

    def _seconds(self, size: int, context: int) -> list[float]:
        """Of a step, by depth."""
        key = (size, context // CONTEXTS)
        if key not in self._tables:
            self._tables[key] = [
                self._costs.pass_s(size, 1 + depth, key[1] * CONTEXTS) + self._costs.draft_s(size, depth)
                for depth in range(self._most + 1)
            ]
        return self._tables[key]
