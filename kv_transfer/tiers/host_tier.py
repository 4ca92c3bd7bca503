"""The tier in host memory: one arena of block-sized slots, least recently used goes first.

    free ──put──> filling ──still current──> kept <──> being read
     ^               └── changed meanwhile ──> free        │
     └──────────── evicted, cleared, corrupt <─────────────┘  once nobody reads it

Bytes are copied outside the lock: whoever asks what is here never waits for a copy. A slot that is read is not evicted,
and a slot becomes visible only when it is whole.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cluster.identity import BlockHash
from kv_transfer.frame_copy import copy_frame
from kv_transfer.tiers.tier import IsCurrent, TierStatus, always_current

# Told of a block that was dropped, under the tier's lock: must only take a note.
EvictionListener = Callable[[BlockHash], None]


@dataclass(slots=True)
class _Slot:
    index: int
    proof: bytes
    digest: bytes
    num_readers: int = 0
    is_dropped: bool = False  # free once nobody reads it


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """A block that stays where it is while somebody looks at it."""

    proof: bytes
    digest: bytes
    payload: memoryview


class HostTier:
    """Slots in one anonymous mapping, so that a full tier never grows and never fragments the heap."""

    name = "host"

    def __init__(self, capacity_bytes: int, block_bytes: int, on_evict: EvictionListener | None = None) -> None:
        if block_bytes <= 0 or capacity_bytes < block_bytes:
            raise ValueError(f"a host tier of {capacity_bytes} bytes does not hold one block of {block_bytes}")
        self._block_bytes = block_bytes
        self._num_slots = capacity_bytes // block_bytes
        self._arena = mmap.mmap(-1, self._num_slots * block_bytes)
        self._view = memoryview(self._arena)
        self._free = list(range(self._num_slots - 1, -1, -1))
        self._slots: OrderedDict[BlockHash, _Slot] = OrderedDict()  # least recently used first
        self._on_evict = on_evict
        self._lock = threading.Lock()
        self._hits = self._misses = self._evictions = self._corrupt = self._refused = 0

    def put(
        self, block_hash: BlockHash, proof: bytes, payload: memoryview, is_current: IsCurrent = always_current
    ) -> bool:
        """Keeps a copy of the block's bytes. `is_current` is asked after they were copied: where it says no, they may
        be another block's in part. False: not kept."""
        if payload.nbytes != self._block_bytes:
            raise ValueError(f"a block has {self._block_bytes} bytes, not {payload.nbytes}")
        with self._lock:
            if block_hash in self._slots:
                self._slots.move_to_end(block_hash)
                return self._slots[block_hash].proof == proof
            index = self._take_slot()
            if index is None:
                self._refused += 1
                return False
        is_kept = False
        try:
            digest = copy_frame([payload], [self._bytes_of(index)])
            with self._lock:
                if block_hash not in self._slots and is_current():
                    self._slots[block_hash] = _Slot(index, proof, digest)
                    is_kept = True
        finally:
            if not is_kept:
                with self._lock:
                    self._free.append(index)
                    self._refused += 1
        return is_kept

    def get(self, block_hash: BlockHash, proof: bytes, into: memoryview) -> bool:
        with self._lock:
            slot = self._slots.get(block_hash)
            if slot is None or slot.proof != proof:
                self._misses += 1
                return False
            self._slots.move_to_end(block_hash)
            slot.num_readers += 1
        is_intact = False
        try:
            is_intact = copy_frame([self._bytes_of(slot.index)], [into]) == slot.digest
        finally:
            with self._lock:
                if is_intact:
                    self._hits += 1
                else:
                    self._corrupt += 1
                    self._misses += 1
                    self._drop(block_hash, slot)
                self._stop_reading(slot)
        return is_intact

    @contextmanager
    def peek(self, block_hash: BlockHash) -> Iterator[KeptBlock | None]:
        """The block where it lies, for as long as the context lasts; None when it is not here. Counts as no use."""
        with self._lock:
            slot = self._slots.get(block_hash)
            if slot is not None:
                slot.num_readers += 1
        if slot is None:
            yield None
            return
        try:
            yield KeptBlock(slot.proof, slot.digest, self._bytes_of(slot.index))
        finally:
            with self._lock:
                self._stop_reading(slot)

    def contains(self, block_hash: BlockHash) -> bool:
        with self._lock:
            return block_hash in self._slots

    def touch(self, block_hash: BlockHash) -> bool:
        """As `contains`; the block is the last one to go from now on."""
        with self._lock:
            if block_hash not in self._slots:
                return False
            self._slots.move_to_end(block_hash)
            return True

    def clear(self) -> None:
        with self._lock:
            for block_hash, slot in list(self._slots.items()):
                self._drop(block_hash, slot)

    def close(self) -> None:
        """Gives the memory back, at once or with the last view of it; the tier must not be used any more."""
        with self._lock:
            self._slots.clear()
            self._view.release()
            with suppress(BufferError):
                self._arena.close()

    def status(self) -> TierStatus:
        with self._lock:
            return TierStatus(
                self.name,
                len(self._slots),
                len(self._slots) * self._block_bytes,
                self._num_slots * self._block_bytes,
                self._hits,
                self._misses,
                self._evictions,
                self._corrupt,
                self._refused,
            )

    def _take_slot(self) -> int | None:
        """A free slot, if need be that of the least recently used block; None: every block is being read."""
        if self._free:
            return self._free.pop()
        for block_hash, slot in self._slots.items():
            if slot.num_readers == 0:
                del self._slots[block_hash]
                self._evictions += 1
                if self._on_evict is not None:
                    self._on_evict(block_hash)
                return slot.index
        return None

    def _drop(self, block_hash: BlockHash, slot: _Slot) -> None:
        if self._slots.get(block_hash) is not slot:
            return  # somebody else dropped it
        del self._slots[block_hash]
        if slot.num_readers:
            slot.is_dropped = True
        else:
            self._free.append(slot.index)

    def _stop_reading(self, slot: _Slot) -> None:
        slot.num_readers -= 1
        if slot.is_dropped and slot.num_readers == 0:
            self._free.append(slot.index)

    def _bytes_of(self, index: int) -> memoryview:
        return self._view[index * self._block_bytes : (index + 1) * self._block_bytes]
