"""Spans: continued, cut into stages, carried on; and nothing at all when nobody asked."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.tracing import ENDPOINT_VARIABLE, Tracing, open_tracing

PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_span_continues_its_parent_and_has_its_stages() -> None:
    exporter, clock = InMemorySpanExporter(), Clock()
    tracing = Tracing("decode", "decode-0", exporter, clock)
    span = tracing.begin("decode", PARENT)
    span.stage("reserve", 100.0, 100.5)
    span.stage("never", 0.0, 100.5)
    span.stage("not reached", 100.5, -1.0)
    carried = span.traceparent
    span.end({"tandem.kv_bytes": 7}, "kv_transfer_failed")
    tracing.close()
    stage, request = exporter.get_finished_spans()
    assert request.context is not None
    assert request.parent is not None
    assert stage.parent is not None
    assert f"{request.context.trace_id:032x}" == "ab" * 16
    assert f"{request.parent.span_id:016x}" == "cd" * 8
    assert stage.parent.span_id == request.context.span_id
    assert (stage.end_time or 0) - (stage.start_time or 0) == 500_000_000
    assert carried == f"00-{'ab' * 16}-{request.context.span_id:016x}-01"
    assert request.resource.attributes["service.name"] == "tandem-decode"
    assert dict(request.attributes or {}) == {"tandem.kv_bytes": 7}
    assert request.status.description == "kv_transfer_failed"


@pytest.mark.parametrize("traceparent", ["", "00-xyz", PARENT.upper(), f"00-{'0' * 32}-{'cd' * 8}-01", PARENT + "\n"])
def test_what_is_no_traceparent_begins_a_trace_of_its_own(traceparent: str) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("router", "router-0", exporter)
    tracing.begin("request", traceparent).end({})
    tracing.close()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


def test_it_is_off_unless_the_environment_names_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENDPOINT_VARIABLE, raising=False)
    assert open_tracing("router", "router-0") is None
