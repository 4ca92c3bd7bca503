"""Thousands of transfers over links that lie: no wrong block is ever accepted, and every block comes back.

What is accepted is compared element by element with the oracle; freed blocks are poisoned, so that whatever a late or
misplaced frame does shows in the next transfer that uses them.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cluster.identity import BlockId, BlockRef, TransferId
from engine.block_pool import BlockPool
from engine.kv_memory import KvMemory
from kv_transfer.endpoints import ReceivingEnds
from kv_transfer.landing_table import Arrived, LandingTable
from kv_transfer.layer_pusher import LayerPusher, PushRequest, PushSession
from kv_transfer.protocol_limits import MAX_RESENDS
from kv_transfer.transport import Sender
from kv_transfer.transports.registry import SENDERS
from tests.kv_transfer.all_transports import TRANSPORTS, needs_library
from tests.kv_transfer.direct_sender import DirectSender
from tests.kv_transfer.faulty_sender import Fault, FaultySender
from tests.kv_transfer.oracle import COSTS, LAYOUT, PushOutcome, assert_holds, make_pools, wait_until, write_layer

NUM_BLOCKS = 10
MAX_PROMPT_BLOCKS = 4
# TANDEM_FAULT_TRANSFERS asks for more, say 10000.
NUM_DIRECT = int(os.environ.get("TANDEM_FAULT_TRANSFERS", "2500"))
NUM_ON_WIRES = max(150, NUM_DIRECT // 20)
Connect = Callable[[LandingTable, KvMemory], Sender]


class FaultyPair:
    """Both ends of a link in one process: a real landing table, block pool and pusher, a sender that lies."""

    def __init__(self, connect: Connect) -> None:
        self.source, self.target = make_pools(NUM_BLOCKS)
        self.table = LandingTable(self.target)
        self.pool = BlockPool(
            NUM_BLOCKS, LAYOUT.block_tokens, "oracle", on_block_freed=lambda block: self.target.poison(block)
        )
        self._connect = connect
        self.counts: Counter[str] = Counter()
        self.reconnect()

    def reconnect(self) -> None:
        self.sender = FaultySender(self._connect(self.table, self.target))
        self.pusher = LayerPusher(self.sender, self.source, COSTS)

    def transfer(self, number: int, fault: Fault, choose: random.Random) -> None:
        """One transfer with one fault, as a decode worker takes it: verify, ask again twice, else give up."""
        num_blocks = choose.randrange(1, MAX_PROMPT_BLOCKS + 1)
        num_tokens = num_blocks * LAYOUT.block_tokens - choose.randrange(LAYOUT.block_tokens)
        source = tuple(BlockRef(BlockId(block), 1) for block in choose.sample(range(NUM_BLOCKS), num_blocks))
        destination = self.pool.allocate(num_blocks)
        assert destination is not None, "blocks leaked"
        transfer_id = TransferId((number + 1).to_bytes(16, "big"))
        self.sender.arm(fault, choose.randrange(2))
        self.table.open(transfer_id, 1, destination, 0, lambda *_: None)
        outcome = PushOutcome()
        session = self.pusher.open(PushRequest(transfer_id, 1, num_tokens, 0, outcome.callbacks()))
        self._prefill(session, source, num_tokens, prompt=number % 1000)
        is_verified = self._receive(session, outcome, transfer_id)
        if is_verified:
            assert_holds(self.target, tuple(destination), number % 1000)
        self.counts["verified" if is_verified else "given up"] += 1
        silent: list[bool] = []
        self.table.fence(transfer_id, 1, lambda: silent.append(True))
        wait_until(lambda: bool(silent), "the fence closes")
        self.pool.release(destination)
        self._finish(session, outcome)

    def _prefill(self, session: PushSession, source: tuple[BlockRef, ...], num_tokens: int, prompt: int) -> None:
        for layer in range(LAYOUT.num_layers):
            write_layer(self.source, source, prompt, layer, 0, len(source))
        session.blocks_allocated(source, 0)
        for start in range(0, num_tokens, 2 * LAYOUT.block_tokens):
            session.chunk_started(start, min(2 * LAYOUT.block_tokens, num_tokens - start))
            for layer in range(LAYOUT.num_layers):
                session.layer_written(layer)
            session.chunk_finished()

    def _receive(self, session: PushSession, outcome: PushOutcome, transfer_id: TransferId) -> bool:
        for num_resends in range(MAX_RESENDS + 1):
            wait_until(
                lambda expected=num_resends + 1: (  # type: ignore[misc]
                    len(outcome.sealed) == expected or bool(outcome.failed) or bool(self.sender.hanging)
                ),
                "sealed, failed or hanging",
            )
            if outcome.failed or self.sender.hanging:
                return False
            commit = outcome.sealed[-1]
            arrived = self._wait_for_frames(transfer_id)
            if not arrived.missing:
                return arrived.root_digest == commit.root_digest
            if num_resends < MAX_RESENDS:
                session.resend(arrived.missing)
        return False

    def _wait_for_frames(self, transfer_id: TransferId) -> Arrived:
        """All of them, or none for a while: a link that drops one keeps its order, so a marker behind it tells."""
        self.sender.arm(Fault.NONE, 0)
        before = self.table.counts()
        probe = self.pusher.open(PushRequest(_MARKER, 1, LAYOUT.block_tokens, 0, PushOutcome().callbacks()))
        probe.blocks_allocated((BlockRef(BlockId(0), 1),), LAYOUT.block_tokens)
        wait_until(lambda: self.table.counts().stale_frames > before.stale_frames, "the marker arrives")
        arrived = self.table.arrived(transfer_id, 1)
        assert arrived is not None
        return arrived

    def _finish(self, session: PushSession, outcome: PushOutcome) -> None:
        """Late frames arrive from now on, when the blocks may be somebody else's; a broken link is made anew."""
        for ticket in self.sender.hanging:
            ticket.done = True
        self.sender.hanging.clear()
        if outcome.failed:
            self.pusher.close()
            self.reconnect()
            return
        self.sender.release_late()
        drained: list[int] = []
        session.cancel(drained.append)
        wait_until(lambda: bool(drained), "drained")


_MARKER = TransferId(b"\xff" * 16)  # of no transfer: whatever carries it is stale
# On a stream a frame that is not as long as it says breaks the connection: `test_transports` has that.
FAULTS = list(Fault)
WHOLE_FRAME_FAULTS = [fault for fault in Fault if fault not in (Fault.CUT, Fault.WRONG_LENGTH)]


def run(pair: FaultyPair, num_transfers: int, faults: Sequence[Fault]) -> None:
    choose = random.Random(2024)
    try:
        for number in range(num_transfers):
            pair.transfer(number, faults[number % len(faults)], choose)
        assert pair.pool.census().free == NUM_BLOCKS
        assert pair.table.counts().live == 0
        assert pair.counts["verified"] > num_transfers // 2
        assert pair.counts["given up"] > 0
        assert pair.table.counts().bad_digests > 0
        for block in range(NUM_BLOCKS):
            assert pair.target.tensor[block].isnan().all(), "a freed block was written"
    finally:
        pair.pusher.close()
        pair.target.close()


def test_f25_kv1_kv75_no_fault_makes_a_wrong_block_count_as_right_or_leaks_one() -> None:
    run(FaultyPair(lambda table, _: DirectSender(table)), NUM_DIRECT, FAULTS)


@pytest.fixture(params=TRANSPORTS)
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    needs_library(request.param)
    ends: list[ReceivingEnds] = []

    def connect_to(table: LandingTable, memory: KvMemory) -> Sender:
        if not ends:
            ends.append(ReceivingEnds([request.param], tmp_path, "d0", table, "127.0.0.1", memory))
        (offer,) = ends[0].offers()
        return SENDERS[request.param](offer.address, ends[0].new_session("p0"), 0)

    yield connect_to
    ends[0].close()


def test_f25_kv3_nor_does_any_over_a_real_link(connect: Connect) -> None:
    run(FaultyPair(connect), NUM_ON_WIRES, WHOLE_FRAME_FAULTS)
