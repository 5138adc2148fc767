"""Requests that join and leave: a state machine over add, cancel and tick, then what it cannot say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from surefoot.cache.prefix import PrefixCache
from surefoot.drafters.none import NoDrafter
from surefoot.engine.loop import StepRecord
from surefoot.engine.runner import Ended, Event, HostRunner, SplitRunner, Started, Ways, drain
from surefoot.errors import InputError, NumericalError
from surefoot.prove.table import TableTarget
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Draft, Drafter
from tests.fakes import Ragged
from tests.serving import POISON, ROW, VOCAB, ChunkedTarget, Laned, Moody, check_memory, sequence_of, solo

SLOTS, CHUNK, BUDGET = 3, 3, 4
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=16).map(
    lambda tail: [1, 2, 3, 1, 2, 1][: 3 * (len(tail) % 3)] + tail  # some begin alike
)
PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 3),
)


class Machine(RuleBasedStateMachine):
    """Up to three requests at once, with drafters and draft lengths of their own, some of which fail."""

    prefix_bytes = 600

    def __init__(self) -> None:
        super().__init__()
        self.target = ChunkedTarget(slots=SLOTS, chunk=CHUNK)
        self.drafters: list[Drafter] = [
            NoDrafter(), Laned(self.target), Moody(self.target), Ragged(Laned(self.target)),
        ]  # fmt: skip
        self.prefixes = PrefixCache(self.prefix_bytes)
        self.runner = HostRunner(self.target, self.drafters[1], 2, Ways(budget=BUDGET, prefixes=self.prefixes))
        self.added: list[Sequence] = []
        self.cancelled: set[Sequence] = set()
        self.events: dict[Sequence, list[Event]] = {}
        self.started: list[Sequence] = []
        self.doomed: Sequence | None = None  # to be cancelled between verify and commit
        self.target.meanwhile = self.meanwhile

    @rule(prompt=PROMPTS, params=PARAMS, drafter=st.integers(0, 4), depth=st.none() | st.integers(0, 4))
    def add(self, prompt: list[int], params: SamplingParams, drafter: int, depth: int | None) -> None:
        sequence = sequence_of(prompt, params)
        sequence.draft_length = depth
        self.added.append(sequence)
        self.events[sequence] = []
        self.runner.add(sequence, self.drafters[drafter] if drafter < len(self.drafters) else None)

    @property
    def alive(self) -> list[Sequence]:
        return [sequence for sequence in self.added if sequence.finish_reason is None]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        self.cancelled.add(sequence)
        self.runner.cancel(sequence)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel_in_the_next_step(self, data: st.DataObject) -> None:
        self.doomed = data.draw(st.sampled_from(self.alive))

    def meanwhile(self) -> None:
        if self.doomed is not None:
            self.cancelled.add(self.doomed)
            self.runner.cancel(self.doomed)
            self.doomed = None

    @rule(times=st.integers(1, 4))
    def run(self, times: int) -> None:
        for _ in range(times):
            self.tick()
            self.slots_are_those_of_sequences_that_run()

    def tick(self) -> None:
        before, gone = self.target.read, {s for s in self.cancelled if s.finish_reason is None}
        gone -= {self.doomed}
        events = self.runner.tick()
        assert self.target.read - before < BUDGET + CHUNK
        for event in events:
            self.events[event.sequence].append(event)
            if isinstance(event, Started):
                self.started.append(event.sequence)
        # Whoever was cancelled before the tick is gone with it.
        assert all(sequence.finish_reason is not None for sequence in gone)

    @precondition(lambda self: self.target.committed)
    @rule(data=st.data(), ahead=st.integers(0, 3))
    def poison(self, data: st.DataObject, ahead: int) -> None:
        """A sequence's rows turn into NaN a few tokens ahead."""
        sequence = data.draw(st.sampled_from([s for s in self.started if s in self.alive]))
        self.target.poisoned[sequence.slot] = len(sequence.tokens) + ahead

    @invariant()
    def slots_are_those_of_sequences_that_run(self) -> None:
        alive = [sequence for sequence in self.started if sequence in self.alive]
        assert len(alive) == len({s.slot for s in alive}) == self.runner.running - self.unbegun(alive) <= SLOTS
        assert set(self.target.committed) == {s.slot for s in alive}
        assert not self.target.windows
        for slot in set(self.target.poisoned) - set(self.target.committed):
            del self.target.poisoned[slot]
        for sequence in alive:
            held = self.target.committed[sequence.slot]
            assert held == sequence.tokens[: len(held)]
            assert len(held) == len(sequence.tokens) - 1 or not sequence.output

    def unbegun(self, alive: list[Sequence]) -> int:
        """Sequences that have a slot and nothing in it yet."""
        return self.runner.running - len(alive)

    @invariant()
    def memory_is_accounted_for(self) -> None:
        check_memory(self.prefixes)

    def teardown(self) -> None:
        for _ in range(10_000):
            if not self.runner.busy:
                break
            self.tick()
            self.slots_are_those_of_sequences_that_run()
        assert not self.runner.busy
        assert not self.target.committed
        assert not self.target.borders
        for drafter in self.drafters[1:]:
            assert not getattr(drafter, "lane", None)
            assert not getattr(drafter, "seen", None)
        for sequence in self.added:
            self.check_end(sequence)
        # First come, first served: of those that started, in the order they came.
        order = [sequence for sequence in self.added if sequence in self.started]
        assert self.started == order

    def check_end(self, sequence: Sequence) -> None:
        events = self.events[sequence]
        kinds = [type(event) for event in events]
        steps = [event for event in events if isinstance(event, StepRecord)]
        assert kinds == [Started] * (sequence in self.started) + [StepRecord] * len(steps) + [Ended]
        assert [token for record in steps for token in record.tokens] == sequence.output
        alone = solo(sequence.tokens[: sequence.prompt_length], sequence.params)
        reason = sequence.finish_reason
        assert (sequence.error is not None) == (reason == "error")
        if reason in ("stop", "length"):
            assert sequence.output == alone
        else:
            assert sequence.output == alone[: len(sequence.output)]
            assert reason == "error" or (reason == "cancelled" and sequence in self.cancelled)
        if sequence.error is not None:
            assert isinstance(sequence.error, (NumericalError, ValueError))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=80, stateful_step_count=40, derandomize=True, deadline=None)


def records(events: Seq[Event]) -> Counter[Sequence]:
    return Counter(event.sequence for event in events if isinstance(event, StepRecord))


def run_all(runner: HostRunner) -> None:
    while runner.busy:
        runner.tick()


def test_sixteen_slots_with_mixed_draft_lengths_equal_each_alone() -> None:
    """Case 31."""
    target = ChunkedTarget(slots=16)
    runner = HostRunner(target, Laned(target), 4, Ways(budget=6))
    requests = [
        (
            [i % VOCAB, 1, 2, i // VOCAB] * (1 + i % 3),
            SamplingParams(max_new_tokens=20, temperature=0.8 * (i % 2), seed=i),
        )
        for i in range(24)
    ]
    sequences = [sequence_of(*request) for request in requests]
    for number, sequence in enumerate(sequences):
        sequence.draft_length = number % 5
        runner.add(sequence)
    run_all(runner)
    for sequence, (prompt, params) in zip(sequences, requests, strict=True):
        assert sequence.output == solo(prompt, params)


def test_a_row_of_nan_ends_its_request_alone() -> None:
    """Case 16."""
    target = ChunkedTarget(slots=3)
    runner = HostRunner(target, Laned(target), 2, Ways())
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    sequences = [sequence_of([1, 2, i], params) for i in range(3)]
    for sequence in sequences:
        runner.add(sequence)
    runner.tick()
    target.poisoned[sequences[1].slot] = len(sequences[1].tokens) + 1
    run_all(runner)
    assert [s.finish_reason for s in sequences] == ["length", "error", "length"]
    with pytest.raises(NumericalError, match="logits at position"):
        raise sequences[1].error or AssertionError
    assert len(sequences[0].output) == len(sequences[2].output) == 12


def test_a_long_prompt_neither_blocks_short_ones_nor_waits_for_them() -> None:
    target = ChunkedTarget(slots=2, max_len=4000)
    runner = HostRunner(target, NoDrafter(), 0, Ways(budget=CHUNK))
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    long = Sequence(0, [1] * 301, params, 304)
    shorts = [Sequence(0, [2] * 7, params, 10) for _ in range(200)]
    for sequence in (long, *shorts):
        runner.add(sequence)
    ticks = 0
    done_before: list[int] = []
    while long.finish_reason is None:
        events = runner.tick()
        ticks += 1
        done_before += [ticks for event in events if isinstance(event, Ended) and event.sequence is not long]
    # A hundred chunks of its own, and at most one of another's after each.
    assert 100 <= ticks <= 201
    assert done_before[0] < 10
    assert len(done_before) > 20


def test_running_sequences_go_on_while_a_prompt_is_read() -> None:
    target = ChunkedTarget(slots=2, max_len=4000)
    runner = HostRunner(target, NoDrafter(), 0, Ways(budget=CHUNK))
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    quick, long = Sequence(0, [2, 1], params, 52), Sequence(0, [1] * 121, params, 171)
    runner.add(quick)
    runner.tick()
    runner.add(long)
    for _ in range(30):
        assert records(runner.tick())[quick] == 1
    assert not long.output


def test_without_a_budget_prompts_are_read_at_once() -> None:
    target = ChunkedTarget(slots=2)
    runner = HostRunner(target, NoDrafter(), 0, Ways())
    sequences = [sequence_of([1] * 20, SamplingParams(max_new_tokens=2)) for _ in range(2)]
    for sequence in sequences:
        runner.add(sequence)
    assert set(records(runner.tick())) == set(sequences)


def test_a_target_that_hides_its_states_keeps_to_the_budget() -> None:
    target = TableTarget(ROW, VOCAB, slots=2)  # chunks of three
    runner = HostRunner(target, NoDrafter(), 0, Ways(budget=3))
    sequence = sequence_of([1] * 31, SamplingParams(max_new_tokens=1))
    runner.add(sequence)
    ticks = 0
    while runner.busy:
        before = len(target.committed.get(0, []))
        runner.tick()
        ticks += 1
        assert len(target.committed.get(0, [])) - before <= 6
    assert ticks >= 10


class Broken(ChunkedTarget):
    """Fails in its third pass."""

    def verify(self, windows: Seq[Any]) -> list[Any]:
        answers = super().verify(windows)
        if self.verified == 3:
            raise RuntimeError("out of memory")
        return answers


def test_a_pass_that_fails_ends_all_that_were_in_it_and_nobody_else() -> None:
    target = Broken(slots=2)
    runner = HostRunner(target, NoDrafter(), 0, Ways())
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    sequences = [sequence_of([1, i], params) for i in range(3)]
    for sequence in sequences:
        runner.add(sequence)
    run_all(runner)
    assert [s.finish_reason for s in sequences] == ["error", "error", "length"]
    assert str(sequences[0].error) == "out of memory"
    assert not target.committed


def test_drain_raises_and_releases() -> None:
    target = ChunkedTarget(slots=2)
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    good, bad = Sequence(0, [1, 2], params, 11), Sequence(0, [1, 2, POISON], params, 12)
    with pytest.raises(ValueError, match="not this one"):
        list(drain(HostRunner(target, Moody(target), 2, Ways()), [good, bad]))
    assert not target.committed


class Picky(NoDrafter):
    """Fails for the whole batch if one of its sequences has an odd number of tokens, as a model that drafts in one pass
    may."""

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        if any(sequence.prompt_length % 2 for sequence in sequences):
            raise ValueError("odd")
        return super().propose(sequences, depths)


def test_a_drafter_that_fails_for_a_batch_is_asked_about_each_alone() -> None:
    target = ChunkedTarget(slots=3)
    runner = HostRunner(target, Picky(), 2, Ways())
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    sequences = [Sequence(0, [1] * n, params, n + 4) for n in (2, 3, 4)]
    for sequence in sequences:
        runner.add(sequence)
    run_all(runner)
    assert [s.finish_reason for s in sequences] == ["length", "error", "length"]


class Unseeing(NoDrafter):
    """Does not take the prompt."""

    def observe(self, sequence: Sequence, position: int, hidden: torch.Tensor | None) -> None:
        raise InputError("hidden states wanted")


def test_a_prompt_that_cannot_be_read_ends_its_request_alone() -> None:
    target = ChunkedTarget(slots=2)
    runner = HostRunner(target, NoDrafter(), 0, Ways())
    sequences = [sequence_of([1, 2, 3], SamplingParams(max_new_tokens=3)) for _ in range(2)]
    runner.add(sequences[0], Unseeing())
    runner.add(sequences[1])
    run_all(runner)
    assert (sequences[0].finish_reason, str(sequences[0].error)) == ("error", "hidden states wanted")
    assert sequences[1].output == solo([1, 2, 3], sequences[1].params)
    assert not target.committed


@pytest.fixture
def runner() -> Iterator[HostRunner]:
    target = ChunkedTarget(slots=2)
    yield HostRunner(target, Laned(target), 2, Ways(budget=3))
    assert not target.committed


def test_fail_ends_those_in_slots_and_leaves_those_that_wait(runner: HostRunner) -> None:
    sequences = [sequence_of([1] * 5 * (i + 1), SamplingParams(max_new_tokens=9, ignore_eos=True)) for i in range(3)]
    for sequence in sequences:
        runner.add(sequence)
    runner.tick()
    error = RuntimeError("?")
    assert {event.sequence for event in runner.fail(error)} == set(sequences[:2])
    assert [s.error for s in sequences] == [error, error, None]
    run_all(runner)
    assert sequences[2].finish_reason in ("stop", "length")


def test_close_says_nothing_and_frees_everything(runner: HostRunner) -> None:
    sequences = [sequence_of([1] * 5, SamplingParams(max_new_tokens=9)) for _ in range(4)]
    for sequence in sequences:
        runner.add(sequence)
    for _ in range(3):
        runner.tick()
    runner.close()
    assert not runner.busy
    assert runner.tick() == []


def test_two_runners_as_one() -> None:
    """Requests for more than a step of the device's own can do run elsewhere, beside the others."""
    device, host = ChunkedTarget(slots=1), ChunkedTarget(slots=2)
    built: list[HostRunner] = []

    def build() -> HostRunner:
        built.append(HostRunner(host, Laned(host), 2, Ways()))
        return built[-1]

    own = Laned(device)
    runner = SplitRunner(HostRunner(device, own, 2, Ways()), build)
    params = [SamplingParams(max_new_tokens=9, logprobs=1 if i % 2 else None, seed=i) for i in range(6)]
    sequences = [sequence_of([1, 2, i % VOCAB], own) for i, own in enumerate(params)]
    runner.add(sequences[0], own)
    assert not built
    for sequence in sequences[1:]:
        runner.add(sequence, own)
    assert len(built) == 1
    runner.cancel(sequences[5])
    ended = [event.sequence for event in runner.tick() if isinstance(event, Ended)]
    assert sequences[5] in ended
    assert runner.running <= 3
    while runner.busy:
        runner.tick()
    for sequence, own_params in zip(sequences[:5], params, strict=False):
        assert sequence.output == solo(sequence.tokens[:3], own_params)
    for sequence in (again := [sequence_of([1, 2], own_params) for own_params in params[:2]]):
        runner.add(sequence)
    runner.tick()
    assert {event.sequence for event in runner.fail(RuntimeError("?"))} >= {s for s in again if s.error is not None}
    runner.add(sequence_of([1, 2], params[0]))
    runner.close()
    assert not runner.busy
    assert not device.committed
    assert not host.committed
