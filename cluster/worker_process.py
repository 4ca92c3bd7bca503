"""The life of one worker process, the same for both pools: build, listen, register, serve, drain, stop.

    python -m decode_worker ──> run_worker("decode_worker", arguments, build)

The first SIGTERM (or the Drain call) makes the worker unroutable at once and lets what is in flight finish, up to the
drain timeout; a second one ends it now. What the worker does in between is its node's business.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import grpc.aio
from tandem.v1 import common_pb2, membership_pb2, worker_pb2_grpc

from cluster.ended_tasks import end_tasks
from cluster.garbage import start_without_collections
from cluster.identity import Incarnation, new_incarnation
from cluster.kv_events import KvEventPublisher
from cluster.logs import configure_logs
from cluster.membership import Registration, worker_key
from cluster.process_guard import StopSignals, die_with_parent, limit_threads
from cluster.process_priority import give_way
from cluster.redis_client import RedisClient
from cluster.rpc import bind, build_server
from cluster.rpc_security import RpcSecurity
from cluster.worker_admin import AdminNode, WorkerAdminService
from cluster.worker_settings import WorkerSettings, parse_arguments

ROLES = {
    "prefill": common_pb2.WORKER_ROLE_PREFILL,
    "decode": common_pb2.WORKER_ROLE_DECODE,
    "aggregated": common_pb2.WORKER_ROLE_AGGREGATED,
}
# After the drain: what is handed over has this long to tell its router, which then places it elsewhere.
HAND_OVER_TIMEOUT_S = 2.0
# After that: what still writes gets this long before its stream is cut.
STOP_GRACE_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a process knows before its model is loaded."""

    settings: WorkerSettings
    identity: common_pb2.WorkerIdentity
    security: RpcSecurity
    redis: RedisClient | None  # None: no membership; routers are told the address by other means
    kv_events: KvEventPublisher | None  # the block pool's notes of its prefix cache go here

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self.identity.incarnation)


class WorkerNode(AdminNode, Protocol):
    """A worker's parts, as its process drives them."""

    def add_services(self, server: grpc.aio.Server) -> None: ...

    def start(self) -> None:
        """Everything is bound: begin to serve."""
        ...

    def record(self) -> membership_pb2.WorkerRecord:
        """What membership shall say of this worker now; the process fills in its addresses."""
        ...

    def begin_drain(self) -> None:
        """Accept nothing new from now on."""
        ...

    async def wait_until_idle(self) -> None: ...

    def hand_over(self) -> None:
        """The drain is over: what is left in flight goes on at other workers."""
        ...

    async def failed(self) -> str:
        """Returns only when the worker cannot serve any more, with the reason."""
        ...

    async def close(self) -> None:
        """Ends whatever is left; every block is back and every thread is gone afterwards."""
        ...


class WorkerFailed(Exception):
    """The worker cannot serve any more."""


async def run_worker(
    program: str, arguments: Sequence[str], build: Callable[[WorkerContext], Awaitable[WorkerNode]]
) -> None:
    """Returns after a drain. Raises `StartupError` when the process cannot start, `WorkerFailed` when it breaks."""
    settings = parse_arguments(program, arguments)
    give_way(settings.steps_of_nice)
    limit_threads(settings.num_threads)
    die_with_parent(settings.parent_pid)
    configure_logs(program, settings.worker_id)
    security = RpcSecurity.from_settings(settings)
    redis = RedisClient(settings.redis_url, settings.redis_password_file) if settings.redis_url else None
    context = _context(settings, security, redis)
    try:
        with start_without_collections():
            node = await build(context)
        try:
            await _serve(context, node)
        finally:
            await node.close()
    finally:
        if redis is not None:
            await redis.close()


def _context(settings: WorkerSettings, security: RpcSecurity, redis: RedisClient | None) -> WorkerContext:
    identity = common_pb2.WorkerIdentity(
        worker_id=settings.worker_id, incarnation=new_incarnation(), role=ROLES[settings.role]
    )
    kv_events = KvEventPublisher(redis, identity) if redis is not None else None
    return WorkerContext(settings, identity, security, redis, kv_events)


async def _serve(context: WorkerContext, node: WorkerNode) -> None:
    settings = context.settings
    signals = StopSignals()
    server = build_server(context.security)
    node.add_services(server)
    worker_pb2_grpc.add_WorkerAdminServicer_to_server(WorkerAdminService(node, signals.drain.set), server)
    address = bind(server, settings.listen, context.security)
    await server.start()
    node.start()
    signals.install()
    if context.kv_events is not None:
        context.kv_events.start()
    registration = _register(context, node, address)
    logger.info("ready", extra={"worker_id": settings.worker_id, "address": address, "pid": os.getpid()})
    try:
        await _until_stopped(settings, node, signals, registration)
    finally:
        signals.remove()
        if registration is not None:
            await registration.stop()
        if context.kv_events is not None:
            await context.kv_events.stop()
        await server.stop(STOP_GRACE_S)


def _register(context: WorkerContext, node: WorkerNode, address: str) -> Registration | None:
    if context.redis is None:
        return None

    def read_record() -> membership_pb2.WorkerRecord:
        record = node.record()
        record.control_address = record.admin_address = address
        if context.settings.metrics_port:
            record.metrics_address = f"{context.settings.metrics_host}:{context.settings.metrics_port}"
        if context.kv_events is not None:
            record.kv_event_seq = context.kv_events.last_seq
        return record

    registration = Registration(
        context.redis, worker_key(context.settings.worker_id), read_record, context.settings.heartbeat_s
    )
    registration.start()
    return registration


async def _until_stopped(
    settings: WorkerSettings, node: WorkerNode, signals: StopSignals, registration: Registration | None
) -> None:
    """Serves until asked to drain, then until nothing is in flight, the drain times out, or a second signal comes."""
    failed = asyncio.create_task(node.failed())
    drain_asked = asyncio.create_task(signals.drain.wait())
    try:
        await asyncio.wait((failed, drain_asked), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise WorkerFailed(failed.result())
        node.begin_drain()
        if registration is not None:
            registration.announce()
        logger.info("draining", extra={"worker_id": settings.worker_id})
        await _drained(settings, node, signals)
    finally:
        await end_tasks(failed, drain_asked)


async def _drained(settings: WorkerSettings, node: WorkerNode, signals: StopSignals) -> None:
    idle = asyncio.create_task(node.wait_until_idle())
    stop_now = asyncio.create_task(signals.stop_now.wait())
    with suppress(TimeoutError):
        async with asyncio.timeout(settings.drain_timeout_s):
            await asyncio.wait((idle, stop_now), return_when=asyncio.FIRST_COMPLETED)
    if not idle.done():
        logger.warning("stopping, requests in flight are handed over", extra={"worker_id": settings.worker_id})
        node.hand_over()
        await asyncio.wait((idle,), timeout=HAND_OVER_TIMEOUT_S)
    await end_tasks(idle, stop_now)
