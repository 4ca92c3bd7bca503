"""Host memory over a disk as one store: what the first drops the second takes, what the second finds the first keeps.

Writing to the disk happens on a thread of its own behind a bounded queue: the engine never waits for it. When the disk
is slower than eviction, blocks are dropped and counted.
"""

from __future__ import annotations

import queue
import threading

from cluster.identity import BlockHash
from kv_transfer.tiers.disk_tier import DiskTier
from kv_transfer.tiers.host_tier import HostTier
from kv_transfer.tiers.tier import TierStatus

WRITE_QUEUE_BLOCKS = 64


class TierStack:
    """Owns its tiers and the writing thread. `put` and `get` are the only ways in and out."""

    def __init__(self, host_bytes: int, block_bytes: int, disk: DiskTier | None = None) -> None:
        self._disk = disk
        self._host = HostTier(host_bytes, block_bytes, self._evicted if disk is not None else None)
        self._block_bytes = block_bytes
        self._writes: queue.Queue[BlockHash | None] = queue.Queue(WRITE_QUEUE_BLOCKS)
        self._pending: dict[BlockHash, bytes] = {}  # evicted and not yet written: still there for a reader
        self._dropped_writes = 0
        self._writer = threading.Thread(target=self._write_loop, name="kv-disk-tier", daemon=True)
        if disk is not None:
            self._writer.start()

    def put(self, block_hash: BlockHash, payload: memoryview) -> bool:
        """Keeps a copy of a full, verified block."""
        return self._host.put(block_hash, payload)

    def get(self, block_hash: BlockHash, into: memoryview) -> bool:
        """Copies the block into `into`, verified; False is a miss and `into` must not be used."""
        if self._host.get(block_hash, into):
            return True
        pending = self._pending.get(block_hash)
        if pending is not None:
            into[:] = pending
        elif self._disk is None or not self._disk.get(block_hash, into):
            return False
        self._host.put(block_hash, into)
        return True

    def count_prefix(self, block_hashes: list[BlockHash]) -> int:
        """How many blocks from the first on are here now. Each may be gone when it is asked for: a miss then."""
        for index, block_hash in enumerate(block_hashes):
            if not self._contains(block_hash):
                return index
        return len(block_hashes)

    def clear(self) -> None:
        self._writes.join()
        self._host.clear()
        if self._disk is not None:
            self._disk.clear()

    def flush(self) -> None:
        """Returns once every block that was evicted before the call is written or dropped."""
        self._writes.join()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stops the writing thread and gives the memory back."""
        if self._disk is not None:
            self._writes.put(None)
            self._writer.join(timeout_s)
        self._host.close()

    @property
    def dropped_writes(self) -> int:
        """Blocks that the disk was too slow to take."""
        return self._dropped_writes

    def status(self) -> tuple[TierStatus, ...]:
        return (self._host.status(),) if self._disk is None else (self._host.status(), self._disk.status())

    def _contains(self, block_hash: BlockHash) -> bool:
        is_above_disk = self._host.contains(block_hash) or block_hash in self._pending
        return is_above_disk or (self._disk is not None and self._disk.contains(block_hash))

    def _evicted(self, block_hash: BlockHash, payload: memoryview) -> None:
        # A copy: the slot is about to be written over.
        self._pending[block_hash] = bytes(payload)
        try:
            self._writes.put_nowait(block_hash)
        except queue.Full:
            self._pending.pop(block_hash, None)
            self._dropped_writes += 1

    def _write_loop(self) -> None:
        while True:
            block_hash = self._writes.get()
            try:
                if block_hash is None:
                    return
                payload = self._pending.get(block_hash)
                if payload is not None and self._disk is not None:
                    self._disk.put(block_hash, memoryview(payload))
                    self._pending.pop(block_hash, None)
            finally:
                self._writes.task_done()
