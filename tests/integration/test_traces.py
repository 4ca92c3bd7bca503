"""One trace for a request, through router, decode and prefill process, to an OTLP collector."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from cluster.tracing import ENDPOINT_VARIABLE
from tests.integration.conftest import RunningCluster

pytestmark = [pytest.mark.model, pytest.mark.cluster]

TRACE_ID, CLIENT_SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STAGES = {"encode", "stream", "reserve", "remote prefill", "transfer", "generate", "compute"}
DEADLINE_S = 60.0
SLACK_NS = 1_000_000_000  # a process may stand still between two looks at its clocks


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span with the service that sent it."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self.changed = threading.Condition(threading.RLock())

    def Export(self, request: Any, context: Any) -> Any:
        with self.changed:
            for resource in request.resource_spans:
                names = {item.key: item.value.string_value for item in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [(names["service.name"], span) for span in scope.spans]
            self.changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def has(self, spans: set[tuple[str, str]], stages: set[str]) -> bool:
        """Whether these have come, and one of each of these names from whomever."""
        come = self.of_trace(TRACE_ID).keys()
        return spans <= come and stages <= {name for _, name in come}

    def of_trace(self, trace_id: str) -> dict[tuple[str, str], Any]:
        with self.changed:
            return {(service, s.name): s for service, s in self.spans if s.trace_id.hex() == trace_id}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv(ENDPOINT_VARIABLE, f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    yield made
    server.stop(1).wait()


def test_one_trace_spans_router_decode_and_prefill(
    start_own_cluster: Callable[..., RunningCluster], collector: Collector
) -> None:
    cluster = start_own_cluster("--engine", "mock", "--prefill", "1", "--decode", "1")
    body = {"model": "SmolLM2-135M-Instruct", "prompt": list(range(400)), "max_tokens": 5}
    headers = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-01"}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    chain = [("tandem-router", "request"), ("tandem-decode", "decode"), ("tandem-prefill", "prefill")]
    # Each process sends in batches: what has ended first comes first, and the chain's own spans end last.
    wanted = {*chain, ("tandem-prefill", "compute")}
    with collector.changed:
        assert collector.changed.wait_for(lambda: collector.has(wanted, STAGES), DEADLINE_S), collector.spans
    spans = collector.of_trace(TRACE_ID)
    request, decode, prefill = (spans[name] for name in chain)
    assert request.parent_span_id.hex() == CLIENT_SPAN_ID
    assert decode.parent_span_id == request.span_id
    assert prefill.parent_span_id == decode.span_id
    assert request.start_time_unix_nano <= decode.start_time_unix_nano <= prefill.start_time_unix_nano
    compute = spans["tandem-prefill", "compute"]
    assert prefill.start_time_unix_nano <= compute.start_time_unix_nano + SLACK_NS
    assert compute.end_time_unix_nano <= prefill.end_time_unix_nano + SLACK_NS
