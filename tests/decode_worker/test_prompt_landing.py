"""A prompt's KV landing, with a scripted prefill worker and frames put into the landing table by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest
from tandem.v1 import common_pb2, handoff_pb2, worker_pb2

from cluster.errors import EngineFailure, KvLinkBroken, KvTransferFailed, WorkerUnavailable, to_failure
from cluster.fallbacks import Fallbacks
from cluster.identity import Incarnation, WorkerId
from cluster.sampling_params import SamplingParams
from cluster.telemetry import WorkerMetrics, new_registry
from cluster.worker_counters import WorkerCounters
from decode_worker.decode_metrics import DecodeMetrics
from decode_worker.kv_landings import KvLandings
from decode_worker.landing_messages import Landed
from decode_worker.landing_resources import LandingResources
from decode_worker.peer_link import PeerLink, TransferListener
from decode_worker.prompt_landing import PromptLanding
from decode_worker.request_check import AcceptedRequest, WorkerLimits, check_request
from decode_worker.request_timeline import RequestTimeline
from decode_worker.reservations import Reservations
from engine.block_pool import BlockPool
from engine.kv_memory import KvMemory
from kv_transfer.frame import digest_of, root_digest
from kv_transfer.landing_table import LandingTable
from kv_transfer.protocol_limits import ProtocolLimits
from kv_transfer.transfer_ref import TransferRef
from kv_transfer.transport import FrameHeader
from tests.decode_worker.polling import until
from tests.kv_transfer.oracle import LAYOUT, assert_holds, expected_cell

NUM_BLOCKS = 16
NUM_TOKENS = 70  # four full blocks and a part of one
NUM_PROMPT_BLOCKS = 5
WAIT_S = 60.0
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
    link: PeerLink | None = field(default_factory=lambda: PeerLink(Incarnation("p1"), "shm", "", 1.0, asyncio.Event()))
    listeners: dict[TransferRef, TransferListener] = field(default_factory=dict)
    sent: list[handoff_pb2.DecodeToPrefill] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of the frames that count, in the order of their numbers
    blocks: list[int] = field(default_factory=list)  # theirs
    num_posted: int = 0
    is_broken: bool = False
    hung_up: list[PeerLink] = field(default_factory=list)

    def register(self, ref: TransferRef, listener: TransferListener) -> None:
        self.listeners[ref] = listener

    def unregister(self, ref: TransferRef) -> None:
        self.listeners.pop(ref, None)

    def send(self, message: handoff_pb2.DecodeToPrefill) -> None:
        if self.is_broken:
            raise WorkerUnavailable("broken")
        self.sent.append(message)

    def hang_up(self, link: PeerLink, reason: str) -> None:
        self.hung_up.append(link)

    def kinds(self) -> list[str | None]:
        return [message.WhichOneof("message") for message in self.sent]

    def accept(self, ref: TransferRef) -> None:
        self._say(ref, handoff_pb2.PrefillToDecode(accept=handoff_pb2.Accept(key=ref.to_message())))

    def reject(self, ref: TransferRef, reason: handoff_pb2.RejectReason.ValueType) -> None:
        reject = handoff_pb2.Reject(key=ref.to_message(), reason=reason, detail="busy")
        self._say(ref, handoff_pb2.PrefillToDecode(reject=reject))

    def commit(
        self,
        ref: TransferRef,
        failure: common_pb2.Failure | None = None,
        extra_digest: bytes = b"",
        num_resends: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        digests = [*self.digests, *([extra_digest] if extra_digest else [])]
        commit = handoff_pb2.Commit(
            key=ref.to_message(),
            num_frames=len(digests),
            root_digest=root_digest(digests),
            has_first_token=True,
            first_token_id=7,
            num_resends=num_resends,
            failure=failure,
            cached_tokens=cached_tokens,
        )
        self._say(ref, handoff_pb2.PrefillToDecode(commit=commit))

    def frame(self, ref: TransferRef, block: int, *, is_corrupt: bool = False) -> bool:
        """All layers of one block of the prompt; whether it was let in."""
        payload, digest = cells_of(block), cells_digest(block)
        header = FrameHeader(
            ref.transfer_id, ref.epoch, 0, self.num_posted, 0, LAYOUT.num_layers, block, 1, len(payload), digest
        )
        runs = self.table.open_frame(header)
        if runs is None:
            return False
        arriving = bytearray(payload)
        if is_corrupt:
            arriving[100] ^= 1
        runs[0][:] = arriving
        self.table.close_frame(header, digest_of(list(runs)))
        if block in self.blocks:  # what goes again replaces what went before
            del self.digests[self.blocks.index(block)]
            self.blocks.remove(block)
        self.digests.append(digest)
        self.blocks.append(block)
        self.num_posted += 1
        return True

    def _say(self, ref: TransferRef, message: handoff_pb2.PrefillToDecode) -> None:
        self.listeners[ref].on_message(message)


class OnePeer:
    """Finds the scripted peer under every name."""

    def __init__(self, peer: ScriptedPeer) -> None:
        self._peer = peer

    async def ready(
        self, worker_id: WorkerId, incarnation: Incarnation, address: str, wait_s: float = 1.0
    ) -> ScriptedPeer:
        if self._peer.is_broken:
            raise WorkerUnavailable("broken")
        return self._peer


class Desk:
    """A pool, a landing table and one request that names the scripted peer twice."""

    def __init__(
        self,
        limits: ProtocolLimits | None = None,
        num_blocks: int = NUM_BLOCKS,
        max_credit_bytes: int = NUM_BLOCKS * LAYOUT.block_bytes,
    ) -> None:
        self.memory = KvMemory(LAYOUT, num_blocks)
        self.pool = BlockPool(num_blocks, LAYOUT.block_tokens, "test")
        self.table = LandingTable(self.memory)
        self.reservations = Reservations(self.pool, max_waiting=4)
        self.peer = ScriptedPeer(self.table)
        self.timeline = RequestTimeline(time.monotonic, WorkerId("decode-0"))
        counters = WorkerCounters(WorkerMetrics(new_registry(), "test", "decode-0"))
        limits = limits or ProtocolLimits(accept_s=0.5, idle_s=2.0, arrival_grace_s=0.2)
        metrics = DecodeMetrics(counters, Fallbacks())
        self.landings = KvLandings(
            LandingResources(
                self.reservations, OnePeer(self.peer), self.table, LAYOUT, metrics, limits, max_credit_bytes
            )
        )
        self.landing: PromptLanding | None = None

    async def ask(
        self, *names: str, allow_local_prefill: bool = False, deadline_ms: int = 0
    ) -> tuple[asyncio.Task[Landed | None], TransferRef]:
        """A landing that has asked its first peer."""
        request = _request(names or ("prefill-0",), allow_local_prefill, deadline_ms)
        self.landing = self.landings.open(request, self.timeline)
        task = asyncio.create_task(self.landing.land())
        return task, await self.asked(1)

    async def asked(self, epoch: int) -> TransferRef:
        await until(lambda: self.peer.kinds().count("prefill") == epoch, f"attempt {epoch}")
        self.peer.digests.clear()
        self.peer.blocks.clear()
        wanted = [message.prefill for message in self.peer.sent if message.HasField("prefill")]
        return TransferRef.of(wanted[-1].key)

    async def settled(self) -> None:
        """Nothing is held or awaited; every block is free or in the prefix cache."""
        await until(lambda: self.landings.num_active == 0, "the landing is over")
        census = self.pool.census()
        assert census.conservation_error == 0
        assert census.free + census.cached == self.pool.num_blocks
        assert self.table.counts().live == 0
        assert self.peer.listeners == {}


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    await desk.settled()
    desk.memory.close()


def _request(names: Sequence[str], allow_local_prefill: bool, deadline_ms: int) -> AcceptedRequest:
    submit = worker_pb2.SubmitRequest(
        request_id="r",
        token_ids=range(NUM_TOKENS),
        sampling=SamplingParams(max_tokens=16).to_proto(),
        prefill=[worker_pb2.PrefillPlacement(worker_id=name) for name in names],
        allow_local_prefill=allow_local_prefill,
        deadline_ms=deadline_ms,
    )
    return check_request(submit, WorkerLimits(1000, 512, LAYOUT.block_tokens, NUM_BLOCKS))


async def landed(task: asyncio.Task[Landed | None]) -> Landed:
    result = await asyncio.wait_for(task, WAIT_S)
    assert result is not None
    return result


def take(desk: Desk, result: Landed) -> None:
    """The engine takes the blocks and, in this test, gives them back at once."""
    assert desk.landing is not None
    desk.landing.admitted()
    desk.pool.release(result.prompt.blocks)


async def test_verified_prompt_is_in_its_blocks_with_its_first_token(desk: Desk) -> None:
    task, ref = await desk.ask()
    asked = desk.peer.sent[0].prefill
    assert (asked.have_tokens, len(asked.destination)) == (0, NUM_PROMPT_BLOCKS)
    assert asked.credit_bytes == NUM_PROMPT_BLOCKS * LAYOUT.block_bytes
    desk.peer.accept(ref)
    for block in range(NUM_PROMPT_BLOCKS):
        assert desk.peer.frame(ref, block)
    desk.peer.commit(ref)
    result = await landed(task)
    assert result.prompt.first_token_id == 7
    assert len(result.prompt.blocks) == NUM_PROMPT_BLOCKS + 1
    assert_holds(desk.memory, result.prompt.blocks[:NUM_PROMPT_BLOCKS], PROMPT)
    assert desk.peer.sent[-1].commit_ack.outcome == handoff_pb2.COMMIT_OUTCOME_OK
    # Nothing of the attempt is let in any more: the blocks are the engine's.
    assert not desk.peer.frame(ref, 0)
    take(desk, result)


async def test_commit_may_overtake_its_last_frames(desk: Desk) -> None:
    task, ref = await desk.ask()
    desk.peer.accept(ref)
    for block in range(NUM_PROMPT_BLOCKS - 1):
        desk.peer.frame(ref, block)
    desk.peer.commit(ref, extra_digest=cells_digest(NUM_PROMPT_BLOCKS - 1))
    await asyncio.sleep(0)
    assert not task.done()
    desk.peer.frame(ref, NUM_PROMPT_BLOCKS - 1)
    take(desk, await landed(task))


async def test_f25_flipped_bit_is_found_and_sent_again(desk: Desk) -> None:
    task, ref = await desk.ask()
    desk.peer.accept(ref)
    for block in range(NUM_PROMPT_BLOCKS):
        desk.peer.frame(ref, block, is_corrupt=block == 2)
    desk.peer.commit(ref)
    await until(lambda: "resend" in desk.peer.kinds(), "a resend is asked for")
    wanted = desk.peer.sent[-1].resend.ranges
    assert [(part.first_token, part.num_tokens, part.num_layers) for part in wanted] == [(32, 16, LAYOUT.num_layers)]
    assert desk.peer.kinds()[-2:] == ["credit", "resend"]
    assert desk.peer.frame(ref, 2)
    desk.peer.commit(ref, num_resends=1)
    result = await landed(task)
    assert_holds(desk.memory, result.prompt.blocks[:NUM_PROMPT_BLOCKS], PROMPT)
    assert desk.table.counts().bad_digests == 1
    take(desk, result)


async def test_f25_bytes_that_stay_wrong_are_never_used(desk: Desk) -> None:
    task, ref = await desk.ask()
    desk.peer.accept(ref)
    for block in range(NUM_PROMPT_BLOCKS):
        desk.peer.frame(ref, block, is_corrupt=block == 2)
    for num_resends in (1, 2):
        desk.peer.commit(ref, num_resends=num_resends - 1)
        await until(lambda: desk.peer.kinds().count("resend") == num_resends)  # noqa: B023
        desk.peer.frame(ref, 2, is_corrupt=True)
    desk.peer.commit(ref, num_resends=2)
    with pytest.raises(KvTransferFailed):
        await landed(task)
    assert desk.pool.census().cached == 2  # the verified prefix in front of the bad block is kept


async def test_frames_of_another_root_are_never_used(desk: Desk) -> None:
    task, ref = await desk.ask()
    desk.peer.accept(ref)
    for block in range(NUM_PROMPT_BLOCKS):
        desk.peer.frame(ref, block)
    desk.peer.digests[0] = b"x" * 16
    desk.peer.commit(ref)
    with pytest.raises(KvTransferFailed, match="root digest"):
        await landed(task)
    assert desk.pool.census().cached == 0


async def test_kv49_rejected_attempt_passes_its_blocks_on_under_another_epoch(desk: Desk) -> None:
    task, first = await desk.ask("prefill-0", "prefill-1")
    desk.peer.reject(first, handoff_pb2.REJECT_REASON_OVERLOADED)
    second = await desk.asked(2)
    assert (second.transfer_id, second.epoch) == (first.transfer_id, 2)
    asked = [message.prefill.destination for message in desk.peer.sent if message.HasField("prefill")]
    assert list(asked[0]) == list(asked[1])
    desk.peer.accept(second)
    assert not desk.peer.frame(first, 0)  # what the first would still send is stale
    for block in range(NUM_PROMPT_BLOCKS):
        assert desk.peer.frame(second, block)
    desk.peer.commit(second)
    take(desk, await landed(task))
    assert desk.table.counts().stale_frames == 1
    assert desk.timeline.attempts == 2


async def lands_behind_two_blocks(desk: Desk, task: asyncio.Task[Landed | None], ref: TransferRef) -> None:
    """The attempt `ref` was asked for all but the first two blocks, brings them, and the whole prompt is right."""
    asked = desk.peer.sent[-1].prefill
    assert (asked.have_tokens, len(asked.destination)) == (2 * LAYOUT.block_tokens, NUM_PROMPT_BLOCKS - 2)
    desk.peer.accept(ref)
    for block in range(2, NUM_PROMPT_BLOCKS):
        assert desk.peer.frame(ref, block)
    desk.peer.commit(ref)
    result = await landed(task)
    assert_holds(desk.memory, result.prompt.blocks[:NUM_PROMPT_BLOCKS], PROMPT)
    take(desk, result)


async def test_f01_dead_peer_leaves_the_verified_prefix_to_the_next(desk: Desk) -> None:
    task, first = await desk.ask("prefill-0", "prefill-1")
    desk.peer.accept(first)
    for block in (0, 1, 3):
        desk.peer.frame(first, block)
    await asyncio.sleep(0)
    desk.peer.listeners[first].peer_gone(WorkerUnavailable("killed"))
    second = await desk.asked(2)
    await lands_behind_two_blocks(desk, task, second)


async def test_f07_nobody_left_is_local_prefill_where_allowed(desk: Desk) -> None:
    task, ref = await desk.ask(allow_local_prefill=True)
    desk.peer.is_broken = True
    desk.peer.listeners[ref].peer_gone(WorkerUnavailable("killed"))
    assert await asyncio.wait_for(task, WAIT_S) is None
    assert desk.landing is not None
    assert desk.landing.local_reason is not None
    assert "killed" in desk.landing.local_reason.message


async def test_kv39_a_broken_link_is_made_anew_and_the_same_worker_asked_for_the_rest(desk: Desk) -> None:
    task, first = await desk.ask()
    desk.peer.accept(first)
    for block in range(2):
        desk.peer.frame(first, block)
    link = desk.peer.link
    desk.peer.commit(first, to_failure(KvLinkBroken("connection reset")))
    second = await desk.asked(2)
    assert desk.peer.hung_up == [link]
    await lands_behind_two_blocks(desk, task, second)


async def test_kv39_a_link_that_breaks_again_is_not_tried_for_ever(desk: Desk) -> None:
    task, ref = await desk.ask()
    for epoch in (1, 2):
        desk.peer.accept(ref)
        desk.peer.listeners[ref].peer_gone(KvLinkBroken(f"broken {epoch} times"))
        if epoch == 1:
            ref = await desk.asked(2)
    with pytest.raises(KvLinkBroken, match="broken 2 times"):
        await landed(task)


async def test_kv_of_a_failed_commit_is_not_kept(desk: Desk) -> None:
    task, ref = await desk.ask()
    desk.peer.accept(ref)
    for block in range(3):
        desk.peer.frame(ref, block)
    desk.peer.commit(ref, to_failure(EngineFailure("NaN")))
    with pytest.raises(EngineFailure, match="NaN"):
        await landed(task)
    assert desk.pool.census().cached == 0


async def test_kv3_blocks_with_a_frame_half_way_are_not_given_away(desk: Desk) -> None:
    task, ref = await desk.ask()
    desk.peer.accept(ref)
    header = FrameHeader(ref.transfer_id, ref.epoch, 0, 0, 0, LAYOUT.num_layers, 0, 1, LAYOUT.block_bytes, b"d" * 16)
    assert desk.table.open_frame(header) is not None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert desk.landing is not None
    desk.landing.cancel()
    await asyncio.sleep(0.01)
    assert desk.pool.census().owned == NUM_PROMPT_BLOCKS + 1
    assert "cancel" in desk.peer.kinds()
    desk.table.close_frame(header, None)  # the connection broke: this was the last writer
    await desk.settled()


async def test_kv4_kv62_blocks_of_a_writer_that_does_not_end_stay_out_of_use_until_its_session_is_gone() -> None:
    """Fenced, then in quarantine, then its own session is broken: not the one that the next attempt runs over."""
    desk = Desk(ProtocolLimits(accept_s=5.0, idle_s=5.0, drain_s=0.1), num_blocks=4 * NUM_BLOCKS)
    task, ref = await desk.ask("prefill-0", "prefill-1")
    desk.peer.accept(ref)
    header = FrameHeader(ref.transfer_id, ref.epoch, 0, 0, 0, LAYOUT.num_layers, 0, 1, LAYOUT.block_bytes, b"d" * 16)
    assert desk.table.open_frame(header) is not None  # and its writer stands still
    first = desk.peer.link
    assert first is not None
    desk.peer.link = PeerLink(Incarnation("p2"), "shm", "", 1.0, asyncio.Event())
    desk.peer.listeners[ref].peer_gone(WorkerUnavailable("silent"))
    second = await desk.asked(2)
    await until(lambda: desk.peer.hung_up == [first], "the first session is broken")
    assert desk.pool.census().quarantined == NUM_PROMPT_BLOCKS
    desk.peer.accept(second)
    for block in range(NUM_PROMPT_BLOCKS):
        desk.peer.frame(second, block)
    desk.peer.commit(second)
    take(desk, await landed(task))
    assert desk.pool.census().quarantined == NUM_PROMPT_BLOCKS
    desk.table.close_frame(header, None)
    first.silent.set()
    await until(lambda: desk.pool.census().quarantined == 0, "its blocks are free")
    await desk.settled()


async def test_kv54_no_more_tokens_are_called_cached_than_the_prompt_has(desk: Desk) -> None:
    task, ref = await desk.ask()
    desk.peer.accept(ref)
    for block in range(NUM_PROMPT_BLOCKS):
        desk.peer.frame(ref, block)
    desk.peer.commit(ref, cached_tokens=10 * NUM_TOKENS)
    result = await landed(task)
    assert result.prompt.cached_tokens == NUM_TOKENS
    take(desk, result)


async def test_no_more_credit_is_given_than_hello_says() -> None:
    desk = Desk(max_credit_bytes=LAYOUT.block_bytes)
    task, ref = await desk.ask()
    assert desk.peer.sent[0].prefill.credit_bytes == LAYOUT.block_bytes
    desk.peer.accept(ref)
    for block in range(NUM_PROMPT_BLOCKS):
        assert desk.peer.frame(ref, block)
        if block + 1 < NUM_PROMPT_BLOCKS:
            await until(lambda number=block + 1: desk.peer.kinds().count("credit") == number, "paid anew")  # type: ignore[misc]
    desk.peer.commit(ref)
    take(desk, await landed(task))
    granted = [message.credit.bytes for message in desk.peer.sent if message.HasField("credit")]
    assert set(granted) == {LAYOUT.block_bytes}
    await desk.settled()
    desk.memory.close()


async def test_silent_peer_is_given_up(desk: Desk) -> None:
    task, _ = await desk.ask()
    with pytest.raises(KvTransferFailed, match="did not answer"):
        await landed(task)
    assert desk.peer.kinds() == ["prefill", "cancel"]


async def test_kv44_cancelled_between_commit_and_engine_gives_back(desk: Desk) -> None:
    task, ref = await desk.ask()
    desk.peer.accept(ref)
    for block in range(NUM_PROMPT_BLOCKS):
        desk.peer.frame(ref, block)
    desk.peer.commit(ref)
    await landed(task)
    assert desk.landing is not None
    desk.landing.cancel()
    desk.landing.cancel()
