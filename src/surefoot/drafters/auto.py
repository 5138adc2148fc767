"""The drafter that chooses, step by step and for each sequence: nothing, a copy, or the MTP head, and how many tokens.

What it goes by: the measured costs of steps (`StepCosts`), the acceptance of the sequence's own drafts with what other
sequences have taught as a prior, how many sequences share the pass, and how long they are. See `drafters.policy`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from surefoot.drafters.combined import Pair
from surefoot.drafters.mtp import MTPDrafter
from surefoot.drafters.ngram import Match, NgramDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.drafters.policy import Experience, Lore, Option, StepCosts, begin, fastest, second_to
from surefoot.sequence import Sequence
from surefoot.types import Draft, Drafter

DEEPEST = 8  # tokens of the longest draft it considers
MATCHES = (1, 2, 3, 4, 8, 16)  # matched tokens that tell copies apart, each up to the next
MTP = MTPDrafter.name
COPIES = tuple(f"{NgramDrafter.name}-{least}" for least in MATCHES)
PRIORS: dict[str, tuple[float, ...]] = {  # chances by place, until a profile or experience says otherwise
    MTP: (0.75, 0.65, 0.6, 0.55, 0.55, 0.5, 0.5, 0.5),
    **{name: (chance,) * DEEPEST for name, chance in zip(COPIES, (0.2, 0.35, 0.5, 0.7, 0.85, 0.93), strict=True)},
}
CONTEXTS = 64  # costs are looked up for contexts rounded to this many tokens
PLAIN = NoDrafter.name


@dataclass
class _Run:
    """What is known of one sequence, and the step it is in."""

    known: Experience
    pick: Option | None = None
    drafted: int = 0
    cost: float = 1.0


class AutoDrafter(Pair[Match]):
    """Drafts what has the most tokens per second on average, or nothing.

    `first` copies; `then` is the MTP drafter, or a NoDrafter where there is no head. `priors`: chances by arm and place
    in front of any experience. Requests that the p/q rule judges are treated as if they were alone and the first: their
    tokens (not their law) depend on how they are drafted for, and may depend on nothing else. `choices` counts steps by
    arm and depth, `probed` those that were only to learn.
    """

    name = "auto"

    def __init__(
        self,
        costs: StepCosts,
        first: NgramDrafter,
        then: Drafter,
        priors: Mapping[str, Seq[float]] = PRIORS,
    ) -> None:
        super().__init__(first, then)
        self._costs = costs
        self._has_head = not isinstance(then, NoDrafter)
        self._lore = Lore({**PRIORS, **priors})
        self._runs: dict[Sequence, _Run] = {}
        self._tables: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
        self.choices: Counter[tuple[str, int]] = Counter()
        self.probed = 0

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """Each sequence's draft, of at most `depths[i]` tokens."""
        matches = [
            self._first.find(sequence) if depth else None for sequence, depth in zip(sequences, depths, strict=True)
        ]
        menus = [self._menu(*parts, len(sequences)) for parts in zip(sequences, depths, matches, strict=True)]
        shared = fastest([menu for s, menu in zip(sequences, menus, strict=True) if not s.params.by_ratio])
        picks, drafts = iter(shared), []
        for sequence, menu, match in zip(sequences, menus, matches, strict=True):
            pick = fastest([menu])[0] if sequence.params.by_ratio else next(picks)
            run = self._runs[sequence]
            run.pick = self._probe(sequence, run, menu) if pick.arm == PLAIN else pick
            run.cost = run.pick.seconds / menu[0].seconds
            copies = run.pick.arm not in (PLAIN, MTP)
            drafts.append(self._first.draft(sequence, match, run.pick.depth) if copies else Draft(source=PLAIN))
            self.choices[run.pick.arm, run.pick.depth] += 1
        self._ask_head(sequences, drafts)
        for sequence, draft in zip(sequences, drafts, strict=True):
            self._runs[sequence].drafted = len(draft.tokens)
        return drafts

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """Show both what was committed, and learn how the last draft fared."""
        super().observe(sequence, position, hidden)
        run = self._runs.get(sequence)
        if run is None or run.pick is None:
            return
        emitted = len(sequence.tokens) - 1 - position
        kept = min(emitted - 1, run.drafted)
        run.known.guard.add(emitted, run.cost)
        if run.drafted:
            run.known.judge(run.pick.arm, run.drafted, kept, sequence.emitted)
            if not sequence.params.by_ratio:
                self._lore.judge(run.pick.arm, run.drafted, kept)
        run.pick = None

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence; what it taught stays."""
        super().release(sequence)
        self._runs.pop(sequence, None)

    def learned(self) -> dict[str, tuple[float, ...]]:
        """Chances by arm and place, as all sequences have taught them: priors for another time."""
        return self._lore.learned()

    def _menu(self, sequence: Sequence, depth: int, match: Match | None, batch: int) -> list[Option]:
        """What the sequence may do next, plain decoding first."""
        run = self._runs.get(sequence)
        if run is None:
            held = self._lore.priors if sequence.params.by_ratio else self._lore.learned()
            run = self._runs[sequence] = _Run(begin(held))
        passes, chains = self._table(1 if sequence.params.by_ratio else batch, len(sequence.tokens))
        menu = [Option(PLAIN, 0, 1.0, passes[0])]
        arms = [] if match is None else [COPIES[bisect_right(MATCHES, match.length) - 1]]
        for arm in [*arms, MTP] if self._has_head else arms:
            tokens = run.known.rates[arm].tokens()
            for length in range(1, min(depth, DEEPEST) + 1):
                seconds = passes[length] + (chains[length] if arm == MTP else 0.0)
                if run.known.guard.allows(seconds / passes[0]):
                    menu.append(Option(arm, length, tokens[length], seconds))
        return menu

    def _table(self, batch: int, context: int) -> tuple[list[float], list[float]]:
        """A sequence's share of a pass, and of the head's drafts, by the length of the draft."""
        key = (batch, context // CONTEXTS)
        if key not in self._tables:
            lengths = range(DEEPEST + 1)
            rounded = key[1] * CONTEXTS
            self._tables[key] = (
                [self._costs.pass_s(batch, 1 + length, rounded) / batch for length in lengths],
                [self._costs.draft_s(batch, length) / batch for length in lengths],
            )
        return self._tables[key]

    def _probe(self, sequence: Sequence, run: _Run, menu: list[Option]) -> Option:
        """Plain decoding, which pays best, or what comes next after it if that should be tried again."""
        due = run.known.due(menu, sequence.emitted)
        if not due:
            return menu[0]
        self.probed += 1
        return second_to(menu[0], due)

    def _ask_head(self, sequences: Seq[Sequence], drafts: list[Draft]) -> None:
        """Put the head's drafts in their places; it is asked once."""
        picks = [(place, run.pick.depth) for place, s in enumerate(sequences)
                 if (run := self._runs[s]).pick is not None and run.pick.arm == MTP]  # fmt: skip
        if picks:
            answers = self._then.propose([sequences[place] for place, _ in picks], [depth for _, depth in picks])
            for (place, _), draft in zip(picks, answers, strict=True):
                drafts[place] = draft
