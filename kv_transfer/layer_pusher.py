"""The prefill worker's sending side: cells leave while later layers are still being computed.

    engine thread: PushSession.layer_written ──queue──> sending thread: gather, digest, Sender.push
                   never waits                          one thread for each decode worker

A block's cells of a layer go once the block is full for that layer, the last block's when the prompt ends, a cached
prefix at once. Whole cells, in groups of layers (`layer_groups`). When every cell is posted the session is sealed:
frames, bytes and the root digest are what Commit says. Cancel stops posting; its callback says that nothing of the
session is sent any more.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.errors import KvLinkBroken, KvTransferFailed
from cluster.identity import BlockRef, TransferId
from kv_transfer.coverage import CellCoverage, CellRange
from kv_transfer.frame import root_digest
from kv_transfer.kv_memory import KvMemory
from kv_transfer.layer_groups import LinkCosts, layer_groups
from kv_transfer.push_orders import (
    DESTROY,
    POLL,
    AddCredit,
    Begin,
    Cancel,
    Destroy,
    Order,
    Poll,
    Post,
    Resend,
)
from kv_transfer.shapes import CellGather
from kv_transfer.transport import NO_DIGEST, FrameHeader, Sender, SendTicket

# A frame is small enough for a transport's ring, and large enough that its fixed cost is nothing. A larger cell goes as
# one frame all the same.
MAX_FRAME_BYTES = 1024 * 1024
CLOSE_TIMEOUT_S = 10.0
# How often operations are looked after that a transport completes later.
POLL_INTERVAL_S = 0.0005

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PushSummary:
    """What was sent, as Commit states it."""

    num_frames: int
    num_bytes: int
    root_digest: bytes


@dataclass(frozen=True, slots=True)
class PushCallbacks:
    """Called from the sending thread; must not block."""

    on_sealed: Callable[[PushSummary], None]
    on_failed: Callable[[KvTransferFailed], None]


@dataclass(frozen=True, slots=True)
class PushRequest:
    """What one attempt sends: tokens [have_tokens, num_tokens) of a prompt."""

    transfer_id: TransferId
    epoch: int
    num_tokens: int
    have_tokens: int  # whole blocks that the receiver holds
    callbacks: PushCallbacks
    credit_bytes: int = 0  # 0: as much as there is


class _Pending(NamedTuple):
    cells: CellRange
    blocks: tuple[BlockRef, ...]


class _Sent(NamedTuple):
    cells: CellRange
    ticket: SendTicket
    num_bytes: int


@dataclass(slots=True, eq=False)
class PushSession:
    """One attempt. The engine thread reports what is written; the sending thread owns what is sent.

    Blocks and cells are counted as the receiver counts them; only `_blocks` is the source's own table.
    """

    request: PushRequest
    _pusher: LayerPusher
    _blocks: tuple[BlockRef, ...] = ()
    # Engine thread.
    _num_blocks: int = 0
    _written_blocks: int = 0  # blocks whose cells are posted (or not asked for), from the first on
    _chunk_end_block: int = 0
    _groups: tuple[int, ...] = ()
    _group_ends: frozenset[int] = frozenset()
    _first_layer: int = 0
    # Sending thread.
    _pending: deque[_Pending] = field(default_factory=deque)
    _credit_bytes: int = 0
    _posted_bytes: int = 0
    _num_posted: int = 0
    _sent: CellCoverage | None = None
    _live: dict[int, _Sent] = field(default_factory=dict)  # by seq, without what a resend replaced
    _tickets: list[SendTicket] = field(default_factory=list)
    _on_drained: Callable[[int], None] | None = None
    _is_over: bool = False

    # --- engine thread --------------------------------------------------------------------------------------------

    def blocks_allocated(self, blocks: Sequence[BlockRef], cached_tokens: int) -> None:
        """The prompt's blocks are known; the first `cached_tokens` are valid now and leave at once."""
        layout = self._pusher.target
        is_first = not self._blocks
        self._blocks = tuple(blocks)
        self._num_blocks = -(-self.request.num_tokens // layout.block_tokens)
        if is_first:
            self._written_blocks = self.request.have_tokens // layout.block_tokens
            self._pusher.post(Begin(self, self._written_blocks, self._num_blocks - self._written_blocks))
        # Else the request was preempted and starts again in other blocks: what was sent stays sent, and what is still
        # to be sent of the first round was posted with the blocks of that round.
        cached_blocks = min(cached_tokens // layout.block_tokens, self._num_blocks)
        if cached_blocks > self._written_blocks:
            self._post(0, layout.num_layers, cached_blocks)
            self._written_blocks = cached_blocks

    def chunk_started(self, first_token: int, num_tokens: int) -> None:
        layout = self._pusher.target
        end = first_token + num_tokens
        is_last = end >= self.request.num_tokens
        self._chunk_end_block = self._num_blocks if is_last else end // layout.block_tokens
        num_blocks = max(0, self._chunk_end_block - self._written_blocks)
        self._groups = layer_groups(layout.num_layers, num_blocks * self._pusher.cell_bytes, self._pusher.costs)
        ends, layer = [], -1
        for group in self._groups:
            layer += group
            ends.append(layer)
        self._group_ends = frozenset(ends)
        self._first_layer = 0

    def layer_written(self, layer: int) -> None:
        if layer in self._group_ends and self._chunk_end_block > self._written_blocks:
            self._post(self._first_layer, layer + 1 - self._first_layer, self._chunk_end_block)
            self._first_layer = layer + 1

    def chunk_finished(self) -> None:
        self._written_blocks = max(self._written_blocks, self._chunk_end_block)

    def _post(self, first_layer: int, num_layers: int, end_block: int) -> None:
        cells = CellRange(first_layer, num_layers, self._written_blocks, end_block - self._written_blocks)
        self._pusher.post(Post(self, cells, self._blocks))

    # --- any thread -----------------------------------------------------------------------------------------------

    @property
    def posted_bytes(self) -> int:
        """So far; counted before the receiver can know of them."""
        return self._posted_bytes

    def add_credit(self, num_bytes: int) -> None:
        self._pusher.post(AddCredit(self, num_bytes))

    def resend(self, ranges: Sequence[CellRange]) -> None:
        """Sends these cells again; the session is sealed anew after them. The blocks must still be held."""
        self._pusher.post(Resend(self, tuple(ranges)))

    def cancel(self, on_drained: Callable[[int], None]) -> None:
        """Posts nothing more; calls back with the number of frames once none of them is read any more."""
        self._pusher.post(Cancel(self, on_drained))


class LayerPusher:
    """Owns the connection to one decode worker and the thread that sends on it."""

    def __init__(
        self, sender: Sender, memory: KvMemory, costs: LinkCosts, src_rank: int = 0, gather: CellGather | None = None
    ) -> None:
        """`gather`: the receiver's pool has another shape than `memory`; without it they are alike."""
        self.memory = memory
        self.costs = costs
        self.target = gather.target if gather is not None else memory.layout
        self.cell_bytes = gather.cell_bytes if gather is not None else memory.layout.cell_bytes
        self._gather = gather
        self._sender = sender
        self._src_rank = src_rank
        # Bounded by what the engine holds: a session posts at most layers x chunks orders.
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._live: set[PushSession] = set()  # not over, or with operations that have not ended
        self._failure: KvTransferFailed | None = None
        self._on_broken: Callable[[KvTransferFailed], None] | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-push-{sender.name}", daemon=True)
        self._thread.start()

    def open(self, request: PushRequest) -> PushSession:
        """A session for one attempt. Its callbacks run on the sending thread."""
        return PushSession(request, self, _credit_bytes=request.credit_bytes)

    def post(self, order: Order) -> None:
        self._orders.put(order)

    def tell_when_broken(self, on_broken: Callable[[KvTransferFailed], None]) -> None:
        """From the sending thread, once: nothing can be sent on this connection any more."""
        self._on_broken = on_broken

    def destroy(self) -> None:
        """Breaks the connection off: whatever is posted on it ends, and every session fails."""
        self._orders.put(DESTROY)

    def close(self) -> None:
        """Ends the thread after what was ordered before, and the connection with it."""
        self._orders.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._sender.close()

    # --- sending thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            is_waiting = any(session._tickets for session in self._live)
            try:
                order = self._orders.get(timeout=POLL_INTERVAL_S if is_waiting else None)
            except queue.Empty:
                order = POLL
            if order is None:
                return
            try:
                if isinstance(order, Poll):
                    self._sender.poll()
                elif isinstance(order, Destroy):
                    raise KvTransferFailed("the endpoint was destroyed", stage="transfer")
                else:
                    self._obey(order)
            except KvTransferFailed as error:
                self._fail_all(error)
            except Exception as error:  # of a library, or a fault here: nobody may wait for a thread that has ended
                _log.exception("the sending thread of %s failed", self._sender.name)
                self._fail_all(
                    KvTransferFailed(f"sending over {self._sender.name} failed: {error!r}", stage="transfer")
                )
            for session in tuple(self._live):
                self._settle(session)

    def _obey(self, order: Begin | Post | AddCredit | Resend | Cancel) -> None:
        session = order.session
        self._live.add(session)
        if isinstance(order, Cancel):
            session._is_over = True
            session._pending.clear()
            session._on_drained = order.on_drained
            return
        if session._on_drained is not None:
            return
        if self._failure is not None:
            self._fail(session, self._failure)
            return
        if isinstance(order, Begin):
            session._sent = CellCoverage(self.target.num_layers, order.first_block, order.num_blocks)
        elif isinstance(order, Post):
            session._pending.append(_Pending(order.cells, order.blocks))
        elif isinstance(order, AddCredit):
            session._credit_bytes += order.num_bytes
        else:
            self._prepare_resend(session, order.ranges)
        self._pump(session)

    def _prepare_resend(self, session: PushSession, ranges: Sequence[CellRange]) -> None:
        """Frames whose cells go again do not count any more; every layer is written, in the latest blocks."""
        session._is_over = False
        session._live = {
            seq: sent for seq, sent in session._live.items() if not any(sent.cells.overlaps(again) for again in ranges)
        }
        session._pending.extend(_Pending(cells, session._blocks) for cells in ranges)

    def _pump(self, session: PushSession) -> None:
        """Posts what is pending while there is credit for at least a cell of it."""
        is_limited = session.request.credit_bytes > 0
        while session._pending:
            cells, blocks = session._pending[0]
            num_cells = max(1, MAX_FRAME_BYTES // self.cell_bytes)
            if is_limited:
                num_cells = min(num_cells, (session._credit_bytes - session._posted_bytes) // self.cell_bytes)
            if num_cells < 1:
                return
            part, rest = cells.split_off(num_cells)
            session._pending.popleft()
            session._pending.extendleft(_Pending(left, blocks) for left in reversed(rest))
            self._send(session, part, blocks)

    def _send(self, session: PushSession, cells: CellRange, blocks: tuple[BlockRef, ...]) -> None:
        payload = self._payload(cells, blocks)
        heads = self._gather.target_heads if self._gather is not None else None
        header = FrameHeader(
            transfer_id=session.request.transfer_id,
            epoch=session.request.epoch,
            src_rank=self._src_rank,
            seq=session._num_posted,
            first_layer=cells.first_layer,
            num_layers=cells.num_layers,
            first_block=cells.first_block,
            num_blocks=cells.num_blocks,
            num_bytes=cells.num_cells * self.cell_bytes,
            digest=NO_DIGEST,
            first_head=heads.first if heads is not None else 0,
            num_heads=heads.count if heads is not None else 0,
        )
        session._posted_bytes += header.num_bytes
        ticket = self._sender.push(header, payload)
        session._live[header.seq] = _Sent(cells, ticket, header.num_bytes)
        session._num_posted += 1
        if not ticket.done:
            session._tickets.append(ticket)
        if session._sent is not None:
            session._sent.mark(cells)

    def _payload(self, cells: CellRange, blocks: tuple[BlockRef, ...]) -> Sequence[memoryview]:
        if self._gather is not None:
            return [self._gather.gather(blocks, cells)]
        wanted = blocks[cells.first_block : cells.first_block + cells.num_blocks]
        return self.memory.runs([ref.block for ref in wanted], cells.first_layer, cells.num_layers)

    def _settle(self, session: PushSession) -> None:
        """Takes off what has ended; then the session may be sealed, or drained after its cancel."""
        failed = next((ticket.error for ticket in session._tickets if ticket.done and ticket.error), "")
        session._tickets = [ticket for ticket in session._tickets if not ticket.done]
        if failed:
            self._fail(session, KvTransferFailed(failed, stage="transfer"))
        if session._tickets:
            return
        if session._on_drained is not None:
            self._live.discard(session)
            session._on_drained(session._num_posted)
        elif session._is_over:
            self._live.discard(session)
        elif session._sent is not None and session._sent.is_complete and not session._pending:
            session._is_over = True
            self._live.discard(session)
            session.request.callbacks.on_sealed(_summary(session._live))

    def _fail_all(self, error: KvTransferFailed) -> None:
        """The connection is closed for every session: nothing that was posted on it can still be read or written."""
        is_news = self._failure is None
        error = KvLinkBroken(error.message, stage=error.stage)
        self._failure = error
        self._sender.close()
        for session in self._live:
            session._tickets = []
            self._fail(session, error)
        if is_news and self._on_broken is not None:
            self._on_broken(error)

    def _fail(self, session: PushSession, error: KvTransferFailed) -> None:
        if not session._is_over:
            session._is_over = True
            session._pending.clear()
            _log.warning("push failed: %s", error.message)
            session.request.callbacks.on_failed(error)


def _summary(live: dict[int, _Sent]) -> PushSummary:
    sent = [live[seq] for seq in sorted(live)]
    return PushSummary(len(sent), sum(one.num_bytes for one in sent), root_digest([one.ticket.digest for one in sent]))
