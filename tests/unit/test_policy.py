"""What `drafter="auto"` goes by, as mathematics: costs, chances, choices, and the bound on what drafts may lose."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.drafters.policy import (
    GUARDED,
    LOSS,
    MEMORY,
    PRIOR,
    UNGUARDED,
    Guard,
    Option,
    Probes,
    Rates,
    StepCosts,
    fastest,
)

COSTS = StepCosts(
    batches=(1, 4),
    windows=(1, 2, 4),
    context=32,
    verify=((1.0, 1.1, 1.3), (2.0, 2.4, 3.2)),
    by_context=((0.001, 0.0001), (0.002, 0.0004)),
    draft=((0.2, 0.1), (0.4, 0.3)),
)


def test_costs_are_measured_ones_where_there_are_any() -> None:
    assert COSTS.pass_s(1, 4, 32) == 1.3
    assert COSTS.pass_s(4, 1, 0) == 2.0  # a shorter context costs no less than nothing was measured for
    assert COSTS.draft_s(1, 3) == pytest.approx(0.4)
    assert COSTS.draft_s(4, 0) == 0


def test_costs_go_straight_on_between_and_beyond() -> None:
    assert COSTS.pass_s(1, 3, 32) == pytest.approx(1.2)
    assert COSTS.pass_s(1, 6, 32) == pytest.approx(1.5)
    assert COSTS.pass_s(2, 1, 32) == pytest.approx(1 + 1 / 3)
    assert COSTS.pass_s(7, 1, 32) == pytest.approx(3.0)
    assert COSTS.pass_s(1, 4, 132) == pytest.approx(1.3 + 100 * (0.001 + 4 * 0.0001))


def test_costs_survive_a_file() -> None:
    assert StepCosts.from_json(json.loads(json.dumps(COSTS.as_json()))) == COSTS


def test_costs_of_other_batches_fall_into_place() -> None:
    def part(i: int) -> StepCosts:
        rows = COSTS.verify[i], COSTS.by_context[i], COSTS.draft[i]
        return StepCosts((COSTS.batches[i],), COSTS.windows, 32, (rows[0],), (rows[1],), (rows[2],))

    parts = [part(0), part(1)]
    assert parts[0].joined(parts[1]) == COSTS
    assert parts[1].joined(parts[0]) == COSTS


@pytest.mark.parametrize(
    "wrong",
    [
        {"verify": [[1.0, 1.1, 1.3]]},
        {"verify": [[1.0, 1.1], [2.0, 2.4]]},
        {"verify": [[1.0, 0.0, 1.3], [2.0, 2.4, 3.2]]},
        {"batches": []},
        {"batches": None},
        {"draft": [["a", 1], [1, 1]]},
    ],
)
def test_costs_that_are_none_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        StepCosts.from_json({**COSTS.as_json(), **wrong})


def test_rates_are_the_prior_until_something_is_judged() -> None:
    rates = Rates((0.8, 0.5))
    assert rates.chances() == [0.8, 0.5]
    assert rates.tokens() == pytest.approx([1, 1.8, 2.2])


def test_rates_judge_places_up_to_the_first_refused_token() -> None:
    rates = Rates((0.5, 0.5, 0.5))
    rates.judge(3, 1)  # the first was kept, the second refused, the third never looked at
    first, second, third = rates.chances()
    prior = PRIOR * MEMORY
    assert first == pytest.approx((prior * 0.5 + 1) / (prior + 1))
    assert second == pytest.approx(prior * first / (prior + 1))
    assert third == pytest.approx(second)  # what was held of it, in proportion to the place before


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=60))
def test_rates_are_chances(drafts: list[tuple[int, int]]) -> None:
    rates = Rates((0.9, 0.5, 0.0, 1.0))
    for drafted, kept in drafts:
        rates.judge(drafted, min(drafted, kept))
    assert all(0 <= chance <= 1 for chance in rates.chances())
    tokens = rates.tokens()
    assert tokens[0] == 1
    assert tokens == sorted(tokens)


def test_rates_forget() -> None:
    rates = Rates((0.5,))
    for kept in [1] * 50 + [0] * 20:
        rates.judge(1, kept)
    assert rates.chances()[0] < 0.2


options = st.builds(Option, st.just("x"), st.just(1), st.floats(1, 9), st.floats(0.1, 5))


@settings(max_examples=200)
@given(st.lists(st.lists(options, min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_fastest_choice_is_the_best_of_all(menus: list[list[Option]]) -> None:
    def rate(picks: tuple[Option, ...]) -> float:
        return sum(p.tokens for p in picks) / sum(p.seconds for p in picks)

    best = max(rate(picks) for picks in itertools.product(*menus))
    assert rate(tuple(fastest(menus))) == pytest.approx(best)


def test_what_pays_alone_may_not_pay_beside_others() -> None:
    """The best ratio of each is not the best of all: the point of Dinkelbach's iteration."""
    slow = [Option("plain", 0, 1, 1.0), Option("mtp", 1, 1.5, 1.4)]
    fast = [Option("copy", 8, 9, 1.5)]
    assert fastest([slow])[0].arm == "mtp"
    assert fastest([slow, fast])[0].arm == "plain"


def test_nothing_to_choose() -> None:
    assert fastest([]) == []


def losses(steps: list[tuple[int, float]]) -> float:
    """The most that any span of at most GUARDED tokens behind the first UNGUARDED lost, in plain steps."""
    emitted, balance, states = 0, 0.0, [(0, 0.0)]
    for tokens, cost in steps:
        emitted, balance = emitted + tokens, balance + tokens - cost
        states.append((emitted, balance))
    spans = itertools.combinations([state for state in states if state[0] >= UNGUARDED], 2)
    return max((a[1] - b[1] for a, b in spans if b[0] - a[0] <= GUARDED), default=0.0)


drafts = st.lists(st.tuples(st.floats(1.0, 3.0), st.floats(0, 1)), min_size=150, max_size=400)


@settings(max_examples=60, deadline=None)
@given(drafts, st.integers(1, 8), st.integers(0, 3))
def test_no_span_loses_more_than_the_guard_lets_it(
    wanted: list[tuple[float, float]], depth: int, good_phases: int
) -> None:
    """However drafts fare, in phases of kept and refused ones: a loop that asks the guard keeps the bound."""
    guard, steps = Guard(), []
    for number, (cost, luck) in enumerate(wanted):
        good = number // 40 % 4 < good_phases
        if guard.allows(cost):
            tokens = 1 + round(luck * depth) if good else 1
        else:
            tokens, cost = 1, 1.0
        guard.add(tokens, cost)
        steps.append((tokens, cost))
    assert losses(steps) <= LOSS * GUARDED + 1e-9


def test_without_the_guard_the_bound_is_broken() -> None:
    """Negative control of the above."""
    assert losses([(1, 1.4)] * 300) > LOSS * GUARDED


def test_the_guard_allows_again_once_a_loss_is_long_past() -> None:
    guard = Guard()
    for _ in range(UNGUARDED):
        guard.add(1, 1.0)
    refused = 0
    while guard.allows(1.5):
        guard.add(1, 1.5)
    for _ in range(2 * GUARDED):
        refused += not guard.allows(1.5)
        guard.add(1, 1.0)
    assert 0 < refused < 2 * GUARDED
    assert guard.allows(1.5)


def test_a_gain_of_long_ago_pays_for_no_loss() -> None:
    guard = Guard()
    for _ in range(100):
        guard.add(4, 1.5)
    lost = 0.0
    while guard.allows(2.0):
        guard.add(1, 2.0)
        lost += 1
    assert lost <= LOSS * GUARDED


def test_probes_get_rare_while_they_fail() -> None:
    probes, tried = Probes(), []
    for tokens in range(2000):
        if probes.due(tokens):
            tried.append(tokens)
            probes.judge(tokens, kept=0)
    gaps = [b - a for a, b in itertools.pairwise(tried)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == Probes.LAST
    probes.judge(2000, kept=1)
    assert probes.due(2001)
    assert not probes.due(2000)
