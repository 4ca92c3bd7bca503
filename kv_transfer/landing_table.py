"""Where frames may land: the decode worker's gate between a transport's thread and the KV pool.

    OPEN ──fence──> FENCED ──last frame closed──> silent (its callback runs, the entry is gone)

A frame is let in while its (transfer, epoch) is OPEN, its cells lie in what was reserved, and none of them has verified
before; everything else is refused, drained by the transport and counted. Once `fence` has called back, no byte of that
attempt can reach a block: that is when its blocks may be given to somebody else.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.identity import BlockRef, TransferId
from kv_transfer.coverage import CellCoverage, CellRange
from kv_transfer.frame import root_digest
from kv_transfer.kv_memory import CellWrite, KvMemory
from kv_transfer.shapes import HeadRange
from kv_transfer.transport import FrameHeader

EMPTY_ROOT = root_digest([])

# Called from a transport's thread after each frame of a transfer: (transfer, epoch).
FrameListener = Callable[[TransferId, int], None]
# Called from a transport's thread when a connection has ended: (peer, reason).
PeerListener = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class LandingProgress:
    """How far one attempt is, without looking at its cells."""

    num_verified_frames: int
    num_bad_frames: int
    num_bytes: int  # of both


@dataclass(frozen=True, slots=True)
class Arrived:
    """What came in for one attempt. All but the counts of frames and bytes speaks of what verified."""

    is_complete: bool
    missing: tuple[CellRange, ...]
    num_frames: int
    num_bad_frames: int  # among them: their digest differs
    num_bytes: int
    root_digests: dict[int, bytes]  # of each rank that sent anything
    num_complete_blocks: int

    @property
    def root_digest(self) -> bytes:
        """Of the only rank."""
        return self.root_digests.get(0, EMPTY_ROOT)


@dataclass(frozen=True, slots=True)
class LandingCounts:
    """Since the start, over all transfers."""

    frames: int
    num_bytes: int
    stale_frames: int
    bad_digests: int
    refused_frames: int
    live: int


@dataclass(slots=True)
class _Landing:
    destination: tuple[BlockRef, ...]
    first_block: int
    coverage: dict[HeadRange, CellCoverage]  # of each range of heads that one rank sends
    on_frame: FrameListener
    is_fenced: bool = False
    pins: int = 0
    on_silent: Callable[[], None] | None = None
    writes: dict[tuple[int, int], CellWrite] = field(default_factory=dict)  # by (rank, seq): whole cells on their way
    digests: dict[tuple[int, int], bytes] = field(default_factory=dict)  # by (rank, seq): what verified
    num_bad_frames: int = 0
    num_bytes: int = 0


class LandingTable:
    """Implements `kv_transfer.transport.FrameSink`. Safe to call from any thread; no call waits for a transport."""

    def __init__(self, memory: KvMemory, on_peer_gone: PeerListener | None = None) -> None:
        self._memory = memory
        self._on_peer_gone = on_peer_gone
        self._landings: dict[tuple[TransferId, int], _Landing] = {}
        self._lock = threading.Lock()
        self._all_heads = HeadRange(0, memory.layout.num_kv_heads)
        self._frames = self._num_bytes = self._stale = self._bad = self._refused = 0

    # --- the coordinator's side -----------------------------------------------------------------------------------

    def open(
        self,
        transfer_id: TransferId,
        epoch: int,
        destination: Sequence[BlockRef],
        first_block: int,
        on_frame: FrameListener,
        head_parts: Sequence[HeadRange] = (),
    ) -> None:
        """Lets frames in for blocks [first_block, first_block + len(destination)) of the prompt.

        `head_parts`: which ranges of heads come from different ranks; none: all heads from one.
        """
        parts = head_parts or (self._all_heads,)
        num_layers = self._memory.layout.num_layers
        coverage = {part: CellCoverage(num_layers, first_block, len(destination)) for part in parts}
        with self._lock:
            if (transfer_id, epoch) in self._landings:
                raise ValueError("this attempt is open already")
            self._landings[transfer_id, epoch] = _Landing(tuple(destination), first_block, coverage, on_frame)

    def arrived(self, transfer_id: TransferId, epoch: int) -> Arrived | None:
        """What has verified so far; None when the attempt is not open."""
        with self._lock:
            landing = self._landings.get((transfer_id, epoch))
            if landing is None:
                return None
            ranks = sorted({rank for rank, _ in landing.digests})
            return Arrived(
                is_complete=all(coverage.is_complete for coverage in landing.coverage.values()),
                missing=tuple(cells for coverage in landing.coverage.values() for cells in coverage.missing()),
                num_frames=len(landing.digests) + landing.num_bad_frames,
                num_bad_frames=landing.num_bad_frames,
                num_bytes=landing.num_bytes,
                root_digests={rank: _root_of_rank(landing.digests, rank) for rank in ranks},
                num_complete_blocks=min(coverage.num_complete_blocks() for coverage in landing.coverage.values()),
            )

    def progress(self, transfer_id: TransferId, epoch: int) -> LandingProgress | None:
        """The same counts at the cost of a look-up: good for every frame."""
        with self._lock:
            landing = self._landings.get((transfer_id, epoch))
            if landing is None:
                return None
            return LandingProgress(len(landing.digests), landing.num_bad_frames, landing.num_bytes)

    def fence(self, transfer_id: TransferId, epoch: int, on_silent: Callable[[], None]) -> None:
        """Refuses all further frames; calls back (here, or from a transport's thread) once none can land any more."""
        with self._lock:
            landing = self._landings.get((transfer_id, epoch))
            if landing is not None:
                landing.is_fenced = True
                if landing.pins > 0:
                    landing.on_silent = on_silent
                    return
                del self._landings[transfer_id, epoch]
        on_silent()

    def counts(self) -> LandingCounts:
        with self._lock:
            return LandingCounts(
                self._frames, self._num_bytes, self._stale, self._bad, self._refused, len(self._landings)
            )

    # --- the transport's side -------------------------------------------------------------------------------------

    def open_frame(self, header: FrameHeader) -> Sequence[memoryview] | None:
        """Where the payload goes, block by block; None: drain and drop it."""
        heads = self._heads(header)
        with self._lock:
            landing = self._landings.get((header.transfer_id, header.epoch))
            if landing is None or landing.is_fenced:
                self._stale += 1
                return None
            if not self._may_land(landing, header, heads):
                self._refused += 1
                return None
            landing.pins += 1
            first = header.first_block - landing.first_block
            blocks = landing.destination[first : first + header.num_blocks]
            if heads == self._all_heads:
                write = self._memory.begin_write([ref.block for ref in blocks], header.first_layer, header.num_layers)
                landing.writes[header.src_rank, header.seq] = write
                return write.runs
        layers = range(header.first_layer, header.first_layer + header.num_layers)
        return [run for ref in blocks for layer in layers for run in self._head_runs(ref, layer, heads)]

    def close_frame(self, header: FrameHeader, arrived_digest: bytes | None) -> None:
        """The payload is in place with this digest, or (None) the connection broke in the middle of it."""
        is_right = arrived_digest is not None and hmac.compare_digest(arrived_digest, header.digest)
        self._finish_write(header, is_right=is_right)
        on_silent = on_frame = None
        with self._lock:
            landing = self._landings[header.transfer_id, header.epoch]
            landing.pins -= 1
            if landing.is_fenced:
                if landing.pins == 0:
                    del self._landings[header.transfer_id, header.epoch]
                    on_silent = landing.on_silent
            elif arrived_digest is not None:
                on_frame = landing.on_frame
                self._frames += 1
                self._num_bytes += header.num_bytes
                landing.num_bytes += header.num_bytes
                # The root is over what verified: a frame that was lost or spoilt leaves it on both sides when its
                # cells are sent again.
                if is_right:
                    landing.digests[header.src_rank, header.seq] = header.digest
                    landing.coverage[self._heads(header)].mark(_cells(header))
                else:
                    landing.num_bad_frames += 1
                    self._bad += 1
        if on_silent is not None:
            on_silent()
        if on_frame is not None:
            on_frame(header.transfer_id, header.epoch)

    def _finish_write(self, header: FrameHeader, *, is_right: bool) -> None:
        """Brings verified bytes into the pool: outside the lock, as it may copy. The frame's pin holds its blocks."""
        with self._lock:
            landing = self._landings[header.transfer_id, header.epoch]
            write = landing.writes.pop((header.src_rank, header.seq), None)
            is_wanted = is_right and not landing.is_fenced
        if write is not None and is_wanted:
            write.finish()

    def peer_gone(self, peer: str, reason: str) -> None:
        """A connection ended. What it left unfinished is in the coverage; whose attempts they were its owner knows."""
        if self._on_peer_gone is not None:
            self._on_peer_gone(peer, reason)

    # --- shapes ---------------------------------------------------------------------------------------------------

    def _heads(self, header: FrameHeader) -> HeadRange:
        return HeadRange(header.first_head, header.num_heads) if header.num_heads else self._all_heads

    def _may_land(self, landing: _Landing, header: FrameHeader, heads: HeadRange) -> bool:
        """A cell that has verified is never written again, nor a frame received twice at once: a duplicate spoils
        nothing."""
        coverage = landing.coverage.get(heads)
        cells = _cells(header)
        num_cells = header.num_layers * header.num_blocks
        return (
            coverage is not None
            and header.num_bytes == num_cells * self._memory.layout.head_bytes * 2 * heads.count
            and coverage.contains(cells)
            and not coverage.any_covered(cells)
            and (header.src_rank, header.seq) not in landing.digests
            and (header.src_rank, header.seq) not in landing.writes
        )

    def _head_runs(self, ref: BlockRef, layer: int, heads: HeadRange) -> tuple[memoryview, memoryview]:
        """The bytes of some heads' keys, and of their values."""
        cell = self._memory.run(ref.block, layer, 1)
        head_bytes, half = self._memory.layout.head_bytes, self._memory.layout.cell_bytes // 2
        start, end = heads.first * head_bytes, (heads.first + heads.count) * head_bytes
        return cell[start:end], cell[half + start : half + end]


def _cells(header: FrameHeader) -> CellRange:
    return CellRange(header.first_layer, header.num_layers, header.first_block, header.num_blocks)


def _root_of_rank(digests: dict[tuple[int, int], bytes], rank: int) -> bytes:
    return root_digest([digests[key] for key in sorted(digests) if key[0] == rank])
