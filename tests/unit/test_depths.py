"""The depth of a device's next step: what is chosen, what it may lose, and that what is in flight counts."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from itertools import pairwise

import pytest

from surefoot.drafters import policy
from surefoot.drafters.auto import DEEPEST
from surefoot.drafters.policy import GUARDED, LOSS, UNGUARDED, Guard, StepCosts
from surefoot.engine.depths import ChosenDepth
from surefoot.engine.loop import StepRecord
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Draft, Verdict

ARM, FIXED = "mtp+ngram", 3


def chosen(token: float = 0.05, first: float = 0.0) -> ChosenDepth:
    """A plain step takes 1, one that drafts `first` more, and `token` more for each draft token; of four sequences
    twice that."""
    passes = (1.0, 1 + first + token, 1 + first + DEEPEST * token)
    costs = StepCosts((1, 4), (1, 2, DEEPEST + 1), 0, (passes, tuple(2 * s for s in passes)), ((0.0, 0.0),) * 2,
                      ((0.0, 0.0),) * 2)  # fmt: skip
    return ChosenDepth(costs, ARM, DEEPEST, FIXED)


def sequence(slot: int = 0, limit: int = 700, params: SamplingParams | None = None) -> Sequence:
    return Sequence(slot, [1], params or SamplingParams(), limit)


def run(depths: ChosenDepth, running: list[Sequence], good: Callable[[Sequence], bool]) -> list[tuple[int, int]]:
    """Steps of all sequences until one ends, one in flight while the next is chosen: depths, and the first sequence's
    emitted tokens. A draft is kept whole where the text is `good`."""
    flights: deque[int] = deque()
    steps = []
    while all(one.room for one in running):
        flights.append(depths.choose(running, len(running)))
        if len(flights) < 2:
            continue
        depth = flights.popleft()
        for one in running:
            kept = depth if good(one) else 0
            position = len(one.tokens) - 1
            emitted = one.extend([0] * (kept + 1))
            depths.landed(StepRecord(one, position, Draft((0,) * depth, source=ARM), Verdict(kept, 0), emitted))
            steps += [(depth, emitted)] if one is running[0] else []
    for one in running:
        depths.release(one)
    return steps


def lost(steps: list[tuple[int, int]], token: float, first: float) -> float:
    """The most that a span of GUARDED tokens lost, in plain steps."""
    emitted, balance, states = 0, 0.0, [(0, 0.0)]
    for depth, tokens in steps:
        emitted += tokens
        balance += tokens - (1 + token * depth + (first if depth else 0.0))
        states.append((emitted, balance))
    late = [state for state in states if state[0] >= UNGUARDED]
    return max(a[1] - b[1] for a, b in itertools.combinations(late, 2) if b[0] - a[0] <= GUARDED)


def test_drafts_that_are_kept_are_long() -> None:
    depths = chosen()
    assert len(run(depths, [sequence()], lambda _: True)) < 100
    assert depths.choices.most_common(1)[0][0] == (ARM, DEEPEST)


def test_drafts_that_never_pay_are_given_up() -> None:
    """They are tried at most every 64 tokens in the end, and never twice before the first try has landed."""
    depths = chosen(token=0.1, first=0.2)
    steps = run(depths, [sequence()], lambda _: False)
    drafting = [place for place, (depth, _) in enumerate(steps) if depth]
    assert depths.choices["none", 0] > 640
    assert 0 < depths.probed <= len(drafting) < 40
    assert all(b - a >= 2 for a, b in pairwise(drafting[-8:]))
    assert sum(1 for place in drafting if place >= 300) <= 7
    assert lost(steps, 0.1, 0.2) <= LOSS * GUARDED


def test_drafts_that_cost_too_much_are_not_made() -> None:
    depths = chosen(token=9.0)
    run(depths, [sequence(limit=UNGUARDED)], lambda _: True)
    assert depths.choices[ARM, DEEPEST] == 0


@pytest.mark.parametrize("good", [5, 20, 90, 300])
def test_a_text_that_turns_loses_little(good: int) -> None:
    steps = run(chosen(token=0.1, first=0.2), [sequence(limit=1500)], lambda one: one.emitted // good % 2 == 0)
    assert any(depth for depth, _ in steps)
    assert lost(steps, 0.1, 0.2) <= LOSS * GUARDED


def test_without_the_guard_it_would_lose_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the above: estimates that never learn."""
    monkeypatch.setattr(policy.Rates, "judge", lambda self, drafted, kept: None)
    assert lost(run(chosen(0.1, 0.2), [sequence(limit=1500)], lambda _: False), 0.1, 0.2) <= LOSS * GUARDED
    monkeypatch.setattr(Guard, "allows", lambda self, cost: True)
    assert lost(run(chosen(0.1, 0.2), [sequence(limit=1500)], lambda _: False), 0.1, 0.2) > LOSS * GUARDED


def test_a_text_that_turns_good_is_noticed() -> None:
    depths = chosen()
    steps = run(depths, [sequence(limit=900)], lambda one: one.emitted > 300)
    assert all(depth == DEEPEST for depth, _ in steps[-5:])


def test_sequences_that_decode_together_share_a_depth() -> None:
    """What pays for one of four and costs the others too much is not done."""
    batch = [sequence(slot) for slot in range(4)]
    alone, together = chosen(token=0.15), chosen(token=0.15)
    run(alone, [sequence()], lambda _: True)
    run(together, batch, lambda one: one is batch[0])
    assert alone.choices[ARM, DEEPEST] > 0
    assert together.choices["none", 0] > sum(n for (arm, _), n in together.choices.items() if arm == ARM)


def test_the_ratio_rule_has_one_depth() -> None:
    params = SamplingParams(temperature=1.0, acceptance="rejection")
    depths = chosen()
    run(depths, [sequence(limit=40, params=params), sequence(1, 40)], lambda _: False)
    assert set(depths.choices) == {(ARM, FIXED)}


def test_what_was_learned_is_the_next_sequences_prior() -> None:
    depths = chosen(token=0.1, first=0.2)
    run(depths, [sequence()], lambda _: False)
    before = depths.choices["none", 0]
    first = depths.choose([sequence()], 1)
    assert first == 0
    assert depths.choices["none", 0] == before + 1
    assert max(depths.learned()[ARM]) < 0.5
