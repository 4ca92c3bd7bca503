"""`PrefillWorker.Handoff`: one decode worker's stream, from its Hello to its end.

    D ──DecodeToPrefill──> _read ──> DecodePeer ──> PrefillFlow (one for each attempt of a transfer)
    D <──PrefillToDecode── outbox <── flows

When the stream breaks, or three seconds pass without a ping while something of it is live here, the decode worker is
dead: everything of it is released at once. One that has nothing here pings less often. The same worker under a new
incarnation, or on a new stream, ends the old one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc.aio
from tandem.v1 import handoff_pb2, handoff_pb2_grpc

from cluster.errors import DeadlineExceeded, InvalidRequest, shown
from cluster.identity import WorkerId
from cluster.racing_tasks import first_of
from kv_transfer.protocol_limits import IDLE_PING_S
from prefill_worker.decode_peer import DecodePeer

HELLO_TIMEOUT_S = 5.0
# Pings come every second; three missed ones are a dead peer.
MAX_SILENCE_S = 3.5
MAX_IDLE_SILENCE_S = IDLE_PING_S + MAX_SILENCE_S
WRITE_TIMEOUT_S = 10.0

OpenedPeer: TypeAlias = tuple[handoff_pb2.HelloAck, DecodePeer | None]
Result = TypeVar("Result")
HandoffContext: TypeAlias = grpc.aio.ServicerContext[handoff_pb2.DecodeToPrefill, handoff_pb2.PrefillToDecode]

logger = logging.getLogger(__name__)


class DecodePeers(Protocol):
    """Makes a peer of a Hello: checks that the two fit and opens the link to its receiving end."""

    async def open(self, hello: handoff_pb2.Hello) -> OpenedPeer:
        """The answer, and the peer when it is accepted."""
        ...


class HandoffService(handoff_pb2_grpc.PrefillWorkerServicer):
    """The gRPC servicer of a prefill worker."""

    def __init__(self, peers: DecodePeers) -> None:
        self._peers = peers
        self.connected: dict[WorkerId, DecodePeer] = {}
        self._held: set[asyncio.Task[Any]] = set()

    async def Handoff(  # type: ignore[override]
        self, request_iterator: AsyncIterator[handoff_pb2.DecodeToPrefill], context: HandoffContext
    ) -> None:
        hello = await self._read_hello(request_iterator)
        opening = self._hold(self._peers.open(hello))
        try:
            answer, peer = await asyncio.shield(opening)
        except asyncio.CancelledError:  # the stream broke meanwhile: the link that is being opened is nobody's
            opening.add_done_callback(self._close_unused)
            raise
        try:
            await context.write(handoff_pb2.PrefillToDecode(hello=answer))
            if peer is None:
                fields = ", ".join(mismatch.field for mismatch in answer.mismatches)
                logger.warning("decode worker %s refused: %s", shown(hello.identity.worker_id), fields)
                return
            self._replace(peer)
            logger.info("decode worker %s (%s) connected", peer.worker_id, peer.incarnation)
            await first_of(
                self._read(request_iterator, peer),
                self._write(peer, context),
                peer.watch_silence(MAX_SILENCE_S, MAX_IDLE_SILENCE_S),
            )
        finally:
            if peer is not None:
                await asyncio.shield(self._hold(self._close_peer(peer)))

    async def close(self) -> None:
        """Ends every stream and waits until what they held is given back."""
        for peer in list(self.connected.values()):
            peer.hang_up("the worker stops")
        while self._held:
            await asyncio.wait(self._held)

    async def _close_peer(self, peer: DecodePeer) -> None:
        if self.connected.get(peer.worker_id) is peer:
            del self.connected[peer.worker_id]
        await peer.close()
        logger.info("decode worker %s (%s) is gone", peer.worker_id, peer.incarnation)

    def _close_unused(self, opening: asyncio.Task[OpenedPeer]) -> None:
        if not opening.cancelled() and opening.exception() is None and (peer := opening.result()[1]) is not None:
            self._hold(self._close_peer(peer))

    def _hold(self, step: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Runs a step to its end, whatever becomes of the stream: gRPC cancels a handler whenever its client leaves,
        and more than once."""
        task = asyncio.create_task(step)
        self._held.add(task)
        task.add_done_callback(self._held.discard)
        return task

    def _replace(self, peer: DecodePeer) -> None:
        older = self.connected.get(peer.worker_id)
        if older is not None:
            older.hang_up("another stream of the same worker took its place")
        self.connected[peer.worker_id] = peer

    async def _read_hello(self, messages: AsyncIterator[handoff_pb2.DecodeToPrefill]) -> handoff_pb2.Hello:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(messages)
        except (TimeoutError, StopAsyncIteration):
            raise DeadlineExceeded(f"no Hello within {HELLO_TIMEOUT_S:.0f} s") from None
        if first.WhichOneof("message") != "hello":
            raise InvalidRequest("the first message must be Hello", param="hello")
        return first.hello

    async def _read(self, messages: AsyncIterator[handoff_pb2.DecodeToPrefill], peer: DecodePeer) -> None:
        async for message in messages:
            peer.on_message(message)

    async def _write(self, peer: DecodePeer, context: HandoffContext) -> None:
        while True:
            message = await peer.next_message()
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await context.write(message)
