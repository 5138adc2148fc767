"""OpenTelemetry spans, one for each choice of a request, with the names of its conventions for generative models.

`pip install 'surefoot[otel]'` brings the packages; nothing else imports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surefoot.errors import InputError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

ATTRIBUTES = {
    "id": "gen_ai.response.id",
    "model": "gen_ai.request.model",
    "outcome": "gen_ai.response.finish_reason",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "choice": "surefoot.choice",
    "cached_tokens": "surefoot.cached_tokens",
    "drafted": "surefoot.drafted_tokens",
    "accepted": "surefoot.accepted_tokens",
    "queued_s": "surefoot.queue_seconds",
    "first_token_s": "surefoot.first_token_seconds",
    "error": "error.message",
}


class Spans:
    """Sends spans to an OTLP/HTTP collector in the background. Raises InputError if the packages are not there."""

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise InputError(f"otel: expected the packages of surefoot[otel], found: {error}") from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": "surefoot"}), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint) if exporter is None else exporter
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("surefoot")

    def record(self, line: Mapping[str, Any], trace: str | None) -> None:
        """A span that ends now, with what the log's line says, as a part of the client's trace (`traceparent`)."""
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        start = line["time"] - line["total_s"]
        given = {ATTRIBUTES[key]: value for key, value in line.items() if key in ATTRIBUTES and value is not None}
        span = self._tracer.start_span(
            line["path"],
            TraceContextTextMapPropagator().extract({} if trace is None else {"traceparent": trace}),
            kind=SpanKind.SERVER,
            start_time=int(start * 1e9),
            attributes=given,
        )
        if line["first_token_s"] is not None:
            span.add_event("first token", timestamp=int((start + line["first_token_s"]) * 1e9))
        if line["outcome"] == "error":
            span.set_status(StatusCode.ERROR)
        span.end(int(line["time"] * 1e9))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
