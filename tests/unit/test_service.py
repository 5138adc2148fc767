"""The engine behind many threads: what callers see, and that nothing is left behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot import Engine, SamplingParams
from surefoot.drafters.none import NoDrafter
from surefoot.engine.loop import StepRecord
from surefoot.engine.runner import Ended
from surefoot.engine.service import Histogram, Service, Ticket
from surefoot.errors import InputError, NumericalError, QueueFullError
from surefoot.loading.tiny import tiny_config, write_checkpoint
from surefoot.model.tensors import random_tensors
from surefoot.types import Window
from tests.serving import VOCAB, ChunkedTarget, Laned, check_memory, solo

ENDLESS = SamplingParams(max_new_tokens=50, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=4)


class Gated(ChunkedTarget):
    """Waits in every pass until the gate is open."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        self.inside = threading.Event()

    def verify(self, windows: Seq[Window]) -> list[Any]:
        self.inside.set()
        assert self.gate.wait(10)
        return super().verify(windows)


def engine_of(target: ChunkedTarget) -> Engine:
    return Engine(target, Laned(target), 2, eos_token_ids=(0,))


@pytest.fixture
def target() -> Gated:
    return Gated(slots=2)


@pytest.fixture
def service(target: Gated) -> Iterator[Service]:
    """Nothing runs before the gate is opened."""
    service = Service(engine_of(target), queue_limit=2)
    yield service
    target.gate.set()
    service.close(drain=False)
    assert not target.committed
    assert not target.windows
    assert service.stats().waiting == service.stats().running == 0


def tokens_of(ticket: Ticket) -> list[int]:
    return [token for record in ticket for token in record.tokens]


def test_a_ticket_gives_the_steps_and_then_how_it_ended(service: Service, target: Gated) -> None:
    target.gate.set()
    ticket = service.submit([1, 2, 3], SHORT)
    records = list(ticket)
    assert [token for record in records for token in record.tokens] == solo([1, 2, 3], SHORT)
    assert ticket.finish_reason in ("stop", "length")
    assert ticket.error is None
    assert list(ticket) == []
    stats = ticket.stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.steps) == (3, 0, len(records))
    assert stats.tokens == sum(record.emitted for record in records)
    assert stats.started is not None
    assert stats.first_token is not None
    assert stats.ended is not None
    assert stats.submitted <= stats.started <= stats.first_token <= stats.ended


def test_the_queue_has_a_limit(service: Service, target: Gated) -> None:
    tickets = [service.submit([1, 2], ENDLESS) for _ in range(4)]
    with pytest.raises(QueueFullError, match="at most 2 requests to wait"):
        service.submit([1, 2], SHORT)
    assert service.stats().refused == 1
    tickets[3].cancel()
    target.gate.set()
    assert tickets[3].wait(10)
    service.submit([1, 2], SHORT)
    assert tickets[3].finish_reason == "cancelled"
    assert tickets[3].stats.started is None


def test_a_cancelled_request_leaves_its_slot_before_the_next_step(service: Service, target: Gated) -> None:
    """Cases 25 and 30: it may be cancelled while its window is being verified."""
    first, second = service.submit([1, 2], ENDLESS), service.submit([2, 1], ENDLESS)
    assert target.inside.wait(10)
    first.cancel()
    target.gate.set()
    assert first.wait(10)
    assert first.finish_reason == "cancelled"
    got = tokens_of(first)
    assert got == first.sequence.output == solo([1, 2], ENDLESS)[: len(got)]
    assert len(got) <= 3  # of the step that it was cancelled in
    third = service.submit([1, 1], SHORT)
    assert tokens_of(third) == solo([1, 1], SHORT)
    second.cancel()
    assert second.wait(10)
    second.cancel()  # again: nothing


def test_events_are_brought_from_the_beginning(service: Service, target: Gated) -> None:
    target.gate.set()
    late = service.submit([1, 2, 3], SHORT)
    assert late.wait(10)
    for ticket in (late, service.submit([1, 2, 3], SHORT)):
        events: list[Any] = []
        ticket.on_event(events.append)
        assert ticket.wait(10)
        assert isinstance(events[-1], Ended)
        steps = events[:-1]
        assert all(isinstance(event, StepRecord) for event in steps)
        assert [token for event in steps for token in event.tokens] == solo([1, 2, 3], SHORT)
        assert list(ticket) == []


def test_a_callback_that_raises_cancels_its_request_alone(service: Service, target: Gated) -> None:
    def fall_over(event: Any) -> None:
        raise RuntimeError("gone")

    bad, good = service.submit([1, 2], ENDLESS), service.submit([1, 2, 3], SHORT)
    bad.on_event(fall_over)
    target.gate.set()
    assert bad.wait(10)
    assert tokens_of(good) == solo([1, 2, 3], SHORT)
    assert bad.finish_reason in ("cancelled", "length")


def test_a_request_that_fails_ends_alone(service: Service, target: Gated) -> None:
    bad, good = service.submit([2, 1], ENDLESS), service.submit([1, 2], SHORT)
    assert target.inside.wait(10)
    target.poisoned[bad.sequence.slot] = 3
    target.gate.set()
    assert bad.wait(10)
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, NumericalError)
    assert tokens_of(good) == solo([1, 2], SHORT)


def test_something_unforeseen_ends_those_that_run_and_the_service_lives(
    service: Service, target: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets = [service.submit([1, 2], ENDLESS) for _ in range(3)]
    assert target.inside.wait(10)
    ticks = service._runner.tick

    def broken() -> Any:
        monkeypatch.setattr(service._runner, "tick", ticks)
        raise ZeroDivisionError("nobody thought of this")

    monkeypatch.setattr(service._runner, "tick", broken)
    target.gate.set()
    assert tickets[0].wait(10)
    assert [ticket.wait(10) for ticket in tickets] == [True] * 3
    reasons = [ticket.finish_reason for ticket in tickets]  # the second may not have been in its slot yet
    assert reasons in (["error", "error", "length"], ["error", "length", "length"])
    assert isinstance(tickets[0].error, ZeroDivisionError)
    assert tokens_of(service.submit([1, 2], SHORT)) == solo([1, 2], SHORT)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([],), {}, "prompt: expected at least one token"),
        (([VOCAB],), {}, r"prompt\[0\]"),
        (([1] * 64,), {}, "prompt: expected at most 63 tokens"),
        (([1], 5), {}, "params: expected SamplingParams"),
        (([1], SamplingParams(n=2)), {}, "n: expected 1"),
        (([1],), {"drafter": "mtp"}, "drafter: expected 'laned', the engine's own, or 'none', found 'mtp'"),
        (([1],), {"draft_length": 0}, "draft_length: expected an integer from 1 to 63"),
        (([1],), {"draft_length": 64}, "draft_length"),
    ],
)
def test_requests_that_cannot_be(service: Service, arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        service.submit(*arguments, **options)
    assert service.stats().waiting == 0


def test_the_engine_is_the_services_own_until_it_is_closed() -> None:
    engine = engine_of(ChunkedTarget())
    with Service(engine) as service:
        with pytest.raises(InputError, match="engine: expected its service to be closed first"):
            engine.generate([1, 2], SHORT)
        with pytest.raises(InputError, match="service"):
            Service(engine)
        ticket = service.submit([1, 2], SHORT)
    assert ticket.finish_reason is not None  # drained
    assert engine.generate([1, 2], SHORT).token_ids == tokens_of(ticket)
    service.close()
    with pytest.raises(InputError, match="service: expected one that is open"):
        service.submit([1, 2], SHORT)


def test_closing_finishes_or_cancels(target: Gated) -> None:
    service = Service(engine_of(target))
    tickets = [service.submit([1, 2], ENDLESS) for _ in range(5)]
    threading.Timer(0.05, target.gate.set).start()
    service.close()
    assert [ticket.finish_reason for ticket in tickets] == ["length"] * 5
    service = Service(engine_of(target))
    tickets = [service.submit([1, 2], SamplingParams(max_new_tokens=60, ignore_eos=True)) for _ in range(5)]
    service.close(drain=False)
    assert all(ticket.finish_reason in ("cancelled", "length") for ticket in tickets)
    assert tickets[-1].finish_reason == "cancelled"


def test_closing_does_not_wait_for_ever(target: Gated) -> None:
    service = Service(engine_of(target))
    slow = service.submit([1, 2], ENDLESS)
    assert target.inside.wait(10)
    threading.Timer(0.2, target.gate.set).start()
    service.close(timeout=0.05)
    assert slow.finish_reason == "cancelled"


def test_what_was_read_of_a_prompt_is_not_read_again(service: Service, target: Gated) -> None:
    target.gate.set()
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    first = tokens_of(service.submit(prompt, SHORT))
    assert target.read == 7
    again = service.submit(prompt, SHORT)
    assert tokens_of(again) == first
    longer = service.submit([*prompt, *first, 1], SHORT)
    assert tokens_of(longer) == solo([*prompt, *first, 1], SHORT)
    assert (again.stats.cached_tokens, longer.stats.cached_tokens) == (7, 6)
    stats = service.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (8 + 8 + 9 + len(first), 13)
    assert stats.prefix_bytes == service._prefixes.used > 0


def test_fifty_submitters_some_of_whom_go_away() -> None:
    """Every text that is finished is that of its solo run; counts add up; nothing is left."""
    target = ChunkedTarget(slots=4)
    engine = Engine(target, Laned(target), 2, eos_token_ids=(0,))
    service = Service(engine, queue_limit=30, prefix_cache_bytes=2000)
    outcomes: list[tuple[Ticket, bool]] = []
    refused, faults = [0], list[BaseException]()
    lock = threading.Lock()

    def client(number: int) -> None:
        dice = random.Random(number)
        try:
            for turn in range(6):
                prompt = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 20))]
                params = SamplingParams(max_new_tokens=dice.randint(1, 15), temperature=0.8 * (turn % 2), seed=number)
                try:
                    ticket = service.submit(
                        prompt, params, drafter=dice.choice([None, "none"]), draft_length=dice.choice([None, 1, 3])
                    )
                except QueueFullError:
                    with lock:
                        refused[0] += 1
                    time.sleep(0.002)
                    continue
                leaves, got = dice.random() < 0.33, list[int]()
                for count, record in enumerate(ticket):
                    got += record.tokens
                    if leaves and count == number % 3:
                        ticket.cancel()
                alone = solo(prompt, params)
                assert ticket.finish_reason == "cancelled" or got == alone
                assert got == ticket.sequence.output == alone[: len(got)]
                with lock:
                    outcomes.append((ticket, leaves))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
    service.close()
    stats = service.stats()
    assert len(outcomes) + refused[0] == 300
    assert sum(stats.ended.values()) == len(outcomes)
    assert stats.refused == refused[0]
    assert {ticket.finish_reason for ticket, leaves in outcomes if not leaves} <= {"stop", "length"}
    assert stats.ended["cancelled"] > 0
    assert stats.tokens == sum(ticket.stats.tokens for ticket, _ in outcomes)
    assert stats.accepted == sum(ticket.stats.accepted for ticket, _ in outcomes) > 0
    assert sum(stats.first_token.counts) == sum(ticket.stats.first_token is not None for ticket, _ in outcomes)
    assert not target.committed
    assert not target.borders
    check_memory(service._prefixes)


def test_histograms_count_by_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    histogram.add(2.0, times=3)
    assert histogram.counts == [2, 4, 1]
    assert histogram.total == 18.0
    assert Histogram((1.0,)).counts == [0, 0]


# A real model, with the drafters that requests may choose.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(max_positions=512)
    path = tmp_path_factory.mktemp("service")
    write_checkpoint(path, config, random_tensors(config, seed=1))
    return path


def test_requests_choose_their_drafters(folder: Path) -> None:
    engine = Engine.from_pretrained(folder, drafter="mtp", draft_length=2, slots=4, max_len=128, prefill_chunk=16)
    prompts = [[(i * j) % 260 for j in range(20 + i)] for i in range(8)]
    params = [SamplingParams(max_new_tokens=12, temperature=0.6 * (i % 2), seed=i, ignore_eos=True) for i in range(8)]
    alone = [engine.generate(*request).token_ids for request in zip(prompts, params, strict=True)]
    choices: list[dict[str, Any]] = [
        {}, {"drafter": "none"}, {"drafter": "ngram", "draft_length": 5}, {"drafter": "mtp", "draft_length": 1},
        {"drafter": "mtp+ngram"}, {"draft_length": 4}, {"drafter": "ngram"}, {"drafter": "none", "draft_length": 3},
    ]  # fmt: skip
    with Service(engine) as service:
        tickets = [
            service.submit(prompt, own, **choice) for prompt, own, choice in zip(prompts, params, choices, strict=True)
        ]
        assert [tokens_of(ticket) for ticket in tickets] == alone
        assert len(tickets[5].stats.proposed_by_position) == 4
        assert not tickets[7].stats.proposed_by_position
        with pytest.raises(InputError, match="drafter"):
            service.submit(prompts[0], params[0], drafter="draft-model")
    with Service(Engine.from_pretrained(folder, drafter="none", draft_length=0, max_len=128)) as service:
        assert tokens_of(service.submit(prompts[2], params[2], drafter="ngram")) == alone[2]
        with pytest.raises(InputError, match="MTP head"):
            service.submit(prompts[0], drafter="mtp")


def test_a_row_of_nan_in_a_real_model(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = random_tensors(config, seed=1)
    tensors["model.embed_tokens.weight"][13] = torch.nan
    write_checkpoint(tmp_path, config, tensors)
    engine = Engine.from_pretrained(tmp_path, drafter="mtp", slots=2, max_len=64)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    with Service(engine) as service:
        bad, drafted = service.submit([1, 13], params), service.submit([1, 13, 2, 3], params)
        assert list(bad) == list(drafted) == []
        assert isinstance(bad.error, NumericalError)
        assert isinstance(drafted.error, NumericalError)


def test_a_processor_that_raises_ends_its_request_alone(folder: Path) -> None:
    def give_up(tokens: Seq[int], logits: torch.Tensor) -> torch.Tensor:
        if len(tokens) > 5:
            raise LookupError("no more")
        return logits

    engine = Engine.from_pretrained(folder, drafter="mtp", slots=2, max_len=64)
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    ruled = SamplingParams(max_new_tokens=9, ignore_eos=True, processors=(give_up,))
    alone = engine.generate([1, 2, 3], params).token_ids
    with Service(engine) as service:
        bad, good = service.submit([1, 2, 3], ruled), service.submit([1, 2, 3], params)
        assert tokens_of(good) == alone
        assert len(tokens_of(bad)) < 9
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, LookupError)
    with pytest.raises(LookupError, match="no more"):
        engine.generate([1, 2, 3], ruled)
    assert engine.generate([1, 2, 3], params).token_ids == alone


def test_an_engine_without_drafts_serves() -> None:
    engine = Engine(ChunkedTarget(slots=1), NoDrafter(), 0, eos_token_ids=(0,))
    with Service(engine) as service:
        assert tokens_of(service.submit([1, 2, 3], SHORT)) == solo([1, 2, 3], SHORT)
