"""A decode worker put together: engine, reservations, peers, the Session service, and what it says about itself.

routers ──Session──> SessionService ──> RequestFlow ──> Reservations, PrefillPeers, KvArrivals ──> Engine
                          ^                                                                         │
                          └────────────────── EngineOutputs <── engine thread <─────────────────────┘
"""

from __future__ import annotations

import time

import grpc.aio
from tandem.v1 import membership_pb2, worker_pb2, worker_pb2_grpc

from cluster.block_hash import hash_test_vector
from cluster.fallbacks import Fallbacks
from cluster.identity import WorkerId
from cluster.membership import MembershipView
from cluster.metrics_server import MetricsServer
from cluster.rpc import open_channel
from cluster.telemetry import WorkerMetrics, new_registry
from cluster.worker_counters import WorkerCounters
from cluster.worker_process import WorkerContext
from decode_worker.decode_metrics import DecodeMetrics
from decode_worker.engine_outputs import EngineOutputs
from decode_worker.kv_arrivals import KvArrivals
from decode_worker.live_requests import LiveRequests
from decode_worker.prefill_peers import PrefillPeers
from decode_worker.request_check import AcceptedRequest, WorkerLimits
from decode_worker.request_flow import FlowResources, RequestFlow
from decode_worker.request_timeline import RequestTimeline
from decode_worker.reservations import Reservations
from decode_worker.router_session import RouterSession
from decode_worker.session_service import SessionService
from engine.worker_engine import WorkerEngine, load_report, open_engine
from kv_transfer.endpoints import ReceivingEnds, read_host_id
from kv_transfer.hello import HandoffIdentity
from kv_transfer.landing_table import LandingTable

STOP_ENGINE_TIMEOUT_S = 5.0
# KV listens on loopback: on several hosts the address to listen on comes with the settings of that deployment.
LISTEN_HOST = "127.0.0.1"


class DecodeNode:
    """Owned by the worker process; `close` gives everything back."""

    def __init__(self, context: WorkerContext, parts: WorkerEngine, fallbacks: Fallbacks) -> None:
        settings = context.settings
        self.identity = context.identity
        self.limits = WorkerLimits(
            vocab_size=parts.config.vocab_size,
            max_model_len=parts.built.max_model_len,
            block_tokens=parts.pool.block_tokens,
            total_blocks=parts.pool.num_blocks,
        )
        self.live = LiveRequests()
        self.is_draining = False
        self._context = context
        self._parts = parts
        self._fallbacks = fallbacks
        self._started_at = time.monotonic()
        self._registry = new_registry()
        self._counters = WorkerCounters(WorkerMetrics(self._registry, parts.model_name, settings.worker_id))
        self._metrics_server: MetricsServer | None = None
        self._reservations = Reservations(parts.pool, max_waiting=settings.max_waiting)
        self._arrivals = _open_arrivals(context, parts)
        self._peers = PrefillPeers(
            lambda target: open_channel(target, context.security), self._arrivals, self.load_report
        )
        self._view = MembershipView(context.redis, self._peers.on_membership) if context.redis is not None else None
        self._outputs = EngineOutputs(self.live, self._counters)
        self._sessions = SessionService(self)
        self._resources = FlowResources(
            engine=parts.engine,
            reservations=self._reservations,
            peers=self._peers,
            arrivals=self._arrivals,
            metrics=DecodeMetrics(self._counters, fallbacks),
        )

    @classmethod
    async def build(cls, context: WorkerContext) -> DecodeNode:
        """Loads the model. Raises `StartupError`."""
        fallbacks = Fallbacks()
        return cls(context, open_engine(context, fallbacks), fallbacks)

    # --- as its process drives it -------------------------------------------------------------------------------------

    def add_services(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self._sessions, server)

    def start(self) -> None:
        if self._context.settings.metrics_port:
            self._metrics_server = MetricsServer(self._registry, self._context.settings.metrics_port)
        self._parts.engine.start(self._outputs.sink)
        if self._view is not None and self._context.settings.role == "decode":
            self._view.start()

    def begin_drain(self) -> None:
        self.is_draining = True

    async def wait_until_idle(self) -> None:
        await self.live.wait_until_idle()

    async def failed(self) -> str:
        return await self._parts.wait_for_failure()

    async def close(self) -> None:
        self._sessions.close()
        for flow in self.live.all():
            flow.cancel("the worker stops")
        await self.live.wait_until_idle()
        if self._view is not None:
            await self._view.stop()
        await self._peers.close()
        self._arrivals.close()
        self._parts.close(STOP_ENGINE_TIMEOUT_S)
        if self._metrics_server is not None:
            self._metrics_server.close()

    # --- for its sessions -------------------------------------------------------------------------------------------

    def new_flow(self, request: AcceptedRequest, session: RouterSession) -> RequestFlow:
        timeline = RequestTimeline(time.monotonic, WorkerId(self.identity.worker_id))
        return RequestFlow(request, session, self._resources, timeline)

    def load_report(self) -> worker_pb2.LoadReport:
        report = load_report(self._parts.engine.load())
        report.waiting_requests += self._reservations.num_waiting
        report.waiting_tokens += self._reservations.waiting_tokens
        report.reserved_blocks = self._arrivals.reserved_blocks
        report.draining = self.is_draining
        report.admission_stopped = self._reservations.is_admission_stopped
        return report

    # --- what it says of itself ---------------------------------------------------------------------------------------

    def record(self) -> membership_pb2.WorkerRecord:
        """At every heartbeat: the gauges are brought up to date with it."""
        record = self._parts.record(self._context)
        record.load.CopyFrom(self.load_report())
        self._counters.show_load(record.load, self._parts.pool.census().conservation_error)
        self._arrivals.show(self._counters)
        record.host_id = read_host_id()
        record.ready = not self.is_draining
        record.refused.extend(self._peers.refused())
        return record

    def reset_prefix_cache(self) -> int:
        return self._parts.pool.reset_prefix_cache()

    def status(self) -> worker_pb2.WorkerStatus:
        status = self._parts.status(self._context)
        status.load.CopyFrom(self.load_report())
        status.active_transfers = self._arrivals.num_active
        status.fallbacks.extend(self._fallbacks.to_messages())
        status.peers.extend(self._peers.status())
        status.counters.update(self._counters.as_numbers() | self._arrivals.counters())
        status.uptime_s = time.monotonic() - self._started_at
        return status


def _open_arrivals(context: WorkerContext, parts: WorkerEngine) -> KvArrivals:
    settings, layout = context.settings, parts.layout
    identity = HandoffIdentity(
        worker_id=WorkerId(settings.worker_id),
        incarnation=context.incarnation,
        role=context.identity.role,
        model_fingerprint=parts.config.fingerprint,
        layout=layout,
        hash_test_vector=hash_test_vector(layout.block_tokens),
        host_id=read_host_id(),
    )
    table = LandingTable(parts.built.memory)
    # An aggregated worker asks nobody, so it listens for nobody.
    transports = settings.transports if settings.role == "decode" else ()
    ends = ReceivingEnds(transports, settings.runtime_dir, settings.worker_id, table, LISTEN_HOST)
    return KvArrivals(identity, table, ends, parts.built.memory.size_bytes)
