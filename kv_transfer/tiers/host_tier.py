"""The tier in host memory: one arena of block-sized slots, least recently used goes first."""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable

from cluster.identity import BlockHash
from kv_transfer.tiers.tier import TierStatus, digest_of

# Told of a block that is about to be dropped, with its bytes: valid during the call only.
EvictionListener = Callable[[BlockHash, memoryview], None]


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
        self._slots: OrderedDict[BlockHash, tuple[int, bytes]] = OrderedDict()  # hash -> slot, digest; oldest first
        self._on_evict = on_evict
        self._lock = threading.Lock()
        self._hits = self._misses = self._evictions = self._corrupt = self._refused = 0

    def put(self, block_hash: BlockHash, payload: memoryview) -> bool:
        if payload.nbytes != self._block_bytes:
            raise ValueError(f"a block has {self._block_bytes} bytes, not {payload.nbytes}")
        with self._lock:
            if block_hash in self._slots:
                self._slots.move_to_end(block_hash)
                return True
            slot = self._free.pop() if self._free else self._evict_oldest()
            target = self._slot(slot)
            target[:] = payload
            self._slots[block_hash] = (slot, digest_of(target))
            return True

    def get(self, block_hash: BlockHash, into: memoryview) -> bool:
        with self._lock:
            entry = self._slots.get(block_hash)
            if entry is None:
                self._misses += 1
                return False
            slot, digest = entry
            into[:] = self._slot(slot)
            if digest_of(into) != digest:
                self._drop(block_hash)
                self._corrupt += 1
                self._misses += 1
                return False
            self._slots.move_to_end(block_hash)
            self._hits += 1
            return True

    def contains(self, block_hash: BlockHash) -> bool:
        with self._lock:
            return block_hash in self._slots

    def clear(self) -> None:
        with self._lock:
            for block_hash in list(self._slots):
                self._drop(block_hash)

    def close(self) -> None:
        """Gives the memory back; the tier must not be used any more."""
        with self._lock:
            self._slots.clear()
            self._view.release()
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

    def _evict_oldest(self) -> int:
        block_hash, (slot, _) = self._slots.popitem(last=False)
        self._evictions += 1
        if self._on_evict is not None:
            self._on_evict(block_hash, self._slot(slot))
        return slot

    def _drop(self, block_hash: BlockHash) -> None:
        slot, _ = self._slots.pop(block_hash)
        self._free.append(slot)

    def _slot(self, slot: int) -> memoryview:
        return self._view[slot * self._block_bytes : (slot + 1) * self._block_bytes]
