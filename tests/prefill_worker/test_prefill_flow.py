"""One attempt on its prefill worker: an engine that the test steps, a real pusher and pool, a link made of a list."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from tandem.v1 import handoff_pb2

from cluster.errors import KvTransferFailed
from cluster.identity import BlockId, BlockRef, RequestId, new_transfer_id
from cluster.sampling_params import SamplingParams
from engine.block_pool import BlockPool
from engine.kv_memory import KvMemory
from engine.request import EngineRequest, FinishReason, SequenceOutput
from kv_transfer.frame import root_digest, with_digest
from kv_transfer.layer_groups import LinkCosts
from kv_transfer.layer_pusher import LayerPusher
from kv_transfer.prefill_transfer import ENDED
from kv_transfer.protocol_limits import ProtocolLimits
from kv_transfer.transfer_ref import TransferRef
from kv_transfer.transport import CancelGuarantee, FrameHeader, Posted
from prefill_worker.prefill_check import CheckedPrefill
from prefill_worker.prefill_flow import FlowResources, PrefillFlow
from tests.kv_transfer.oracle import LAYOUT

NUM_BLOCKS = 16
NUM_TOKENS = 40
WAIT_S = 60.0


class ListSender:
    """Keeps what was pushed; `gate` holds the sending thread up."""

    name = "list"
    cancel_guarantee = CancelGuarantee.FENCED

    def __init__(self) -> None:
        self.headers: list[FrameHeader] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_broken = False

    def push(self, header: FrameHeader, payload: Sequence[memoryview]) -> Posted:
        self.gate.wait(WAIT_S)
        if self.is_broken:
            raise KvTransferFailed("the link broke", stage="transfer")
        header = with_digest(header, payload)
        self.headers.append(header)
        return Posted(header.digest)

    def poll(self) -> None:
        return

    def count_verified(self) -> int:
        raise NotImplementedError("nobody measures a link without a wire")

    def close(self) -> None:
        return


class StepEngine:
    """An engine whose one step the test runs: allocates, writes each layer, gives the first token, holds the blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.request: EngineRequest | None = None
        self.held: list[BlockRef] = []
        self.on_output: Callable[[SequenceOutput], object] = lambda output: None

    def submit(self, request: EngineRequest) -> None:
        self.request = request

    def run(self) -> None:
        self.begin()
        self.finish()

    def begin(self) -> None:
        """The first layer."""
        request = self._taken()
        listener = request.kv_listener
        assert listener is not None
        num_tokens = len(request.token_ids)
        allocated = self._pool.allocate(-(-num_tokens // LAYOUT.block_tokens))
        assert allocated is not None
        self.held = allocated
        listener.blocks_allocated(self.held, 0)
        listener.chunk_started(0, num_tokens)
        listener.layer_written(0)

    def finish(self) -> None:
        request = self._taken()
        assert request.kv_listener is not None
        for layer in range(1, LAYOUT.num_layers):
            request.kv_listener.layer_written(layer)
        request.kv_listener.chunk_finished()
        self.on_output(
            SequenceOutput(
                request.request_id,
                (7,),
                finish_reason=FinishReason.LENGTH,
                queued_s=0.25,
                compute_s=0.5,
                cached_tokens=0,
            )
        )

    def cancel(self, request_id: RequestId) -> None:
        if self.request is not None and not self.held:
            self.request = None
            self.on_output(SequenceOutput(request_id, (), finish_reason=FinishReason.CANCELLED))

    def release(self, request_id: RequestId) -> None:
        held, self.held = self.held, []
        if held:
            self._pool.release(held)

    def _taken(self) -> EngineRequest:
        assert self.request is not None
        return self.request


@dataclass
class Link:
    """The way back to D."""

    pusher: LayerPusher
    sent: list[handoff_pb2.PrefillToDecode] = field(default_factory=list)

    def send(self, message: handoff_pb2.PrefillToDecode) -> None:
        self.sent.append(message)

    def hang_up(self, reason: str) -> None:
        raise AssertionError(reason)

    def kinds(self) -> list[str | None]:
        return [message.WhichOneof("message") for message in self.sent]


class Desk:
    def __init__(self, deadline_s: float = 60.0, idle_s: float = 5.0) -> None:
        self.memory = KvMemory(LAYOUT, NUM_BLOCKS)
        self.pool = BlockPool(NUM_BLOCKS, LAYOUT.block_tokens, "test")
        self.sender = ListSender()
        self.link = Link(LayerPusher(self.sender, self.memory, LinkCosts(1e9, 1e-5)))
        self.engine = StepEngine(self.pool)
        self.ref = TransferRef(new_transfer_id(), 1)
        checked = CheckedPrefill(
            token_ids=np.arange(NUM_TOKENS, dtype=np.int32),
            sampling=SamplingParams(max_tokens=8),
            have_tokens=16,
            destination=tuple(BlockRef(BlockId(index), 0) for index in range(2)),
            num_generated=0,
            priority=0,
            deadline_s=deadline_s,
            idle_s=idle_s,
            credit_bytes=2 * LAYOUT.block_bytes,
            max_credit_bytes=2 * LAYOUT.block_bytes,
            scope_key=b"",
        )
        resources = FlowResources(self.engine, self.pool, LAYOUT.num_layers)  # type: ignore[arg-type]
        self.flow = PrefillFlow(self.ref, checked, self.link, resources)
        loop = asyncio.get_running_loop()
        self.engine.on_output = lambda output: loop.call_soon(self.flow.on_output, output)
        self.has_ended = False

    def start(self) -> None:
        def ended() -> None:
            self.has_ended = True

        self.flow.start(ended)

    async def hear(self, kind: str) -> handoff_pb2.PrefillToDecode:
        """The next message of this kind, once it was sent."""
        deadline = time.monotonic() + WAIT_S
        while kind not in self.link.kinds():
            assert time.monotonic() < deadline, f"no {kind} among {self.link.kinds()}"
            await asyncio.sleep(0.002)
        return self.link.sent.pop(self.link.kinds().index(kind))

    def tell(self, **message: object) -> None:
        self.flow.on_message(handoff_pb2.DecodeToPrefill(**message))  # type: ignore[arg-type]

    def acknowledge(self) -> None:
        ack = handoff_pb2.CommitAck(key=self.ref.to_message(), outcome=handoff_pb2.COMMIT_OUTCOME_OK)
        self.tell(commit_ack=ack)

    async def ended(self) -> None:
        await asyncio.wait_for(self.flow.wait_until_ended(), WAIT_S)
        await asyncio.sleep(0)
        assert self.has_ended
        assert self.flow.phase in ENDED
        census = self.pool.census()
        assert (census.free, census.conservation_error) == (NUM_BLOCKS, 0)


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    desk.sender.gate.set()
    desk.link.pusher.close()
    desk.memory.close()


async def test_commit_says_what_was_sent_and_kv7_ack_gives_the_blocks_back(desk: Desk) -> None:
    desk.start()
    await desk.hear("accept")
    desk.engine.run()
    commit = (await desk.hear("commit")).commit
    assert (commit.first_token_id, commit.queued_us, commit.compute_us) == (7, 250_000, 500_000)
    assert commit.num_frames == len(desk.sender.headers)
    assert commit.num_bytes == 2 * LAYOUT.block_bytes  # the first block is with D already
    assert commit.root_digest == root_digest([header.digest for header in desk.sender.headers])
    assert desk.pool.census().owned == 3
    desk.acknowledge()
    await desk.ended()
    assert "drained" not in desk.link.kinds()


async def test_asked_ranges_are_sent_again_and_committed_anew(desk: Desk) -> None:
    desk.start()
    desk.engine.run()
    first = (await desk.hear("commit")).commit
    key = desk.ref.to_message()
    part = handoff_pb2.Range(first_layer=2, num_layers=1, first_token=32, num_tokens=8)
    desk.tell(credit=handoff_pb2.Credit(key=key, bytes=LAYOUT.cell_bytes))
    desk.tell(resend=handoff_pb2.Resend(key=key, ranges=[part], tries_left=1))
    second = (await desk.hear("commit")).commit
    # A frame that goes again counts once: what it replaces is no part of the commit any more.
    assert (second.num_frames, second.num_resends) == (first.num_frames, 1)
    last = desk.sender.headers[-1]
    assert (last.first_layer, last.num_layers, last.first_block, last.num_blocks) == (2, 1, 2, 1)
    desk.acknowledge()
    await desk.ended()


async def test_s_b27_range_of_another_transfer_ends_the_attempt(desk: Desk) -> None:
    desk.start()
    desk.engine.run()
    await desk.hear("commit")
    outside = handoff_pb2.Range(first_layer=0, num_layers=1, first_token=0, num_tokens=16)
    desk.tell(resend=handoff_pb2.Resend(key=desk.ref.to_message(), ranges=[outside], tries_left=1))
    assert "not of this attempt" in (await desk.hear("commit")).commit.failure.message
    await desk.ended()


async def test_cancel_before_it_runs_never_posts(desk: Desk) -> None:
    desk.start()
    desk.tell(cancel=handoff_pb2.CancelTransfer(key=desk.ref.to_message(), reason="gone"))
    drained = (await desk.hear("drained")).drained
    assert drained.outcome == handoff_pb2.DRAIN_OUTCOME_NEVER_POSTED
    await desk.ended()
    assert desk.sender.headers == []


async def test_kv59_kv60_s_b53_blocks_stay_pinned_until_no_push_reads_them(desk: Desk) -> None:
    desk.sender.gate.clear()
    desk.start()
    desk.engine.run()
    desk.tell(cancel=handoff_pb2.CancelTransfer(key=desk.ref.to_message(), reason="gone"))
    await asyncio.sleep(0.02)
    assert desk.pool.census().owned == 3
    assert not desk.has_ended
    desk.sender.gate.set()
    await desk.hear("drained")
    await desk.ended()


async def test_kv4_dead_decode_worker_releases_everything(desk: Desk) -> None:
    desk.start()
    desk.engine.run()
    await desk.hear("commit")
    desk.flow.peer_gone()
    desk.flow.peer_gone()
    await desk.ended()


async def test_broken_link_is_a_failed_commit(desk: Desk) -> None:
    desk.sender.is_broken = True
    desk.start()
    desk.engine.run()
    failure = (await desk.hear("commit")).commit.failure
    assert (failure.code, failure.retryable) == ("kv_link_broken", True)
    await desk.ended()


async def test_engine_failure_is_a_failed_commit(desk: Desk) -> None:
    desk.start()
    engine_id = desk.flow.engine_id
    desk.engine.request = None
    desk.flow.on_output(SequenceOutput(engine_id, (), finish_reason=FinishReason.ERROR, error="NaN"))
    assert "NaN" in (await desk.hear("commit")).commit.failure.message
    await desk.ended()


async def test_progress_says_how_many_layers_and_tokens_are_done() -> None:
    desk = Desk(idle_s=0.06)
    desk.start()
    desk.engine.begin()
    desk.link.sent.clear()
    progress = (await desk.hear("progress")).progress
    assert (progress.layers_done, progress.tokens_done) == (1, 0)
    desk.engine.finish()
    assert (desk.flow.source.layers_done, desk.flow.source.tokens_done) == (0, NUM_TOKENS)
    await desk.hear("commit")
    desk.acknowledge()
    await desk.ended()
    desk.link.pusher.close()
    desk.memory.close()


async def test_kv8_long_queue_is_told_as_progress_and_well_within_the_peers_idle_time(desk: Desk) -> None:
    assert ProtocolLimits().for_peer_idle(0.3).progress_s == pytest.approx(0.1)
    assert ProtocolLimits().for_peer_idle(60).progress_s == ProtocolLimits().progress_s
    desk.start()
    await desk.hear("progress")
    desk.engine.run()
    await desk.hear("commit")
    desk.acknowledge()
    await desk.ended()


async def test_invariant_4_deadline_ends_the_attempt() -> None:
    desk = Desk(deadline_s=0.05)
    desk.start()
    assert (await desk.hear("commit")).commit.failure.code == "deadline_exceeded"
    await desk.ended()
    desk.link.pusher.close()
    desk.memory.close()
