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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cluster.errors import KvTransferFailed
from cluster.identity import BlockRef, TransferId
from kv_transfer.coverage import CellCoverage, CellRange
from kv_transfer.frame import digest_of, root_digest
from kv_transfer.kv_memory import KvMemory
from kv_transfer.layer_groups import LinkCosts, layer_groups
from kv_transfer.transport import FrameHeader, Sender

# A frame is small enough for a transport's ring, and large enough that its fixed cost is nothing.
MAX_FRAME_BYTES = 4 * 1024 * 1024
CLOSE_TIMEOUT_S = 10.0

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


@dataclass(slots=True)
class PushSession:
    """One attempt. The engine thread reports what is written; the sending thread owns what is sent."""

    request: PushRequest
    _pusher: LayerPusher
    _blocks: tuple[BlockRef, ...] = ()
    # Engine thread.
    _written_blocks: int = 0  # blocks whose cells are posted (or not asked for), from the first on
    _chunk_end_block: int = 0
    _groups: tuple[int, ...] = ()
    _group_ends: frozenset[int] = frozenset()
    _first_layer: int = 0
    # Sending thread.
    _pending: deque[CellRange] = field(default_factory=deque)
    _credit_bytes: int = 0
    _num_bytes: int = 0
    _sent: CellCoverage | None = None
    _digests: list[bytes] = field(default_factory=list)
    _is_cancelled: bool = False
    _is_over: bool = False

    # --- engine thread --------------------------------------------------------------------------------------------

    def blocks_allocated(self, blocks: Sequence[BlockRef], cached_tokens: int) -> None:
        """The prompt's blocks are known; the first `cached_tokens` are valid now and leave at once."""
        layout = self._pusher.memory.layout
        is_first = not self._blocks
        self._blocks = tuple(blocks[: -(-self.request.num_tokens // layout.block_tokens)])
        if is_first:
            self._written_blocks = self.request.have_tokens // layout.block_tokens
            self._pusher.post(_Begin(self, self._written_blocks, len(self._blocks) - self._written_blocks))
        # Else the request was preempted and starts again in other blocks: what was sent stays sent.
        cached_blocks = min(cached_tokens // layout.block_tokens, len(self._blocks))
        if cached_blocks > self._written_blocks:
            self._post(0, layout.num_layers, cached_blocks)
            self._written_blocks = cached_blocks

    def chunk_started(self, first_token: int, num_tokens: int) -> None:
        layout = self._pusher.memory.layout
        end = first_token + num_tokens
        is_last = end >= self.request.num_tokens
        self._chunk_end_block = len(self._blocks) if is_last else end // layout.block_tokens
        num_blocks = max(0, self._chunk_end_block - self._written_blocks)
        self._groups = layer_groups(
            layout.num_layers, num_blocks * layout.cell_bytes, self.request.num_tokens, self._pusher.costs
        )
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
        self._pusher.post(_Post(self, cells))

    # --- any thread -----------------------------------------------------------------------------------------------

    def add_credit(self, num_bytes: int) -> None:
        self._pusher.post(_AddCredit(self, num_bytes))

    def resend(self, ranges: Sequence[CellRange]) -> None:
        """Sends these cells again; the session is sealed anew after them. The blocks must still be held."""
        self._pusher.post(_Resend(self, tuple(ranges)))

    def cancel(self, on_drained: Callable[[int], None]) -> None:
        """Posts nothing more; calls back with the number of frames once none of them is read any more."""
        self._pusher.post(_Cancel(self, on_drained))


@dataclass(frozen=True, slots=True)
class _Begin:
    session: PushSession
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Post:
    session: PushSession
    cells: CellRange


@dataclass(frozen=True, slots=True)
class _AddCredit:
    session: PushSession
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Resend:
    session: PushSession
    ranges: tuple[CellRange, ...]


@dataclass(frozen=True, slots=True)
class _Cancel:
    session: PushSession
    on_drained: Callable[[int], None]


_Order = _Begin | _Post | _AddCredit | _Resend | _Cancel


class LayerPusher:
    """Owns the connection to one decode worker and the thread that sends on it."""

    def __init__(self, sender: Sender, memory: KvMemory, costs: LinkCosts, src_rank: int = 0) -> None:
        self.memory = memory
        self.costs = costs
        self._sender = sender
        self._src_rank = src_rank
        # Bounded by what the engine holds: a session posts at most layers x chunks orders.
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._sessions: set[int] = set()
        self._failure: KvTransferFailed | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-push-{sender.name}", daemon=True)
        self._thread.start()

    def open(self, request: PushRequest) -> PushSession:
        """A session for one attempt. Its callbacks run on the sending thread."""
        return PushSession(request, self, _credit_bytes=request.credit_bytes)

    def post(self, order: _Order) -> None:
        self._orders.put(order)

    def close(self) -> None:
        """Ends the thread after what was ordered before, and the connection with it."""
        self._orders.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._sender.close()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._obey(order)
            except KvTransferFailed as error:
                self._failure = error
                self._fail(order.session, error)

    def _obey(self, order: _Order) -> None:
        session = order.session
        if isinstance(order, _Cancel):
            session._is_cancelled = session._is_over = True
            session._pending.clear()
            order.on_drained(len(session._digests))
            return
        if session._is_cancelled:
            return
        if self._failure is not None:
            self._fail(session, self._failure)
            return
        if isinstance(order, _Begin):
            session._sent = CellCoverage(self.memory.layout.num_layers, order.first_block, order.num_blocks)
        elif isinstance(order, _Post):
            session._pending.append(order.cells)
        elif isinstance(order, _AddCredit):
            session._credit_bytes += order.num_bytes
        else:
            session._is_over = False
            session._pending.extend(order.ranges)
        self._pump(session)

    def _pump(self, session: PushSession) -> None:
        """Sends what is pending while there is credit; seals the session with its last cell."""
        while session._pending:
            cells = session._pending[0]
            frames = list(_frames(cells, self.memory.layout.cell_bytes))
            num_bytes = cells.num_layers * cells.num_blocks * self.memory.layout.cell_bytes
            is_limited = session.request.credit_bytes > 0
            if is_limited and session._num_bytes + num_bytes > session._credit_bytes:
                return
            session._pending.popleft()
            for part in frames:
                self._send(session, part)
        if session._sent is not None and session._sent.is_complete and not session._is_over:
            session._is_over = True
            session.request.callbacks.on_sealed(
                PushSummary(len(session._digests), session._num_bytes, root_digest(session._digests))
            )

    def _send(self, session: PushSession, cells: CellRange) -> None:
        blocks = session._blocks[cells.first_block : cells.first_block + cells.num_blocks]
        payload = [self.memory.run(ref.block, cells.first_layer, cells.num_layers) for ref in blocks]
        num_bytes = sum(run.nbytes for run in payload)
        header = FrameHeader(
            session.request.transfer_id,
            session.request.epoch,
            self._src_rank,
            len(session._digests),
            cells.first_layer,
            cells.num_layers,
            cells.first_block,
            cells.num_blocks,
            num_bytes,
            digest_of(payload),
        )
        self._sender.push(header, payload)
        session._digests.append(header.digest)
        session._num_bytes += num_bytes
        if session._sent is not None:
            session._sent.mark(cells)

    def _fail(self, session: PushSession, error: KvTransferFailed) -> None:
        if not session._is_over:
            session._is_over = True
            session._pending.clear()
            _log.warning("push failed: %s", error.message)
            session.request.callbacks.on_failed(error)


def _frames(cells: CellRange, cell_bytes: int) -> Iterator[CellRange]:
    """The range in parts that fit into a frame: by blocks, and by layers where one block is too much already."""
    layers = max(1, min(cells.num_layers, MAX_FRAME_BYTES // cell_bytes))
    blocks = max(1, MAX_FRAME_BYTES // (layers * cell_bytes))
    for layer in range(cells.first_layer, cells.first_layer + cells.num_layers, layers):
        num_layers = min(layers, cells.first_layer + cells.num_layers - layer)
        for block in range(cells.first_block, cells.first_block + cells.num_blocks, blocks):
            yield CellRange(layer, num_layers, block, min(blocks, cells.first_block + cells.num_blocks - block))
