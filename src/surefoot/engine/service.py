"""An engine for many callers at once: the core of a server.

One thread runs the engine's requests. Callers hand theirs in and take their steps out, from threads of their own.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from types import TracebackType

import torch

from surefoot.cache.prefix import PrefixCache
from surefoot.engine.engine import Engine
from surefoot.engine.loop import StepRecord
from surefoot.engine.runner import Ended, Event, Started, Ways
from surefoot.engine.stats import Counts
from surefoot.engine.target import PREFILL_CHUNK
from surefoot.errors import ClosedError, QueueFullError
from surefoot.sampling import SamplingParams, require_int
from surefoot.sequence import FinishReason, Sequence
from surefoot.types import Drafter

PREFIX_BYTES = 2**29
FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass
class RequestStats(Counts):
    """One request. Times are those of `time.monotonic`, None for what has not happened: `submitted`, `started` (its
    prompt began to be read), `first_token`, `last_step`, `ended`. `cached_tokens` of the prompt did not have to be
    read."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    last_step: float | None = None
    ended: float | None = None


@dataclass
class Histogram:
    """Counts of values by upper bound, the last one for those above all bounds, and the sum of the values."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        place = next((i for i, bound in enumerate(self.bounds) if value <= bound), len(self.bounds))
        self.counts[place] += times
        self.total += value * times


@dataclass
class ServiceStats(Counts):
    """All requests since the service began, and how it stands.

    `ended` counts requests by finish reason, `refused` those that found the queue full. Histograms are in seconds:
    `queued` from submission to the first chunk of the prompt, `first_token` from submission to the first step's end,
    `between` from token to token (a step that emits n tokens after d seconds counts as n gaps of d / n). `waiting` and
    `running` count requests without and with one of the `slots`; `prefix_bytes` is what is kept of prompts.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ended: dict[FinishReason, int] = field(default_factory=dict)
    refused: int = 0
    queued: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN))
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN))
    between: Histogram = field(default_factory=lambda: Histogram(BETWEEN))
    waiting: int = 0
    running: int = 0
    slots: int = 0
    queue_limit: int = 0
    prefix_bytes: int = 0


TicketEvent = StepRecord | Ended


class Ticket:
    """A request that was handed in. Iterate over it for its steps as they are made, until it ends, or have them brought
    by `on_event`: one or the other. Safe from any thread. Records come without the drafts' distributions."""

    def __init__(self, sequence: Sequence, cancel: Callable[[Ticket], None]) -> None:
        self.sequence = sequence
        self._cancel = cancel
        self._events: deque[TicketEvent] = deque()
        self._callback: Callable[[TicketEvent], None] | None = None
        self._changed = threading.Condition(threading.RLock())
        self._ended = False
        self.stats = RequestStats(prompt_tokens=sequence.prompt_length)

    @property
    def finish_reason(self) -> FinishReason | None:
        """ "stop", "length", "cancelled" or "error"; None until it has ended."""
        return self.sequence.finish_reason if self._ended else None

    @property
    def error(self) -> Exception | None:
        """Why it ended, if by "error"."""
        return self.sequence.error

    def cancel(self) -> None:
        """End the request before the next step, wherever it stands; its slot is free then. Nothing if it has ended."""
        self._cancel(self)

    def on_event(self, callback: Callable[[TicketEvent], None]) -> None:
        """Have every step brought, and at last `Ended`: those that are past at once, the others by the service's
        thread, which waits meanwhile. A callback that raises cancels the request and is not called again."""
        with self._changed:
            self._callback = callback
            while self._events:
                self._bring(self._events.popleft())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, so many seconds at most; whether it has come."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, timeout)

    def __iter__(self) -> Iterator[StepRecord]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._ended)
                if not self._events:
                    return
                event = self._events.popleft()
            if isinstance(event, StepRecord):
                yield event

    def put(self, event: TicketEvent) -> None:
        """For the service: the next event."""
        with self._changed:
            self._ended = isinstance(event, Ended)
            if self._callback is None:
                self._events.append(event)
            else:
                self._bring(event)
            self._changed.notify_all()

    def _bring(self, event: TicketEvent) -> None:
        if self._callback is None:
            return
        try:
            self._callback(event)
        except Exception:  # the caller's own, and nobody is there to see it
            self._callback = lambda event: None
            self.cancel()


class Service:
    """Runs an engine's requests from many threads until it is closed. The engine is its own meanwhile.

    A request waits, in the order of arrival, until one of the engine's slots is free; requests join and leave between
    steps. Prompts are read in chunks between the steps of those that run. What one request gives does not depend on the
    others. `queue_limit` requests may wait beside those in slots; `prefix_cache_bytes` of what was read of prompts are
    kept for others that begin alike (unless the engine keeps its own; 0 keeps nothing).

    Raises InputError for limits that are none, and for an engine that is in use.
    """

    def __init__(self, engine: Engine, *, queue_limit: int = 256, prefix_cache_bytes: int = PREFIX_BYTES) -> None:
        require_int("queue_limit", queue_limit, low=0)
        self._prefixes = PrefixCache(prefix_cache_bytes) if engine.prefixes is None else engine.prefixes
        engine.hold("service to be closed")
        self._engine = engine
        budget = getattr(engine.target, "chunk", PREFILL_CHUNK)
        self._runner = engine.runner(Ways(engine.clock, budget=budget, prefixes=self._prefixes))
        self._building = threading.Lock()  # of drafters
        self._changed = threading.Condition()  # guards what follows
        self._orders: deque[tuple[Sequence, Drafter | None]] = deque()  # to be added, or without a drafter cancelled
        self._tickets: dict[Sequence, Ticket] = {}  # all that have not ended
        self._stats = ServiceStats(slots=engine.target.slots, queue_limit=queue_limit)
        self._open = True
        self._thread = threading.Thread(target=self._run, name="surefoot-service", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Seq[int] | str,
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        draft_length: int | None = None,
    ) -> Ticket:
        """Hand a request in. `drafter` (a name, "none", "ngram", "suffix", "mtp", "mtp+ngram" or "mtp+suffix", or the
        engine's own) and `draft_length`
        are the request's, in place of the engine's; a GPU's step has only its own.

        Raises InputError for an argument (as `Engine.generate` does), ClosedError, which is one, once the service is
        closed; QueueFullError if as many requests wait as may.
        """
        sequence = self._engine.sequence(prompt, SamplingParams() if params is None else params)
        with self._building:
            chosen, sequence.draft_length = self._engine.choose_drafter(drafter, draft_length)
        ticket = Ticket(sequence, self._cancel)
        with self._changed:
            if not self._open:
                raise ClosedError("service: expected one that is open, found it closed")
            if len(self._tickets) >= self._stats.slots + self._stats.queue_limit:
                self._stats.refused += 1
                raise QueueFullError(
                    f"queue: expected at most {self._stats.queue_limit} requests to wait, found no room"
                )
            self._tickets[sequence] = ticket
            self._orders.append((sequence, chosen))
            self._changed.notify()
        return ticket

    @property
    def open(self) -> bool:
        """Whether it takes requests."""
        return self._open

    def stats(self) -> ServiceStats:
        """A copy of the counts as they stand."""
        with self._changed:
            waiting = len(self._tickets) - self._stats.running
            return replace(copy.deepcopy(self._stats), waiting=waiting, prefix_bytes=self._prefixes.used)

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take no further requests, finish those that were taken, and give the engine back. They are cancelled at once
        without `drain`, and after `timeout` seconds of it. Not for callbacks."""
        with self._changed:
            self._open = False
            self._changed.notify()
        if drain:
            self._thread.join(timeout)
        with self._changed:
            for ticket in self._tickets.values():
                self._cancel(ticket)
        self._thread.join()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def _cancel(self, ticket: Ticket) -> None:
        with self._changed:
            self._orders.append((ticket.sequence, None))
            self._changed.notify()

    def _run(self) -> None:
        """The thread."""
        device = self._engine.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            with torch.inference_mode():
                while (orders := self._wait()) is not None:
                    self._deliver([*self._obey(orders), *self._tick()])
        finally:
            with self._changed:
                self._open = False
                left = list(self._tickets)
            for sequence in left:  # only if the thread itself is broken
                sequence.finish_reason, sequence.error = "error", RuntimeError("service: its thread has ended")
            self._deliver([Ended(sequence) for sequence in left])
            self._engine.let_go()

    def _wait(self) -> list[tuple[Sequence, Drafter | None]] | None:
        """The orders, once there is anything to do; None when all is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._orders or self._runner.busy or not self._open)
            if not self._orders and not self._runner.busy:
                return None
            orders = list(self._orders)
            self._orders.clear()
            return orders

    def _obey(self, orders: Seq[tuple[Sequence, Drafter | None]]) -> list[Event]:
        """Tell the runner; what became of those that it would not take."""
        events: list[Event] = []
        for sequence, drafter in orders:
            if drafter is None:
                self._runner.cancel(sequence)
                continue
            try:
                self._runner.add(sequence, drafter)
            except Exception as error:
                sequence.finish_reason, sequence.error = "error", error
                events.append(Ended(sequence))
        return events

    def _tick(self) -> list[Event]:
        """What came of a tick. Something unforeseen ends the requests that have slots, and no more."""
        try:
            return self._runner.tick()
        except Exception as error:
            return self._runner.fail(error)

    def _deliver(self, events: Seq[Event]) -> None:
        now = time.monotonic()
        with self._changed:
            tickets = [self._tickets[event.sequence] for event in events]
            for ticket, event in zip(tickets, events, strict=True):
                self._count(ticket.stats, event, now)
                if isinstance(event, Ended):
                    del self._tickets[event.sequence]
            self._stats.running = self._runner.running
        for ticket, event in zip(tickets, events, strict=True):  # callbacks may come back to us
            if isinstance(event, StepRecord):
                ticket.put(replace(event, draft=replace(event.draft, probs=None)))
            elif isinstance(event, Ended):
                ticket.put(event)

    def _count(self, own: RequestStats, event: Event, now: float) -> None:
        total = self._stats
        if isinstance(event, Started):
            own.started = now
            total.queued.add(now - own.submitted)
        elif isinstance(event, StepRecord):
            own.add(event)
            total.add(event)
            if own.last_step is None:
                own.first_token, own.cached_tokens = now, event.sequence.cached_tokens
                total.first_token.add(now - own.submitted)
                total.prompt_tokens += own.prompt_tokens
                total.cached_tokens += own.cached_tokens
            else:
                total.between.add((now - own.last_step) / event.emitted, times=event.emitted)
            own.last_step = now
        else:
            own.ended = now
            reason = event.sequence.finish_reason
            assert reason is not None
            total.ended[reason] = total.ended.get(reason, 0) + 1
