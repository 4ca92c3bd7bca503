"""The stream to a prefill worker: handshake, refusal, silence, restart, bounded reconnects."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tandem.v1 import common_pb2, handoff_pb2, handoff_pb2_grpc, membership_pb2, worker_pb2

from cluster.errors import TandemError, WorkerUnavailable
from cluster.identity import Incarnation, WorkerId, new_transfer_id
from cluster.membership_state import ChangeKind, MembershipChange
from decode_worker import prefill_peer
from decode_worker.peer_link import PeerState, PeerTiming
from decode_worker.prefill_peer import PrefillPeer
from decode_worker.prefill_peers import MAX_AHEAD, PrefillPeers
from kv_transfer.transfer_ref import TransferRef
from tests.decode_worker.polling import until

PREFILL = WorkerId("prefill-0")
TIMING = PeerTiming(
    handshake_timeout_s=10.0, ping_interval_s=0.1, min_backoff_s=0.01, max_backoff_s=0.05, refused_retry_s=60.0
)
WAIT_S = 60.0


class ScriptedPrefill(handoff_pb2_grpc.PrefillWorkerServicer):
    """A prefill worker's control plane that behaves as told."""

    def __init__(self) -> None:
        self.incarnation = "p1"
        self.num_hellos = 0
        self.received: list[handoff_pb2.DecodeToPrefill] = []
        self.answers_pings = True
        self.pings: Counter[int] = Counter()  # by the number of their connection
        self.idle_ping_ms = 0
        self.live: list[handoff_pb2.TransferKey] = []  # what it says is live here
        self.accepts = True
        self._break = asyncio.Event()
        self._outgoing: asyncio.Queue[handoff_pb2.PrefillToDecode] = asyncio.Queue()

    def break_streams(self) -> None:
        self._break.set()
        self._break = asyncio.Event()

    def send(self, message: handoff_pb2.PrefillToDecode) -> None:
        self._outgoing.put_nowait(message)

    async def Handoff(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[handoff_pb2.DecodeToPrefill],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        await anext(request_iterator)
        self.num_hellos += 1
        broken = self._break
        mismatch = handoff_pb2.Mismatch(field="block_tokens", mine="16", yours="32", fatal=True)
        ack = handoff_pb2.HelloAck(
            accepted=self.accepts,
            identity=common_pb2.WorkerIdentity(worker_id=PREFILL, incarnation=self.incarnation),
            transport="shm",
            mismatches=[] if self.accepts else [mismatch],
            idle_ping_ms=self.idle_ping_ms,
        )
        await context.write(handoff_pb2.PrefillToDecode(hello=ack))
        tasks = [
            asyncio.create_task(self._read(request_iterator, self.num_hellos)),
            asyncio.create_task(self._write(context)),
            asyncio.create_task(broken.wait()),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, messages: AsyncIterator[handoff_pb2.DecodeToPrefill], connection: int) -> None:
        async for message in messages:
            if message.WhichOneof("message") != "ping":
                self.received.append(message)
                continue
            self.pings[connection] += 1
            if self.answers_pings:
                pong = handoff_pb2.Pong(number=message.ping.number, incarnation=self.incarnation, live=self.live)
                self.send(handoff_pb2.PrefillToDecode(pong=pong))

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            await context.write(await self._outgoing.get())


class PlainHandshake:
    def __init__(self) -> None:
        self.num_open = 0

    def hello(self, peer: str) -> handoff_pb2.Hello:
        self.num_open += 1
        return handoff_pb2.Hello(min_protocol=1, max_protocol=1)

    def goodbye(self, hello: handoff_pb2.Hello, on_silent: Callable[[], None]) -> None:
        self.num_open -= 1
        on_silent()

    def mismatches(self, answer: handoff_pb2.HelloAck) -> list[handoff_pb2.Mismatch]:
        return list(answer.mismatches)


class Ear:
    """A transfer's listener."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[handoff_pb2.PrefillToDecode] = asyncio.Queue()
        self.listings: list[bool] = []
        self.gone: asyncio.Future[TandemError] = asyncio.get_running_loop().create_future()

    def on_message(self, message: handoff_pb2.PrefillToDecode) -> None:
        self.messages.put_nowait(message)

    def listed(self, ref: TransferRef, is_listed: bool) -> None:
        self.listings.append(is_listed)

    def peer_gone(self, error: TandemError) -> None:
        self.gone.set_result(error)


@pytest.fixture
async def prefill() -> ScriptedPrefill:
    return ScriptedPrefill()


@pytest.fixture
async def address(prefill: ScriptedPrefill, tmp_path: Path) -> AsyncIterator[str]:
    server = grpc.aio.server()
    handoff_pb2_grpc.add_PrefillWorkerServicer_to_server(prefill, server)
    target = f"unix:{tmp_path}/prefill.sock"
    server.add_insecure_port(target)
    await server.start()
    yield target
    await server.stop(0)


@pytest.fixture
async def peers() -> AsyncIterator[PrefillPeers]:
    peers = PrefillPeers(grpc.aio.insecure_channel, PlainHandshake(), worker_pb2.LoadReport, TIMING)
    yield peers
    await peers.close()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for a moment is no dead peer: for tests of what pings are sent."""
    monkeypatch.setattr(prefill_peer, "MAX_MISSED_PINGS", 1_000_000)


async def connected(peers: PrefillPeers, address: str, incarnation: str = "") -> PrefillPeer:
    return await peers.ready(PREFILL, Incarnation(incarnation), address)


async def test_kv27_messages_find_their_transfer_by_its_key_alone(
    peers: PrefillPeers, prefill: ScriptedPrefill, address: str
) -> None:
    peer = await connected(peers, address)
    assert peer.link is not None
    assert (peer.link.incarnation, peer.link.transport) == ("p1", "shm")
    transfer_id = new_transfer_id()
    ear, other = Ear(), Ear()
    peer.register(TransferRef(transfer_id, 1), ear)
    peer.register(TransferRef(transfer_id, 2), other)
    peer.send(handoff_pb2.DecodeToPrefill(prefill=handoff_pb2.PrefillRequest(token_ids=[1])))
    for epoch in (2, 1, 3):  # nobody registered the third
        key = TransferRef(transfer_id, epoch).to_message()
        prefill.send(handoff_pb2.PrefillToDecode(accept=handoff_pb2.Accept(key=key)))
    async with asyncio.timeout(WAIT_S):
        assert (await ear.messages.get()).accept.key.epoch == 1
        assert (await other.messages.get()).accept.key.epoch == 2
    assert ear.messages.empty()
    await until(lambda: len(prefill.received) == 1)


async def test_a_commit_of_an_attempt_that_is_over_is_answered_as_stale(
    peers: PrefillPeers, prefill: ScriptedPrefill, address: str
) -> None:
    await connected(peers, address)
    key = TransferRef(new_transfer_id(), 3).to_message()
    prefill.send(handoff_pb2.PrefillToDecode(progress=handoff_pb2.Progress(key=key)))
    prefill.send(handoff_pb2.PrefillToDecode(commit=handoff_pb2.Commit(key=key)))
    await until(lambda: len(prefill.received) == 1)
    ack = prefill.received[0].commit_ack
    assert (ack.key, ack.outcome) == (key, handoff_pb2.COMMIT_OUTCOME_STALE)


async def test_broken_stream_is_told_at_once_and_reconnected(
    peers: PrefillPeers, prefill: ScriptedPrefill, address: str
) -> None:
    peer = await connected(peers, address)
    ear = Ear()
    peer.register(TransferRef(new_transfer_id(), 1), ear)
    prefill.incarnation = "p2"
    prefill.break_streams()
    async with asyncio.timeout(WAIT_S):
        await ear.gone
    await until(lambda: peer.state is PeerState.READY)
    assert peer.link is not None
    assert peer.link.incarnation == "p2"


async def test_a_placement_that_is_first_to_speak_of_a_restart_waits_for_the_new_incarnation(
    peers: PrefillPeers, prefill: ScriptedPrefill, address: str
) -> None:
    await connected(peers, address, "p1")
    prefill.incarnation = "p2"
    peer = await connected(peers, address, "p2")
    assert peer.link is not None
    assert peer.link.incarnation == "p2"


async def test_a_placement_that_names_a_new_incarnation_does_not_sit_out_the_back_off(
    prefill: ScriptedPrefill, address: str
) -> None:
    timing = PeerTiming(min_backoff_s=60.0, max_backoff_s=60.0)
    peers = PrefillPeers(grpc.aio.insecure_channel, PlainHandshake(), worker_pb2.LoadReport, timing)
    try:
        peer = await connected(peers, address, "p1")
        prefill.break_streams()
        await until(lambda: peer.state is PeerState.BROKEN)
        with pytest.raises(WorkerUnavailable, match="ended"):
            await connected(peers, address, "p1")
        prefill.incarnation = "p2"
        peer = await connected(peers, address, "p2")
        assert peer.link is not None
        assert peer.link.incarnation == "p2"
    finally:
        await peers.close()


async def test_f04_an_error_of_ours_breaks_the_connection_and_not_the_peer_for_ever(
    prefill: ScriptedPrefill, address: str
) -> None:
    """As when a stopped worker wakes up and writes to a stream that has ended meanwhile."""
    reports = iter([worker_pb2.LoadReport(), None])

    def load_report() -> worker_pb2.LoadReport:
        if (report := next(reports, worker_pb2.LoadReport())) is None:
            raise asyncio.InvalidStateError("RPC already finished")
        return report

    timing = PeerTiming(ping_interval_s=0.02, min_backoff_s=0.01)
    peers = PrefillPeers(grpc.aio.insecure_channel, PlainHandshake(), load_report, timing)
    try:
        peer = await connected(peers, address)
        ear = Ear()
        peer.register(TransferRef(new_transfer_id(), 1), ear)
        async with asyncio.timeout(WAIT_S):
            assert "InvalidStateError" in (await ear.gone).message
        await until(lambda: prefill.num_hellos == 2 and peer.state is PeerState.READY)
    finally:
        await peers.close()


async def test_kv29_answers_to_pings_from_before_an_attempt_say_nothing_of_it(
    prefill: ScriptedPrefill, address: str
) -> None:
    """A peer that was busy for seconds answers all of them before it reads that it was asked for anything."""
    timing = PeerTiming(ping_interval_s=3600.0, min_backoff_s=0.01)
    peers = PrefillPeers(grpc.aio.insecure_channel, PlainHandshake(), worker_pb2.LoadReport, timing)
    try:
        peer, ear = await connected(peers, address), Ear()
        peer._num_pings = 7
        peer.register(TransferRef(new_transfer_id(), 1), ear)
        for number in (6, 7, 8):
            prefill.send(handoff_pb2.PrefillToDecode(pong=handoff_pb2.Pong(number=number, incarnation="p1")))
        await until(lambda: bool(ear.listings))
        assert ear.listings == [False]
    finally:
        await peers.close()


async def test_silent_peer_is_dead_after_three_pings(
    peers: PrefillPeers, prefill: ScriptedPrefill, address: str
) -> None:
    peer = await connected(peers, address)
    ear = Ear()
    peer.register(TransferRef(new_transfer_id(), 1), ear)
    prefill.answers_pings = False
    async with asyncio.timeout(WAIT_S):
        assert "3 pings were not answered" in (await ear.gone).message


@pytest.mark.usefixtures("patience")
async def test_a_peer_that_has_nothing_of_ours_is_pinged_as_seldom_as_it_allows(
    peers: PrefillPeers, prefill: ScriptedPrefill, address: str
) -> None:
    await connected(peers, address)  # it allows nothing: its pings take the time
    prefill.idle_ping_ms = 3_600_000
    quiet = await peers.ready(WorkerId("prefill-1"), Incarnation(""), address)
    await until(lambda: prefill.pings[2] == 1)  # the one behind its handshake
    pings = prefill.pings[1]
    await until(lambda: prefill.pings[1] >= pings + 10)
    assert prefill.pings[2] <= 2
    quiet.register(TransferRef(new_transfer_id(), 1), Ear())
    await until(lambda: prefill.pings[2] >= 12)


@pytest.mark.usefixtures("patience")
async def test_kv27_an_attempt_that_only_the_peer_lists_is_asked_after_at_full_pace(
    peers: PrefillPeers, prefill: ScriptedPrefill, address: str
) -> None:
    prefill.idle_ping_ms = 3_600_000
    prefill.live = [TransferRef(new_transfer_id(), 1).to_message()]
    await connected(peers, address)
    await until(lambda: prefill.pings[1] >= 10)


def _joined(number: int, address: str, kind: ChangeKind = ChangeKind.JOINED) -> MembershipChange:
    identity = common_pb2.WorkerIdentity(
        worker_id=f"prefill-{number}", incarnation=f"p{number}", role=common_pb2.WORKER_ROLE_PREFILL
    )
    record = membership_pb2.WorkerRecord(identity=identity, control_address=address, ready=True)
    return MembershipChange(kind, record)


@pytest.mark.usefixtures("patience")
async def test_of_many_prefill_workers_those_are_connected_to_that_a_request_names(
    prefill: ScriptedPrefill, address: str
) -> None:
    timing = PeerTiming(ping_interval_s=0.02, min_backoff_s=0.01, unused_after_s=0.1)
    peers = PrefillPeers(grpc.aio.insecure_channel, PlainHandshake(), worker_pb2.LoadReport, timing)
    try:
        for number in range(MAX_AHEAD + 1):
            peers.on_membership(_joined(number, address))
        named = WorkerId("prefill-3")
        for num_hellos in (1, 2):  # it is closed when it is not needed, and comes back
            await peers.ready(named, Incarnation("p3"), address)
            assert prefill.num_hellos == num_hellos
            assert [peer.worker_id for peer in peers.status()] == [named]
            await until(lambda: peers.status() == [])
        ear = Ear()
        peer = await peers.ready(named, Incarnation("p3"), address)
        peer.register(TransferRef(new_transfer_id(), 1), ear)
        await until(lambda: prefill.pings[3] >= 15)  # three times what an unused link is kept for
        assert peer.state is PeerState.READY
        assert not ear.gone.done()
    finally:
        await peers.close()


@pytest.mark.usefixtures("patience")
async def test_a_few_prefill_workers_are_connected_to_ahead_of_any_request(
    peers: PrefillPeers, prefill: ScriptedPrefill, address: str
) -> None:
    for number in range(MAX_AHEAD):
        peers.on_membership(_joined(number, address))
    await until(lambda: [peer.state for peer in peers.status()] == ["ready"] * MAX_AHEAD)


async def test_f27_refused_peer_is_reported_with_the_fields_name(
    peers: PrefillPeers, prefill: ScriptedPrefill, address: str
) -> None:
    prefill.accepts = False
    with pytest.raises(WorkerUnavailable, match="block_tokens"):
        await connected(peers, address)
    assert list(peers.refused()) == [
        membership_pb2.RefusedPeer(worker_id=PREFILL, incarnation="p1", field="block_tokens")
    ]
    # Refused at once the second time, without another handshake.
    with pytest.raises(WorkerUnavailable, match="block_tokens"):
        await connected(peers, address)
    assert prefill.num_hellos == 1
    # A restart of it, as membership shows it, is another peer.
    prefill.accepts, prefill.incarnation = True, "p2"
    record = membership_pb2.WorkerRecord(
        identity=common_pb2.WorkerIdentity(worker_id=PREFILL, incarnation="p2", role=common_pb2.WORKER_ROLE_PREFILL),
        control_address=address,
        ready=True,
    )
    peers.on_membership(MembershipChange(ChangeKind.RESTARTED, record))
    await until(lambda: prefill.num_hellos == 2)
    await connected(peers, address)
    assert peers.refused() == []


async def test_kv70_dead_address_is_tried_with_bounded_back_off(peers: PrefillPeers, tmp_path: Path) -> None:
    nobody = f"unix:{tmp_path}/nobody.sock"
    with pytest.raises(WorkerUnavailable):
        await connected(peers, nobody)
    peer = peers._peers[PREFILL]
    with pytest.raises(WorkerUnavailable):  # at once while it is in back-off
        await connected(peers, nobody)
    assert peer.state in (PeerState.BROKEN, PeerState.CONNECTING)


async def test_kv46_one_error_does_not_blacklist_a_healthy_peer(
    peers: PrefillPeers, prefill: ScriptedPrefill, address: str
) -> None:
    peer = await connected(peers, address)
    prefill.break_streams()
    await until(lambda: prefill.num_hellos == 2 and peer.state is PeerState.READY)
    for _ in range(100):
        await connected(peers, address)
    assert prefill.num_hellos == 2


async def test_kv36_peer_restarted_on_the_same_address_20_times(
    peers: PrefillPeers, prefill: ScriptedPrefill, address: str
) -> None:
    peer = await connected(peers, address)
    for restart in range(20):
        prefill.incarnation = f"r{restart}"
        prefill.break_streams()
        await until(lambda: peer.link is not None and peer.link.incarnation == prefill.incarnation)
    assert prefill.num_hellos == 21


async def test_departed_worker_is_forgotten_when_its_stream_ends(
    peers: PrefillPeers, prefill: ScriptedPrefill, address: str
) -> None:
    record = membership_pb2.WorkerRecord(
        identity=common_pb2.WorkerIdentity(worker_id=PREFILL, role=common_pb2.WORKER_ROLE_PREFILL),
        control_address=address,
        ready=True,
    )
    peers.on_membership(MembershipChange(ChangeKind.JOINED, record))
    await until(lambda: [peer.state for peer in peers.status()] == ["ready"])
    peers.on_membership(MembershipChange(ChangeKind.LEFT, record))
    assert [peer.state for peer in peers.status()] == ["ready"]  # what runs on its stream goes on
    prefill.break_streams()
    await until(lambda: peers.status() == [])
    assert prefill.num_hellos == 1


@pytest.mark.usefixtures("patience")
async def test_prefill_workers_that_left_are_neither_kept_nor_counted(
    peers: PrefillPeers, prefill: ScriptedPrefill, address: str
) -> None:
    """Names of an autoscaled pool come and go: one after the other, they are never many."""
    for number in range(2 * MAX_AHEAD):
        peers.on_membership(_joined(number, address))
        await until(lambda: [peer.state for peer in peers.status()] == ["ready"])
        peers.on_membership(_joined(number, address, ChangeKind.LEFT))
        prefill.break_streams()
        await until(lambda: peers.status() == [])
    assert prefill.num_hellos == 2 * MAX_AHEAD
    assert len(peers._peers) == 1
