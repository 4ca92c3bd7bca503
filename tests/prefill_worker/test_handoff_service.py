"""A stream that breaks at a bad moment leaves no link behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from tandem.v1 import common_pb2, handoff_pb2

from cluster.identity import Incarnation, WorkerId
from prefill_worker.decode_peer import DecodePeer
from prefill_worker.handoff_service import HandoffContext, HandoffService


class Peer:
    """What the service needs of a `DecodePeer`; its end takes as long as the test wants."""

    def __init__(self) -> None:
        self.worker_id = WorkerId("decode-0")
        self.incarnation = Incarnation("1")
        self.is_closing = asyncio.Event()
        self.may_close = asyncio.Event()
        self.is_closed = False

    async def next_message(self) -> handoff_pb2.PrefillToDecode:
        await asyncio.Event().wait()
        raise AssertionError("never reached")

    async def watch_silence(self, max_silence_s: float, max_idle_silence_s: float) -> None:
        await asyncio.Event().wait()

    def hang_up(self, reason: str) -> None:
        """The service under test ends the stream by itself."""

    async def close(self) -> None:
        self.is_closing.set()
        await self.may_close.wait()
        self.is_closed = True


class Peers:
    """Implements `DecodePeers`."""

    def __init__(self) -> None:
        self.peer = Peer()
        self.is_opening = asyncio.Event()
        self.may_open = asyncio.Event()

    async def open(self, hello: handoff_pb2.Hello) -> tuple[handoff_pb2.HelloAck, DecodePeer | None]:
        self.is_opening.set()
        await self.may_open.wait()
        return handoff_pb2.HelloAck(accepted=True), cast(DecodePeer, self.peer)


class Context:
    """A stream whose client may be gone."""

    def __init__(self) -> None:
        self.is_greeted = asyncio.Event()
        self.error: Exception | None = None

    async def write(self, message: handoff_pb2.PrefillToDecode) -> None:
        self.is_greeted.set()
        if self.error is not None:
            raise self.error


async def hello_then_silence() -> AsyncIterator[handoff_pb2.DecodeToPrefill]:
    identity = common_pb2.WorkerIdentity(worker_id="decode-0", incarnation="1")
    yield handoff_pb2.DecodeToPrefill(hello=handoff_pb2.Hello(identity=identity))
    await asyncio.Event().wait()


def serve(service: HandoffService, context: Context) -> asyncio.Task[None]:
    stream: Any = service.Handoff(hello_then_silence(), cast(HandoffContext, context))
    return asyncio.create_task(stream)


@pytest.fixture
async def peers() -> Peers:
    return Peers()


async def test_f06_a_second_cancel_while_the_link_is_being_closed_does_not_stop_that(peers: Peers) -> None:
    """A worker that wakes up finds its peer silent and its stream cancelled, both at once."""
    service, context = HandoffService(peers), Context()
    peers.may_open.set()
    handler = serve(service, context)
    await context.is_greeted.wait()
    handler.cancel()
    await peers.peer.is_closing.wait()
    handler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handler
    peers.peer.may_close.set()
    await asyncio.wait_for(service.close(), 60)
    assert peers.peer.is_closed
    assert not service.connected


async def test_a_link_that_is_opened_for_a_stream_that_has_ended_is_closed(peers: Peers) -> None:
    service = HandoffService(peers)
    handler = serve(service, Context())
    await peers.is_opening.wait()
    handler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handler
    peers.may_open.set()
    peers.peer.may_close.set()
    await asyncio.wait_for(peers.peer.is_closing.wait(), 60)
    await asyncio.wait_for(service.close(), 60)
    assert peers.peer.is_closed


async def test_a_link_whose_greeting_cannot_be_sent_is_closed(peers: Peers) -> None:
    service, context = HandoffService(peers), Context()
    context.error = ConnectionError("reset")
    peers.may_open.set()
    peers.peer.may_close.set()
    with pytest.raises(ConnectionError):
        await serve(service, context)
    assert peers.peer.is_closed
