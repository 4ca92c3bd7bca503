"""A decode node without a model or peers: real flows, real reservations, a real pool, a deterministic engine."""

from __future__ import annotations

import time
from typing import NoReturn

from tandem.v1 import common_pb2, worker_pb2

from cluster.errors import WorkerUnavailable
from cluster.fallbacks import Fallbacks
from cluster.identity import WorkerId
from cluster.telemetry import WorkerMetrics, new_registry
from cluster.worker_counters import WorkerCounters
from decode_worker.decode_metrics import DecodeMetrics
from decode_worker.engine_outputs import EngineOutputs
from decode_worker.live_requests import LiveRequests
from decode_worker.request_check import AcceptedRequest, WorkerLimits
from decode_worker.request_flow import FlowResources, RequestFlow
from decode_worker.request_timeline import RequestTimeline
from decode_worker.router_session import RouterSession
from decode_worker.session_service import SessionService
from tests.decode_worker.counting_engine import VOCAB_SIZE, CountingEngine

WORKER_ID = WorkerId("decode-0")


class SessionNode:
    """What `SessionService` needs, and the engine behind it."""

    def __init__(self, engine: CountingEngine, num_blocks: int = 64) -> None:
        self.identity = common_pb2.WorkerIdentity(worker_id=WORKER_ID, incarnation="1")
        self.limits = WorkerLimits(VOCAB_SIZE, max_model_len=512, block_tokens=16, total_blocks=num_blocks)
        self.under_way: list[bool] = []
        self.live = LiveRequests(self.under_way.append)
        self.is_draining = False
        self.engine = engine
        counters = WorkerCounters(WorkerMetrics(new_registry(), "counting", WORKER_ID))
        self._resources = FlowResources(
            engine=engine,
            landings=_NoLandings(),
            metrics=DecodeMetrics(counters, Fallbacks()),
        )
        self.service = SessionService(self)
        self.outputs = EngineOutputs(self.live, counters)
        engine.start(self.outputs.sink)

    def load_report(self) -> worker_pb2.LoadReport:
        return worker_pb2.LoadReport(running_requests=len(self.live))

    def new_flow(self, request: AcceptedRequest, session: RouterSession) -> RequestFlow:
        return RequestFlow(request, session, self._resources, RequestTimeline(time.monotonic, WORKER_ID))

    async def close(self) -> None:
        self.engine.stop(5.0)


class _NoLandings:
    def open(self, request: AcceptedRequest, timeline: RequestTimeline) -> NoReturn:
        raise WorkerUnavailable("no prefill worker in this test")
