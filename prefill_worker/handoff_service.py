"""`PrefillWorker.Handoff`: one decode worker's stream, from its Hello to its end.

    D ──DecodeToPrefill──> _read ──> DecodePeer ──> PrefillFlow (one for each attempt of a transfer)
    D <──PrefillToDecode── outbox <── flows

When the stream breaks, or three seconds pass without a ping, the decode worker is dead: everything of it is released
at once. The same worker under a new incarnation, or on a new stream, ends the old one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol, TypeAlias

import grpc.aio
from tandem.v1 import handoff_pb2, handoff_pb2_grpc

from cluster.errors import DeadlineExceeded, InvalidRequest, shown
from cluster.identity import WorkerId
from cluster.racing_tasks import first_of
from prefill_worker.decode_peer import DecodePeer

HELLO_TIMEOUT_S = 5.0
# Pings come every second; three missed ones are a dead peer.
MAX_SILENCE_S = 3.5
WRITE_TIMEOUT_S = 10.0

HandoffContext: TypeAlias = grpc.aio.ServicerContext[handoff_pb2.DecodeToPrefill, handoff_pb2.PrefillToDecode]

logger = logging.getLogger(__name__)


class DecodePeers(Protocol):
    """Makes a peer of a Hello: checks that the two fit and opens the link to its receiving end."""

    async def open(self, hello: handoff_pb2.Hello) -> tuple[handoff_pb2.HelloAck, DecodePeer | None]:
        """The answer, and the peer when it is accepted."""
        ...


class HandoffService(handoff_pb2_grpc.PrefillWorkerServicer):
    """The gRPC servicer of a prefill worker."""

    def __init__(self, peers: DecodePeers) -> None:
        self._peers = peers
        self.connected: dict[WorkerId, DecodePeer] = {}

    async def Handoff(  # type: ignore[override]
        self, request_iterator: AsyncIterator[handoff_pb2.DecodeToPrefill], context: HandoffContext
    ) -> None:
        hello = await self._read_hello(request_iterator)
        answer, peer = await self._peers.open(hello)
        await context.write(handoff_pb2.PrefillToDecode(hello=answer))
        if peer is None:
            fields = ", ".join(mismatch.field for mismatch in answer.mismatches)
            logger.warning("decode worker %s refused: %s", shown(hello.identity.worker_id), fields)
            return
        self._replace(peer)
        logger.info("decode worker %s (%s) connected", peer.worker_id, peer.incarnation)
        try:
            await first_of(
                self._read(request_iterator, peer), self._write(peer, context), peer.watch_silence(MAX_SILENCE_S)
            )
        finally:
            if self.connected.get(peer.worker_id) is peer:
                del self.connected[peer.worker_id]
            await peer.close("its stream ended")
            logger.info("decode worker %s (%s) is gone", peer.worker_id, peer.incarnation)

    def _replace(self, peer: DecodePeer) -> None:
        older = self.connected.get(peer.worker_id)
        if older is not None:
            older.hang_up("another stream of the same worker took its place")
        self.connected[peer.worker_id] = peer

    async def _read_hello(self, messages: AsyncIterator[handoff_pb2.DecodeToPrefill]) -> handoff_pb2.Hello:
        try:
            first = await asyncio.wait_for(anext(messages), HELLO_TIMEOUT_S)
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
            await asyncio.wait_for(context.write(message), WRITE_TIMEOUT_S)
