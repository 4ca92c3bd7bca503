"""A decode worker as its prefill worker sees it: what its link's end leads to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import pytest
from tandem.v1 import handoff_pb2, worker_pb2

from cluster.errors import KvLinkBroken, KvTransferFailed, WorkerUnavailable
from cluster.identity import Incarnation, TransferId, WorkerId
from engine.kv_memory import KvMemory
from kv_transfer.layer_groups import LinkCosts
from kv_transfer.layer_pusher import LayerPusher, PushRequest
from kv_transfer.transfer_ref import TransferRef
from kv_transfer.transport import CancelGuarantee, FrameHeader, SendTicket
from prefill_worker.decode_peer import DecodePeer, PeerLink
from prefill_worker.prefill_flow import PrefillFlow
from tests.kv_transfer.oracle import LAYOUT, PushOutcome, refs

TRANSFER = bytes(16)


class BrokenSender:
    """A connection whose other end is gone."""

    name = "broken"
    cancel_guarantee = CancelGuarantee.FENCED

    def push(self, header: FrameHeader, payload: Sequence[memoryview]) -> SendTicket:
        raise KvTransferFailed("connection reset", stage="transfer")

    def poll(self) -> None:
        """Nothing is ever outstanding."""

    def count_verified(self) -> int:
        return 0

    def close(self) -> None:
        """There is nothing to close."""


class Node:
    """Implements `decode_peer.PrefillNode`."""

    incarnation = Incarnation("p1")

    def load_report(self) -> worker_pb2.LoadReport:
        return worker_pb2.LoadReport()

    def start_flow(
        self, request: handoff_pb2.PrefillRequest, peer: DecodePeer, on_ended: Callable[[], None]
    ) -> PrefillFlow:
        raise AssertionError("nothing is asked of this node")


async def test_kv39_a_broken_link_ends_the_stream_so_that_both_come_back_with_a_new_one() -> None:
    """The stream alone would live on, and every later prompt fail on the same dead link."""
    memory = KvMemory(LAYOUT, 4)
    pusher = LayerPusher(BrokenSender(), memory, LinkCosts(1e9, 1e-5))
    peer = DecodePeer(WorkerId("d0"), Incarnation("d1"), PeerLink(pusher, "broken", "", 1.0, 2**20), Node())
    outcome = PushOutcome()
    session = pusher.open(PushRequest(TRANSFER, 1, LAYOUT.block_tokens, 0, outcome.callbacks()))  # type: ignore[arg-type]
    session.blocks_allocated(refs(0), LAYOUT.block_tokens)
    async with asyncio.timeout(60):
        with pytest.raises(KvLinkBroken, match="its link broke: connection reset"):
            await peer.watch_silence(60, 60)
        await peer.close()
    memory.close()


async def test_kv36_a_ping_of_another_incarnation_ends_the_stream() -> None:
    memory = KvMemory(LAYOUT, 4)
    pusher = LayerPusher(BrokenSender(), memory, LinkCosts(1e9, 1e-5))
    peer = DecodePeer(WorkerId("d0"), Incarnation("d1"), PeerLink(pusher, "broken", "", 1.0, 2**20), Node())
    peer.on_message(handoff_pb2.DecodeToPrefill(ping=handoff_pb2.Ping(number=1, incarnation="d1")))
    async with asyncio.timeout(60):
        assert (await peer.next_message()).pong.number == 1
        peer.on_message(handoff_pb2.DecodeToPrefill(ping=handoff_pb2.Ping(number=2, incarnation="d2")))
        with pytest.raises(WorkerUnavailable, match="pings as incarnation 'd2'"):
            await peer.watch_silence(60, 60)
        await peer.close()
    memory.close()


class TakingNode(Node):
    """Takes every attempt on."""

    def start_flow(
        self, request: handoff_pb2.PrefillRequest, peer: DecodePeer, on_ended: Callable[[], None]
    ) -> PrefillFlow:
        return cast(PrefillFlow, object())


async def test_who_has_something_here_may_be_silent_for_seconds_and_who_has_nothing_for_longer() -> None:
    memory, now_s = KvMemory(LAYOUT, 4), 0.0
    pusher = LayerPusher(BrokenSender(), memory, LinkCosts(1e9, 1e-5))
    link = PeerLink(pusher, "broken", "", 1.0, 2**20)
    peer = DecodePeer(WorkerId("d0"), Incarnation("d1"), link, TakingNode(), clock=lambda: now_s)
    watching = asyncio.create_task(peer.watch_silence(0.001, 1000))  # which waits for minutes
    await asyncio.sleep(0)
    now_s = 900.0
    ref = TransferRef(TransferId(TRANSFER), 1)
    peer.on_message(handoff_pb2.DecodeToPrefill(prefill=handoff_pb2.PrefillRequest(key=ref.to_message())))
    assert list(peer.flows) == [ref]
    now_s = 905.0
    async with asyncio.timeout(60):
        with pytest.raises(WorkerUnavailable, match=r"silent for 5\.0 s"):
            await watching
        peer.flows.clear()
        now_s = 2000.0
        with pytest.raises(WorkerUnavailable, match=r"silent for 1100\.0 s"):
            await peer.watch_silence(3.5, 1000)
        await peer.close()
    memory.close()
