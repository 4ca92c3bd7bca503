"""`DecodeWorker.Session`: all requests of one router on one stream.

    router ──RouterMessage──> _read ──> RequestFlow (one task each)
    router <──DecodeMessage── outbox <── flows, one StepTokens for each engine step

When the stream breaks, for whatever reason, every request that came in on it is aborted at once.
It knows nothing of blocks, of prefill workers or of the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol, TypeAlias

import grpc
from tandem.v1 import common_pb2, worker_pb2, worker_pb2_grpc

from cluster.ended_tasks import end_tasks
from cluster.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ServerOverloaded,
    TandemError,
    WorkerUnavailable,
    shown,
)
from cluster.identity import RequestId
from decode_worker.live_requests import LiveRequests
from decode_worker.request_check import AcceptedRequest, WorkerLimits, check_request
from decode_worker.request_flow import RequestFlow
from decode_worker.router_session import RouterSession

PROTOCOL_VERSION = 1
HELLO_TIMEOUT_S = 5.0
# A router that lets no byte through for this long is stuck, whatever its connection says.
WRITE_TIMEOUT_S = 60.0
# Requests of one router that have not ended here: far above what the engine's queues take, so only a fault reaches it.
MAX_LIVE_PER_SESSION = 16_384

SessionContext: TypeAlias = grpc.aio.ServicerContext[worker_pb2.RouterMessage, worker_pb2.DecodeMessage]

logger = logging.getLogger(__name__)


class DecodeNode(Protocol):
    """What a session needs of its worker."""

    identity: common_pb2.WorkerIdentity
    limits: WorkerLimits
    live: LiveRequests

    @property
    def is_draining(self) -> bool: ...

    def load_report(self) -> worker_pb2.LoadReport: ...

    def new_flow(self, request: AcceptedRequest, session: RouterSession) -> RequestFlow: ...


class SessionService(worker_pb2_grpc.DecodeWorkerServicer):
    """The gRPC servicer of a decode worker."""

    def __init__(self, node: DecodeNode) -> None:
        self._node = node
        self.sessions: set[RouterSession] = set()

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: SessionContext
    ) -> None:
        """Writes by itself (it is no generator), so that what must end ends in this very coroutine."""
        hello = await self._read_hello(request_iterator)
        session = RouterSession(hello.router_id, self._node.live, self._node.load_report)
        self.sessions.add(session)
        reader = asyncio.create_task(self._read(request_iterator, session), name=f"session {hello.router_id}")
        logger.info("router %s (%s) connected", shown(hello.router_id), shown(hello.incarnation))
        try:
            answer = worker_pb2.DecodeHello(identity=self._node.identity, protocol_version=PROTOCOL_VERSION)
            await context.write(worker_pb2.DecodeMessage(hello=answer))
            await self._write(session, context)
        finally:
            self.sessions.discard(session)
            session.outbox.close()
            reader.cancel()
            await session.abort_all("the router's stream ended")
            await end_tasks(reader)
            logger.info("router %s disconnected", shown(hello.router_id))

    async def _write(self, session: RouterSession, context: SessionContext) -> None:
        """Until the outbox is closed and empty. A write waits for the router's flow-control window."""
        while (message := await session.outbox.get()) is not None:
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await context.write(message)
            except TimeoutError:
                raise ServerOverloaded(f"the router has read nothing for {WRITE_TIMEOUT_S:.0f} s") from None
        if session.outbox.is_overflown:
            raise ServerOverloaded("the router reads too slowly: its requests were aborted")

    def close(self) -> None:
        """Ends every session once what it has queued is written."""
        for session in list(self.sessions):
            session.outbox.close()

    async def _read_hello(self, messages: AsyncIterator[worker_pb2.RouterMessage]) -> worker_pb2.RouterHello:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(messages)
        except (TimeoutError, StopAsyncIteration):
            raise DeadlineExceeded(f"no RouterHello within {HELLO_TIMEOUT_S:.0f} s") from None
        if first.WhichOneof("message") != "hello":
            raise InvalidRequest("the first message must be RouterHello", param="hello")
        if first.hello.protocol_version != PROTOCOL_VERSION:
            raise InvalidRequest(
                f"protocol_version is {first.hello.protocol_version}, this worker speaks {PROTOCOL_VERSION}",
                param="protocol_version",
            )
        return first.hello

    async def _read(self, messages: AsyncIterator[worker_pb2.RouterMessage], session: RouterSession) -> None:
        """Until the router hangs up; then the outbox closes and with it the session."""
        try:
            async for message in messages:
                match message.WhichOneof("message"):
                    case "submit":
                        self._submit(message.submit, session)
                    case "cancel":
                        self._cancel(message.cancel, session)
                    case _:
                        logger.warning("router %s sent an unexpected message", shown(session.router_id))
        finally:
            session.outbox.close()

    def _submit(self, submit: worker_pb2.SubmitRequest, session: RouterSession) -> None:
        try:
            if self._node.is_draining:
                raise WorkerUnavailable(f"worker {self._node.identity.worker_id} is draining", stage="reserve")
            if len(session.tasks) >= MAX_LIVE_PER_SESSION:
                raise ServerOverloaded(f"{MAX_LIVE_PER_SESSION} requests of this router are live", stage="reserve")
            flow = self._node.new_flow(check_request(submit, self._node.limits), session)
            self._node.live.enter(flow)
        except TandemError as error:
            session.send_failure(RequestId(submit.request_id), submit.fence, error)
            return
        session.start(flow)

    def _cancel(self, cancel: worker_pb2.CancelRequest, session: RouterSession) -> None:
        flow = self._node.live.current(RequestId(cancel.request_id), cancel.fence)
        if flow is not None and flow in session.tasks:  # no router ends another router's requests
            flow.cancel(cancel.reason or "cancelled by the router")
