"""One OpenTelemetry trace for each request, through router, decode worker and prefill worker. Off unless asked for.

    client's traceparent ─> router: request ─> decode worker: decode ─> prefill worker: prefill
                                └ its stages       └ its stages             └ its stages

`OTEL_EXPORTER_OTLP_ENDPOINT` turns it on, and OpenTelemetry's other variables (sampler, headers, time-outs) hold as its
SDK reads them. A span's stages are cut from the request's timeline when it ends, so nothing is measured twice and a
process without tracing does nothing but compare with None. Spans carry ids, names and counts, never text or tokens.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from cluster.errors import StartupError

if TYPE_CHECKING:  # an optional extra
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
FLUSH_TIMEOUT_MS = 2000
# https://www.w3.org/TR/trace-context/: version, trace, parent, flags.
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")

Attributes = Mapping[str, str | int | float]


class RequestSpan:
    """One process's part of a request. Owned by who handles the request; `end` it in any case."""

    def __init__(self, tracing: Tracing, span: Span, started_s: float) -> None:
        self._tracing = tracing
        self._span = span
        self._started_s = started_s
        self._started_ns = time.time_ns()

    @property
    def traceparent(self) -> str:
        """What the next process continues with."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def stage(self, name: str, from_s: float, to_s: float) -> None:
        """A part of it, between two moments of the same clock; one that did not happen (0) is left out."""
        if from_s <= 0 or to_s < from_s:
            return
        from opentelemetry import trace

        context = trace.set_span_in_context(self._span)
        stage = self._tracing.tracer.start_span(name, context=context, start_time=self._unix_ns(from_s))
        stage.end(self._unix_ns(to_s))

    def end(self, attributes: Attributes, error: str = "") -> None:
        self._span.set_attributes(dict(attributes))
        if error:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()

    def _unix_ns(self, moment_s: float) -> int:
        return self._started_ns + round((moment_s - self._started_s) * 1e9)


class Tracing:
    """A process's spans on their way to a collector. `close` sends what is left."""

    def __init__(
        self, role: str, instance: str, exporter: SpanExporter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": f"tandem-{role}", "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource)
        # Its queue is bounded; what does not fit is dropped and counted by the SDK, and no request waits.
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._clock = clock
        self.tracer = self._provider.get_tracer("tandem")

    def begin(self, name: str, traceparent: str) -> RequestSpan:
        """A span that continues `traceparent`, or begins a trace where that is empty or malformed."""
        return RequestSpan(self, self.tracer.start_span(name, context=_context_of(traceparent)), self._clock())

    def close(self) -> None:
        """Blocks for `FLUSH_TIMEOUT_MS` at most."""
        self._provider.force_flush(FLUSH_TIMEOUT_MS)
        self._provider.shutdown()


def open_tracing(role: str, instance: str) -> Tracing | None:
    """None unless the environment names a collector. Raises `StartupError` where the packages for it are missing."""
    if not os.environ.get(ENDPOINT_VARIABLE):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise StartupError(
            f"{ENDPOINT_VARIABLE} is set and OpenTelemetry is not installed: pip install 'tandem-serve[tracing]'"
        ) from None
    return Tracing(role, instance, OTLPSpanExporter())


def _context_of(traceparent: str) -> Context | None:
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    from opentelemetry import trace

    parent = trace.SpanContext(
        int(match[1], 16), int(match[2], 16), is_remote=True, trace_flags=trace.TraceFlags(int(match[3], 16))
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(parent))
