"""A prefill worker put together: engine, the Handoff service, and what it says about itself.

decode workers ──Handoff──> HandoffService ──> DecodePeer ──> PrefillFlow ──> Engine
                                                                  ^             │ engine thread: KvListener hears
                                                                  └── outputs <─┘ each layer, LayerPusher sends it
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import grpc.aio
from tandem.v1 import handoff_pb2, handoff_pb2_grpc, membership_pb2, worker_pb2

from cluster.block_hash import hash_test_vector
from cluster.errors import KvTransferFailed, ServerOverloaded, TandemError, WorkerUnavailable, shown
from cluster.fallbacks import Fallbacks
from cluster.identity import Incarnation, RequestId, WorkerId
from cluster.metrics_server import MetricsServer
from cluster.telemetry import WorkerMetrics, new_registry
from cluster.tracing import RequestSpan, open_tracing
from cluster.worker_counters import WorkerCounters
from cluster.worker_process import WorkerContext
from engine.request import SequenceOutput
from engine.worker_engine import WorkerEngine, load_report, open_engine
from kv_transfer import frame_copy
from kv_transfer.hello import HandoffIdentity, compare, is_refused, make_ack, receiver_layout
from kv_transfer.host import read_host_id
from kv_transfer.layer_pusher import LayerPusher
from kv_transfer.link_choice import LinkWishes, connect_best
from kv_transfer.shapes import CellGather, HeadRange
from kv_transfer.tiers.opening import open_tiers
from kv_transfer.transfer_ref import TransferRef
from kv_transfer.transports.registry import AUTO, load_transports, resolve
from prefill_worker.decode_peer import DecodePeer, PeerLink, PrefillRejected
from prefill_worker.handoff_service import HandoffService
from prefill_worker.prefill_check import CheckedPrefill, PrefillLimits, check_load, check_prefill
from prefill_worker.prefill_flow import FlowResources, PrefillFlow
from prefill_worker.prefill_trace import end_span

STOP_ENGINE_TIMEOUT_S = 5.0
GIGABYTE = 1e9


class PrefillNode:
    """Owned by the worker process; `close` gives everything back. Implements what its service and peers need."""

    def __init__(self, context: WorkerContext, parts: WorkerEngine, fallbacks: Fallbacks) -> None:
        settings = context.settings
        layout = parts.layout
        self.incarnation = context.incarnation
        self.is_draining = False
        self._context = context
        self._parts = parts
        self._fallbacks = fallbacks
        self._started_at = time.monotonic()
        self._identity = HandoffIdentity(
            worker_id=WorkerId(settings.worker_id),
            incarnation=context.incarnation,
            role=context.identity.role,
            model_fingerprint=parts.config.fingerprint,
            layout=layout,
            hash_test_vector=hash_test_vector(layout.block_tokens),
            host_id=read_host_id(),
            tp_size=settings.tensor_parallel,
        )
        self._limits = PrefillLimits(
            vocab_size=parts.config.vocab_size,
            max_model_len=parts.max_model_len,
            block_tokens=layout.block_tokens,
            total_blocks=parts.pool.num_blocks,
            max_credit_bytes=0,  # each decode worker says its own
        )
        self._registry = new_registry()
        self._counters = WorkerCounters(WorkerMetrics(self._registry, parts.model_name, settings.worker_id))
        self._metrics_server: MetricsServer | None = None
        self._resources = FlowResources(parts.engine, parts.pool, layout.num_layers)
        self._flows: dict[RequestId, PrefillFlow] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._service = HandoffService(self)
        self._tracing = open_tracing("prefill", settings.worker_id)
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def build(cls, context: WorkerContext) -> PrefillNode:
        """Loads the model. Raises `StartupError`."""
        load_transports(resolve(context.settings.transports))
        fallbacks = Fallbacks()
        if not frame_copy.is_native():
            fallbacks.took("kv copy", wanted="native", used="python", reason="library_missing")
        return cls(context, open_engine(context, fallbacks, open_tiers), fallbacks)

    # --- as its process drives it -------------------------------------------------------------------------------------

    def add_services(self, server: grpc.aio.Server) -> None:
        handoff_pb2_grpc.add_PrefillWorkerServicer_to_server(self._service, server)

    def start(self) -> None:
        settings = self._context.settings
        if settings.metrics_port:
            self._metrics_server = MetricsServer(self._registry, settings.metrics_host, settings.metrics_port)
        self._parts.engine.start(self._sink)

    def begin_drain(self) -> None:
        self.is_draining = True

    async def wait_until_idle(self) -> None:
        """Until every transfer was acknowledged, or ended otherwise."""
        await self._is_idle.wait()

    def hand_over(self) -> None:
        """The decode workers ask somebody else."""
        for peer in list(self._service.connected.values()):
            peer.hang_up("the worker stops")

    async def failed(self) -> str:
        return await self._parts.wait_for_failure()

    async def close(self) -> None:
        await self._service.close()
        self._parts.close(STOP_ENGINE_TIMEOUT_S)
        if self._metrics_server is not None:
            self._metrics_server.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    # --- peers --------------------------------------------------------------------------------------------------------

    async def open(self, hello: handoff_pb2.Hello) -> tuple[handoff_pb2.HelloAck, DecodePeer | None]:
        """Implements `DecodePeers`: compares, connects, measures."""
        mismatches = compare(self._identity, hello)
        if is_refused(mismatches):
            return make_ack(self._identity, mismatches), None
        settings, memory = self._context.settings, self._parts.memory
        pool = memory if memory.is_addressable else None
        try:
            # Blocks for the probe's few milliseconds, or for a dead address's time-out: not on the event loop.
            link = await asyncio.to_thread(
                connect_best,
                hello,
                LinkWishes(settings.transports, settings.min_bandwidth, settings.link_bytes_per_s, pool),
            )
        except KvTransferFailed as error:
            return make_ack(self._identity, mismatches, transport_reason=error.message), None
        self._note_transport(hello, link.sender.name, link.reason)
        costs = link.costs if settings.layer_push else replace(link.costs, operation_s=math.inf)
        agreed = PeerLink(
            pusher=LayerPusher(link.sender, memory, costs, gather=self._gather_for(hello)),
            transport=link.sender.name,
            reason=link.reason,
            measured_gb_per_s=link.costs.bytes_per_s / GIGABYTE,
            max_credit_bytes=hello.max_credit_bytes,
        )
        peer = DecodePeer(WorkerId(hello.identity.worker_id), Incarnation(hello.identity.incarnation), agreed, self)
        return make_ack(self._identity, mismatches, agreed.transport, agreed.reason, agreed.measured_gb_per_s), peer

    def _gather_for(self, hello: handoff_pb2.Hello) -> CellGather | None:
        """What brings our blocks into the decode worker's size; None when they are alike."""
        memory = self._parts.memory
        target = receiver_layout(memory.layout, hello)
        if target == memory.layout:
            return None
        heads = HeadRange(0, target.num_kv_heads)
        return CellGather(memory, target, heads, heads)

    def _note_transport(self, hello: handoff_pb2.Hello, used: str, reason: str) -> None:
        wanted = hello.transports[0].name
        if used != wanted and self._context.settings.transports != (AUTO,):
            self._fallbacks.took("transport", wanted=wanted, used=used, reason=shown(reason))

    # --- transfers ----------------------------------------------------------------------------------------------------

    def start_flow(
        self, request: handoff_pb2.PrefillRequest, peer: DecodePeer, on_ended: Callable[[], None]
    ) -> PrefillFlow:
        """Raises `PrefillRejected`."""
        if self.is_draining:
            error = WorkerUnavailable(f"{self._context.settings.worker_id} is draining", stage="prefill")
            raise PrefillRejected(handoff_pb2.REJECT_REASON_DRAINING, error)
        try:
            # Prefix and destination are counted in the decode worker's blocks.
            limits = replace(
                self._limits,
                block_tokens=peer.pusher.target.block_tokens,
                max_credit_bytes=peer.max_credit_bytes,
            )
            checked = check_prefill(request, limits)
            check_load(
                self._parts.engine.load().waiting, self._context.settings.max_waiting, self._num_pinned(), self._limits
            )
            flow = PrefillFlow(TransferRef.of(request.key), checked, peer, self._resources)

            def ended() -> None:
                self._flow_ended(flow)
                if span is not None:
                    end_span(span, flow, self._context.settings.worker_id)
                on_ended()

            span = self._begin_span(checked)
            flow.start(ended)
        except ServerOverloaded as error:
            raise PrefillRejected(handoff_pb2.REJECT_REASON_OVERLOADED, error) from error
        except WorkerUnavailable as error:
            raise PrefillRejected(handoff_pb2.REJECT_REASON_DRAINING, error) from error
        except TandemError as error:
            raise PrefillRejected(handoff_pb2.REJECT_REASON_INVALID, error) from error
        self._flows[flow.engine_id] = flow
        self._is_idle.clear()
        self._parts.requests_under_way(True)
        return flow

    def _begin_span(self, request: CheckedPrefill) -> RequestSpan | None:
        if self._tracing is None or not request.traceparent:
            return None
        return self._tracing.begin("prefill", request.traceparent)

    def _flow_ended(self, flow: PrefillFlow) -> None:
        self._flows.pop(flow.engine_id, None)
        self._counters.add("transfers_acknowledged" if flow.is_acknowledged else "transfers_ended_early")
        self._counters.add("kv_bytes_sent", flow.num_bytes_sent)
        self._counters.kv_moved(flow.num_bytes_sent)
        if flow.is_computed:
            self._counters.prompt_done(flow.num_tokens, flow.cached_tokens)
        if not self._flows:
            self._is_idle.set()
            self._parts.requests_under_way(False)

    def _num_pinned(self) -> int:
        """Blocks that computed prompts hold until they are sent and acknowledged."""
        return sum(flow.source.num_pinned for flow in self._flows.values() if flow.is_computed)

    def _sink(self, outputs: Sequence[SequenceOutput]) -> None:
        """From the engine's thread, once for each step."""
        self._counters.engine_step(len(outputs), sum(len(output.token_ids) for output in outputs))
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            flow = self._flows.get(output.request_id)
            if flow is not None:
                flow.on_output(output)

    # --- what it says of itself ---------------------------------------------------------------------------------------

    def load_report(self) -> worker_pb2.LoadReport:
        report = load_report(self._parts.engine.load())
        report.reserved_blocks = self._num_pinned()
        report.draining = self.is_draining
        return report

    def record(self) -> membership_pb2.WorkerRecord:
        """At every heartbeat: the gauges are brought up to date with it."""
        record = self._parts.record(self._context)
        record.host_id = self._identity.host_id
        record.load.CopyFrom(self.load_report())
        self._counters.show_load(record.load, self._parts.pool.census().conservation_error)
        self._counters.show_engine(self._parts.engine.counters())
        self._counters.metrics.show_links(peer.status() for peer in self._service.connected.values())
        record.ready = not self.is_draining
        return record

    def status(self) -> worker_pb2.WorkerStatus:
        status = self._parts.status(self._context)
        status.load.CopyFrom(self.load_report())
        status.active_transfers = len(self._flows)
        status.fallbacks.extend(self._fallbacks.to_messages())
        status.peers.extend(peer.status() for peer in self._service.connected.values())
        status.counters.update(self._counters.as_numbers())
        status.uptime_s = time.monotonic() - self._started_at
        return status

    def reset_prefix_cache(self) -> int:
        return self._parts.reset_prefix_cache()
