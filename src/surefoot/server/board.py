"""What the server knows of itself: metrics for Prometheus, a few numbers for people, a line of JSON per request."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from surefoot.engine.service import Histogram, Service
from surefoot.server.choices import Choice
from surefoot.server.spans import Spans

LOG = logging.getLogger("surefoot.server")
WINDOW_S = 10.0  # over which the speed is taken


def log_to_stderr() -> None:
    """One line of JSON per request on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False


class ServiceCollector(Collector):
    """The service's own statistics, as they stand when Prometheus asks."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """All metrics of the service."""
        stats = self._service.stats()
        for name, text, value in (
            ("slots", "Requests that can run at once.", stats.slots),
            ("running_requests", "Requests with a slot.", stats.running),
            ("waiting_requests", "Requests without a slot.", stats.waiting),
            ("queue_limit", "Requests that may wait.", stats.queue_limit),
            ("prefix_cache_bytes", "What is kept of prompts.", stats.prefix_bytes),
        ):
            yield GaugeMetricFamily(f"surefoot_{name}", text, value)
        for name, text, value in (
            ("steps", "Steps of all requests.", stats.steps),
            ("generated_tokens", "Tokens put out.", stats.tokens),
            ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("cached_tokens", "Tokens of prompts that were not read again.", stats.cached_tokens),
            ("refused_requests", "Requests that found the queue full.", stats.refused),
        ):
            yield CounterMetricFamily(f"surefoot_{name}", text, value)
        yield _labelled("finished_requests", "Requests that ended.", "reason", dict(stats.ended))
        yield _labelled("drafted_tokens", "Draft tokens judged.", "position", _places(stats.proposed_by_position))
        yield _labelled("accepted_tokens", "Draft tokens kept.", "position", _places(stats.accepted_by_position))
        for name, text, histogram in (
            ("queue_seconds", "From submission to the prompt's first chunk.", stats.queued),
            ("time_to_first_token_seconds", "From submission to the first token.", stats.first_token),
            ("inter_token_seconds", "From token to token, a step's time shared among its tokens.", stats.between),
        ):
            yield HistogramMetricFamily(f"surefoot_{name}", text, _buckets(histogram), histogram.total)


class Board:
    """Counts what happens. For the event loop's thread."""

    def __init__(self, service: Service, spans: Spans | None = None) -> None:
        self._service, self._spans = service, spans
        self.registry = CollectorRegistry()
        self.registry.register(ServiceCollector(service))
        self._answers = Counter("surefoot_http_answers", "Answers by path and status.", ["path", "status"],
                                registry=self.registry)  # fmt: skip
        self._started = time.monotonic()
        self._recent: deque[tuple[float, int]] = deque()

    def answered(self, path: str, status: int) -> None:
        """An answer was begun."""
        self._answers.labels(path, str(status)).inc()

    def emitted(self, tokens: int) -> None:
        """A step put out so many tokens."""
        now = time.monotonic()
        self._recent.append((now, tokens))
        self._drop_old(now)

    def ended(
        self, path: str, model: str, request_id: str, choice: Choice, outcome: str, trace: str | None = None
    ) -> None:
        """The end of a choice, by `outcome`: its finish reason, "cancelled" or "error"; in the client's `trace`."""
        stats, own = choice.ticket.stats, choice.stats
        now = time.monotonic()
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "id": request_id,
            "path": path,
            "model": model,
            "choice": choice.index,
            "outcome": outcome,
            "prompt_tokens": choice.prompt_tokens,
            "cached_tokens": choice.cached_tokens,
            "completion_tokens": own.tokens,
            "drafted": own.proposed,
            "accepted": own.accepted,
            "queued_s": None if stats.started is None else round(stats.started - stats.submitted, 4),
            "first_token_s": None if stats.first_token is None else round(stats.first_token - stats.submitted, 4),
            "total_s": round(now - stats.submitted, 4),
        }
        if choice.ticket.error is not None:
            line["error"] = str(choice.ticket.error)
        LOG.info("%s", json.dumps(line))
        if self._spans is not None:
            self._spans.record(line, trace)

    def stats(self) -> dict[str, Any]:
        """A few numbers, as JSON has them."""
        self._drop_old(time.monotonic())
        stats = self._service.stats()
        rates = zip(stats.accepted_by_position, stats.proposed_by_position, strict=True)
        return {
            "slots": stats.slots,
            "running": stats.running,
            "queued": stats.waiting,
            "queue_limit": stats.queue_limit,
            "tokens_per_second": round(sum(tokens for _, tokens in self._recent) / WINDOW_S, 2),
            "tokens": stats.tokens,
            "steps": stats.steps,
            "tokens_per_step": round(stats.tokens_per_step, 3),
            "drafted": stats.proposed,
            "accepted": stats.accepted,
            "acceptance_rate": round(stats.acceptance_rate, 4),
            "proposed_by_position": stats.proposed_by_position,
            "accepted_by_position": stats.accepted_by_position,
            "acceptance_by_position": [round(kept / judged, 4) if judged else 0.0 for kept, judged in rates],
            "uptime_s": round(time.monotonic() - self._started, 1),
        }

    def _drop_old(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()


def _places(counts: list[int]) -> dict[str, int]:
    return {str(place): count for place, count in enumerate(counts, start=1)}


def _labelled(name: str, text: str, label: str, values: dict[Any, int]) -> Metric:
    family = CounterMetricFamily(f"surefoot_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Counts of values up to each bound, as Prometheus has them."""
    total, buckets = 0, []
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
