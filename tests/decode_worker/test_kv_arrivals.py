"""One attempt to get KV, with a scripted prefill worker and frames put into the landing table by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tandem.v1 import common_pb2, handoff_pb2, worker_pb2

from cluster.errors import EngineFailure, WorkerUnavailable, to_failure
from cluster.identity import Incarnation, WorkerId, new_transfer_id
from cluster.sampling_params import SamplingParams
from decode_worker.kv_arrival import ArrivalFailed, ArrivalRejected, Landed
from decode_worker.kv_arrivals import KvArrivals
from decode_worker.prefill_peer import PeerLink, TransferListener
from decode_worker.request_check import AcceptedRequest, WorkerLimits, check_request
from decode_worker.request_timeline import RequestTimeline
from decode_worker.reservations import Reservation, Reservations
from engine.block_pool import BlockPool
from engine.kv_memory import KvMemory
from kv_transfer.endpoints import ReceivingEnds
from kv_transfer.frame import digest_of, root_digest
from kv_transfer.hello import HandoffIdentity
from kv_transfer.landing_table import LandingTable
from kv_transfer.transfer_ref import TransferRef
from kv_transfer.transport import FrameHeader
from tests.decode_worker.polling import until
from tests.kv_transfer.oracle import LAYOUT, assert_holds, expected_cell

NUM_BLOCKS = 16
NUM_TOKENS = 70  # four full blocks and a part of one
NUM_PROMPT_BLOCKS = 5
WAIT_S = 5.0
PROMPT = 3
PREFILL = WorkerId("prefill-0")


def cells_of(block: int) -> bytes:
    """All layers of one block of the prompt."""
    return b"".join(expected_cell(PROMPT, block, layer).tobytes() for layer in range(LAYOUT.num_layers))


def cells_digest(block: int) -> bytes:
    return digest_of([memoryview(cells_of(block))])


@dataclass
class ScriptedPeer:
    """A prefill worker that says what the test says. Its frames go straight into the landing table."""

    table: LandingTable
    worker_id: WorkerId = PREFILL
    link: PeerLink | None = field(default_factory=lambda: PeerLink(Incarnation("p1"), "shm", "", 1.0))
    listeners: dict[TransferRef, TransferListener] = field(default_factory=dict)
    sent: list[handoff_pb2.DecodeToPrefill] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    is_broken: bool = False

    def register(self, ref: TransferRef, listener: TransferListener) -> None:
        self.listeners[ref] = listener

    def unregister(self, ref: TransferRef) -> None:
        self.listeners.pop(ref, None)

    def send(self, message: handoff_pb2.DecodeToPrefill) -> None:
        if self.is_broken:
            raise WorkerUnavailable("broken")
        self.sent.append(message)

    def kinds(self) -> list[str | None]:
        return [message.WhichOneof("message") for message in self.sent]

    def accept(self, ref: TransferRef) -> None:
        self._say(ref, handoff_pb2.PrefillToDecode(accept=handoff_pb2.Accept(key=ref.to_message())))

    def reject(self, ref: TransferRef, reason: handoff_pb2.RejectReason.ValueType) -> None:
        reject = handoff_pb2.Reject(key=ref.to_message(), reason=reason, detail="busy")
        self._say(ref, handoff_pb2.PrefillToDecode(reject=reject))

    def commit(self, ref: TransferRef, failure: common_pb2.Failure | None = None, extra_digest: bytes = b"") -> None:
        digests = [*self.digests, *([extra_digest] if extra_digest else [])]
        commit = handoff_pb2.Commit(
            key=ref.to_message(),
            num_frames=len(digests),
            root_digest=root_digest(digests),
            has_first_token=True,
            first_token_id=7,
            failure=failure,
        )
        self._say(ref, handoff_pb2.PrefillToDecode(commit=commit))

    def frame(self, ref: TransferRef, block: int, *, is_corrupt: bool = False) -> bool:
        """All layers of one block of the prompt; whether it was let in."""
        payload, digest = cells_of(block), cells_digest(block)
        header = FrameHeader(
            ref.transfer_id, ref.epoch, 0, len(self.digests), 0, LAYOUT.num_layers, block, 1, len(payload), digest
        )
        runs = self.table.open_frame(header)
        if runs is None:
            return False
        arriving = bytearray(payload)
        if is_corrupt:
            arriving[100] ^= 1
        runs[0][:] = arriving
        self.table.close_frame(header, digest_of(list(runs)))
        self.digests.append(digest)
        return True

    def _say(self, ref: TransferRef, message: handoff_pb2.PrefillToDecode) -> None:
        self.listeners[ref].on_message(message)


class Desk:
    """A pool, a landing table and arrivals, with one request's reservation."""

    def __init__(self, folder: Path) -> None:
        self.memory = KvMemory(LAYOUT, NUM_BLOCKS)
        self.pool = BlockPool(NUM_BLOCKS, LAYOUT.block_tokens, "test")
        self.table = LandingTable(self.memory)
        self.ends = ReceivingEnds((), folder, "decode-0", self.table, "127.0.0.1")
        identity = HandoffIdentity(
            WorkerId("decode-0"), Incarnation("d1"), common_pb2.WORKER_ROLE_DECODE, "test", LAYOUT, b"", "host"
        )
        self.arrivals = KvArrivals(identity, self.table, self.ends, self.memory.size_bytes)
        self.reservations = Reservations(self.pool, max_waiting=4)
        self.peer = ScriptedPeer(self.table)
        self.ref = TransferRef(new_transfer_id(), 1)
        self.timeline = RequestTimeline(time.monotonic, WorkerId("decode-0"))
        self.request = _request()

    async def fetch(self) -> tuple[asyncio.Task[Landed], Reservation]:
        reservation = await self.reservations.take(self.request)
        fetching = self.arrivals.fetch(self.ref, self.peer, self.request, reservation, self.timeline)
        task = asyncio.create_task(fetching)
        await until(lambda: bool(self.peer.sent), "P is asked")
        return task, reservation

    def free_blocks(self) -> int:
        census = self.pool.census()
        assert census.conservation_error == 0
        return census.free + census.cached


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.arrivals.close()
    assert desk.table.counts().live == 0
    assert desk.arrivals.num_active == 0
    desk.memory.close()


def _request() -> AcceptedRequest:
    submit = worker_pb2.SubmitRequest(
        request_id="r", token_ids=range(NUM_TOKENS), sampling=SamplingParams(max_tokens=16).to_proto()
    )
    return check_request(submit, WorkerLimits(1000, 512, LAYOUT.block_tokens, NUM_BLOCKS))


async def landed(task: asyncio.Task[Landed]) -> Landed:
    return await asyncio.wait_for(task, WAIT_S)


async def test_verified_prompt_is_in_its_blocks_with_its_first_token(desk: Desk) -> None:
    task, reservation = await desk.fetch()
    asked = desk.peer.sent[0].prefill
    assert (asked.have_tokens, len(asked.destination)) == (0, NUM_PROMPT_BLOCKS)
    assert asked.credit_bytes == NUM_PROMPT_BLOCKS * LAYOUT.block_bytes
    desk.peer.accept(desk.ref)
    for block in range(NUM_PROMPT_BLOCKS):
        assert desk.peer.frame(desk.ref, block)
    desk.peer.commit(desk.ref)
    result = await landed(task)
    assert result.prompt.first_token_id == 7
    assert result.prompt.blocks == reservation.blocks
    assert_holds(desk.memory, tuple(reservation.destination), PROMPT)
    assert desk.peer.sent[-1].commit_ack.outcome == handoff_pb2.COMMIT_OUTCOME_OK
    assert desk.peer.listeners == {}
    # Nothing of the attempt is let in any more: the blocks are the engine's.
    assert not desk.peer.frame(desk.ref, 0)
    reservation.give_back()
    assert desk.free_blocks() == NUM_BLOCKS


async def test_commit_may_overtake_its_last_frames(desk: Desk) -> None:
    task, reservation = await desk.fetch()
    desk.peer.accept(desk.ref)
    for block in range(NUM_PROMPT_BLOCKS - 1):
        desk.peer.frame(desk.ref, block)
    desk.peer.commit(desk.ref, extra_digest=cells_digest(NUM_PROMPT_BLOCKS - 1))
    await asyncio.sleep(0)
    assert not task.done()
    desk.peer.frame(desk.ref, NUM_PROMPT_BLOCKS - 1)
    await landed(task)
    reservation.give_back()


async def test_f25_flipped_bit_is_found_and_sent_again(desk: Desk) -> None:
    task, reservation = await desk.fetch()
    desk.peer.accept(desk.ref)
    for block in range(NUM_PROMPT_BLOCKS):
        desk.peer.frame(desk.ref, block, is_corrupt=block == 2)
    desk.peer.commit(desk.ref)
    await until(lambda: "resend" in desk.peer.kinds(), "a resend is asked for")
    wanted = desk.peer.sent[-1].resend.ranges
    assert [(part.first_token, part.num_tokens, part.num_layers) for part in wanted] == [(32, 16, LAYOUT.num_layers)]
    assert desk.peer.kinds()[-2:] == ["credit", "resend"]
    assert desk.peer.frame(desk.ref, 2)
    desk.peer.commit(desk.ref)
    await landed(task)
    assert_holds(desk.memory, tuple(reservation.destination), PROMPT)
    assert desk.table.counts().bad_digests == 1
    reservation.give_back()


async def test_f25_bytes_that_stay_wrong_are_never_used(desk: Desk) -> None:
    task, _ = await desk.fetch()
    desk.peer.accept(desk.ref)
    for block in range(NUM_PROMPT_BLOCKS):
        desk.peer.frame(desk.ref, block, is_corrupt=block == 2)
    for num_resends in (1, 2):
        desk.peer.commit(desk.ref)
        await until(lambda: desk.peer.kinds().count("resend") == num_resends)  # noqa: B023
        desk.peer.frame(desk.ref, 2, is_corrupt=True)
    desk.peer.commit(desk.ref)
    with pytest.raises(ArrivalFailed, match="did not verify"):
        await landed(task)
    assert desk.peer.kinds()[-1] == "cancel"
    assert desk.free_blocks() == NUM_BLOCKS
    assert desk.pool.census().cached == 2  # the verified prefix in front of the bad block is kept


async def test_frames_of_another_root_are_never_used(desk: Desk) -> None:
    task, _ = await desk.fetch()
    desk.peer.accept(desk.ref)
    for block in range(NUM_PROMPT_BLOCKS):
        desk.peer.frame(desk.ref, block)
    desk.peer.digests[0] = b"x" * 16
    desk.peer.commit(desk.ref)
    with pytest.raises(ArrivalFailed, match="not those that were sent"):
        await landed(task)
    assert desk.pool.census().cached == 0
    assert desk.free_blocks() == NUM_BLOCKS


async def test_rejected_attempt_leaves_the_reservation_whole(desk: Desk) -> None:
    task, reservation = await desk.fetch()
    desk.peer.reject(desk.ref, handoff_pb2.REJECT_REASON_OVERLOADED)
    with pytest.raises(ArrivalRejected) as rejected:
        await landed(task)
    assert rejected.value.error.error_code == "server_is_overloaded"
    assert not reservation.is_given_back
    assert not desk.peer.frame(desk.ref, 0)
    # KV49: the next attempt has another epoch; what the first would still send is stale.
    second = TransferRef(desk.ref.transfer_id, 2)
    retry = asyncio.create_task(desk.arrivals.fetch(second, desk.peer, desk.request, reservation, desk.timeline))
    await until(lambda: second in desk.peer.listeners)
    desk.peer.accept(second)
    assert not desk.peer.frame(desk.ref, 0)
    for block in range(NUM_PROMPT_BLOCKS):
        assert desk.peer.frame(second, block)
    desk.peer.commit(second)
    await landed(retry)
    assert desk.table.counts().stale_frames == 2
    reservation.give_back()


async def test_f01_dead_peer_leaves_the_verified_prefix(desk: Desk) -> None:
    task, _ = await desk.fetch()
    desk.peer.accept(desk.ref)
    for block in (0, 1, 3):
        desk.peer.frame(desk.ref, block)
    desk.peer.is_broken = True
    desk.peer.listeners[desk.ref].peer_gone("killed")
    with pytest.raises(ArrivalFailed, match="killed"):
        await landed(task)
    assert desk.pool.census().cached == 2
    assert desk.free_blocks() == NUM_BLOCKS
    again = await desk.reservations.take(desk.request)
    assert again.have_tokens == 2 * LAYOUT.block_tokens
    assert_holds(desk.memory, tuple(again.matched), PROMPT)
    again.give_back()


async def test_kv_of_a_failed_commit_is_not_kept(desk: Desk) -> None:
    task, _ = await desk.fetch()
    desk.peer.accept(desk.ref)
    for block in range(3):
        desk.peer.frame(desk.ref, block)
    desk.peer.commit(desk.ref, to_failure(EngineFailure("NaN")))
    with pytest.raises(ArrivalFailed, match="NaN"):
        await landed(task)
    assert desk.pool.census().cached == 0
    assert desk.free_blocks() == NUM_BLOCKS


async def test_kv3_block_with_a_frame_half_way_waits_in_quarantine(desk: Desk) -> None:
    task, reservation = await desk.fetch()
    desk.peer.accept(desk.ref)
    destination = list(reservation.destination)
    header = FrameHeader(
        desk.ref.transfer_id, desk.ref.epoch, 0, 0, 0, LAYOUT.num_layers, 0, 1, LAYOUT.block_bytes, b"d" * 16
    )
    assert desk.table.open_frame(header) is not None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert desk.pool.census().quarantined == len(destination)
    assert not desk.pool.holds(destination)
    desk.table.close_frame(header, None)  # the connection broke: this was the last writer
    assert desk.pool.census().quarantined == 0
    assert desk.free_blocks() == NUM_BLOCKS


async def test_silent_peer_is_given_up(desk: Desk) -> None:
    task, _ = await desk.fetch()
    with pytest.raises(ArrivalFailed, match="no answer to the request"):
        await landed(task)
    assert desk.peer.kinds() == ["prefill", "cancel"]
    assert desk.free_blocks() == NUM_BLOCKS
