"""A decode worker put together: engine, reservations, peers, the Session service, and what it says about itself.

routers ──Session──> SessionService ──> RequestFlow ──> PromptLanding ──> Reservations, peers; Engine
                          ^                                                                         │
                          └────────────────── EngineOutputs <── engine thread <─────────────────────┘
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc.aio
from tandem.v1 import membership_pb2, worker_pb2, worker_pb2_grpc

from cluster.block_hash import hash_test_vector
from cluster.fallbacks import Fallbacks
from cluster.identity import WorkerId
from cluster.membership import MembershipView
from cluster.metrics_server import MetricsServer
from cluster.rpc import open_channel
from cluster.telemetry import WorkerMetrics, new_registry
from cluster.tracing import open_tracing
from cluster.worker_counters import WorkerCounters
from cluster.worker_process import WorkerContext
from cluster.worker_settings import WorkerSettings
from decode_worker.decode_metrics import DecodeMetrics
from decode_worker.engine_outputs import EngineOutputs
from decode_worker.kv_landings import DecodeHandshake, KvLandings
from decode_worker.landing_resources import LandingResources
from decode_worker.live_requests import LiveRequests
from decode_worker.prefill_peers import PrefillPeers
from decode_worker.request_check import AcceptedRequest, WorkerLimits
from decode_worker.request_flow import FlowResources, RequestFlow
from decode_worker.request_timeline import RequestTimeline
from decode_worker.reservations import Reservations
from decode_worker.router_session import RouterSession
from decode_worker.session_service import SessionService
from engine.drafting import Speculator
from engine.kv_memory import KvMemory
from engine.worker_engine import WorkerEngine, load_report, open_engine
from kv_transfer import frame_copy
from kv_transfer.endpoints import ReceivingEnds
from kv_transfer.hello import HandoffIdentity
from kv_transfer.host import read_host_id
from kv_transfer.landing_table import LandingTable
from kv_transfer.protocol_limits import ProtocolLimits
from kv_transfer.tiers.opening import open_tiers

if TYPE_CHECKING:
    from engine.runner_factory import BuiltRunner

STOP_ENGINE_TIMEOUT_S = 5.0
# A placement names its prefill worker with address and incarnation: membership only lets us connect ahead of it. All
# decode workers reading all records as often as a router does would keep a large fleet busy with itself.
PEERS_POLL_INTERVAL_S = 2.0


class DecodeNode:
    """Owned by the worker process; `close` gives everything back."""

    def __init__(self, context: WorkerContext, parts: WorkerEngine, fallbacks: Fallbacks) -> None:
        settings = context.settings
        self.identity = context.identity
        self.limits = WorkerLimits(
            vocab_size=parts.config.vocab_size,
            max_model_len=parts.max_model_len,
            block_tokens=parts.pool.block_tokens,
            total_blocks=parts.pool.num_blocks,
        )
        self.live = LiveRequests(parts.requests_under_way)
        self.is_draining = False
        self._context = context
        self._parts = parts
        self._fallbacks = fallbacks
        self._started_at = time.monotonic()
        self._registry = new_registry()
        self._counters = WorkerCounters(WorkerMetrics(self._registry, parts.model_name, settings.worker_id))
        self._metrics_server: MetricsServer | None = None
        self._reservations = Reservations(parts.pool, max_waiting=settings.max_waiting)
        self._table = LandingTable(parts.memory)
        self._ends = _open_ends(context, self._table, parts.memory)
        # A transfer has its blocks reserved, so a credit of all of them floods nobody: the pool is the bound.
        max_credit_bytes = parts.memory.size_bytes
        handshake = DecodeHandshake(_identity(context, parts), self._ends, max_credit_bytes)
        self._peers = PrefillPeers(lambda target: open_channel(target, context.security), handshake, self.load_report)
        self._tracing = open_tracing("decode", settings.worker_id)
        metrics = DecodeMetrics(self._counters, fallbacks)
        self._landings = KvLandings(
            LandingResources(
                self._reservations, self._peers, self._table, parts.layout, metrics, ProtocolLimits(), max_credit_bytes
            )
        )
        self._view: MembershipView | None = None
        if context.redis is not None:
            self._view = MembershipView(context.redis, self._peers.on_membership, poll_interval_s=PEERS_POLL_INTERVAL_S)
        self._outputs = EngineOutputs(self.live, self._counters)
        self._sessions = SessionService(self)
        self._resources = FlowResources(
            engine=parts.engine,
            landings=self._landings,
            metrics=metrics,
            tracing=self._tracing,
        )

    @classmethod
    async def build(cls, context: WorkerContext) -> DecodeNode:
        """Loads the model. Raises `StartupError`."""
        fallbacks = Fallbacks()
        if not frame_copy.is_native():
            fallbacks.took("kv copy", wanted="native", used="python", reason="library_missing")
        return cls(context, open_engine(context, fallbacks, open_tiers, _open_speculator), fallbacks)

    # --- as its process drives it -------------------------------------------------------------------------------------

    def add_services(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self._sessions, server)

    def start(self) -> None:
        settings = self._context.settings
        if settings.metrics_port:
            self._metrics_server = MetricsServer(self._registry, settings.metrics_host, settings.metrics_port)
        self._parts.engine.start(self._outputs.sink)
        if self._view is not None and self._context.settings.role == "decode":
            self._view.start()

    def begin_drain(self) -> None:
        self.is_draining = True

    async def wait_until_idle(self) -> None:
        await self.live.wait_until_idle()

    def hand_over(self) -> None:
        for flow in self.live.all():
            flow.hand_over()

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
        self._ends.close()
        self._parts.close(STOP_ENGINE_TIMEOUT_S)
        if self._metrics_server is not None:
            self._metrics_server.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    # --- for its sessions -------------------------------------------------------------------------------------------

    def new_flow(self, request: AcceptedRequest, session: RouterSession) -> RequestFlow:
        timeline = RequestTimeline(time.monotonic, WorkerId(self.identity.worker_id))
        return RequestFlow(request, session, self._resources, timeline)

    def load_report(self) -> worker_pb2.LoadReport:
        report = load_report(self._parts.engine.load())
        report.waiting_requests += self._reservations.num_waiting
        report.waiting_tokens += self._reservations.waiting_tokens
        report.reserved_blocks = self._landings.reserved_blocks
        report.draining = self.is_draining
        report.admission_stopped = self._reservations.is_admission_stopped
        return report

    # --- what it says of itself ---------------------------------------------------------------------------------------

    def record(self) -> membership_pb2.WorkerRecord:
        """At every heartbeat: the gauges are brought up to date with it."""
        record = self._parts.record(self._context)
        record.load.CopyFrom(self.load_report())
        self._counters.show_load(record.load, self._parts.pool.census().conservation_error)
        self._counters.show_engine(self._parts.engine.counters())
        self._landings.show(self._counters)
        self._counters.metrics.show_links(self._peers.status())
        record.host_id = read_host_id()
        record.ready = not self.is_draining
        record.refused.extend(self._peers.refused())
        return record

    def reset_prefix_cache(self) -> int:
        return self._parts.reset_prefix_cache()

    def status(self) -> worker_pb2.WorkerStatus:
        status = self._parts.status(self._context)
        status.load.CopyFrom(self.load_report())
        status.active_transfers = self._landings.num_active
        status.fallbacks.extend(self._fallbacks.to_messages())
        status.peers.extend(self._peers.status())
        status.counters.update(self._counters.as_numbers() | self._landings.counters())
        status.uptime_s = time.monotonic() - self._started_at
        return status


def _open_speculator(settings: WorkerSettings, built: BuiltRunner) -> Speculator | None:
    # Not at the top: a drafter may need torch, and a mock worker runs without.
    from decode_worker.speculation.opening import open_speculator

    return open_speculator(settings, built)


def _identity(context: WorkerContext, parts: WorkerEngine) -> HandoffIdentity:
    return HandoffIdentity(
        worker_id=WorkerId(context.settings.worker_id),
        incarnation=context.incarnation,
        role=context.identity.role,
        model_fingerprint=parts.config.fingerprint,
        layout=parts.layout,
        hash_test_vector=hash_test_vector(parts.layout.block_tokens),
        host_id=read_host_id(),
        tp_size=context.settings.tensor_parallel,
    )


def _open_ends(context: WorkerContext, table: LandingTable, memory: KvMemory) -> ReceivingEnds:
    settings = context.settings
    # An aggregated worker asks nobody, so it listens for nobody.
    transports = settings.transports if settings.role == "decode" else ()
    pool = memory if memory.is_addressable else None
    return ReceivingEnds(transports, settings.runtime_dir, settings.worker_id, table, settings.kv_host, pool)
