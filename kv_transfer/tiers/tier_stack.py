"""Host memory over a disk as one store: what is put goes to the first, and from there to the second.

    put ──copy──> host ──thread──> disk       every block is written once, the oldest first
    get <──────── host <────────── disk       what the disk gives, the host keeps

Writing to the disk happens on a thread of its own: nobody waits for it. A disk that is slower than what is put loses
the blocks that the host drops before their turn, and they are counted. So the blocks that wait are never more than the
host has room for.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from cluster.identity import BlockHash
from kv_transfer.tiers.disk_tier import DiskTier
from kv_transfer.tiers.host_tier import HostTier
from kv_transfer.tiers.tier import IsCurrent, TierStatus, always_current

# How soon a worker knows what others stored in the folder that it shares with them.
REFRESH_S = 1.0
CLOSE_TIMEOUT_S = 3.0


# Of blocks that came by themselves (an earlier process's, or another worker's), and of those that are nowhere any more.
ChangeListener = Callable[[Sequence[BlockHash], Sequence[BlockHash]], None]


class TierStack:
    """Owns its tiers and the writing thread. Implements `engine.block_store.BlockStore`."""

    def __init__(
        self,
        host_bytes: int,
        block_bytes: int,
        disk: DiskTier | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._disk = disk
        self._clock = clock
        self._host = HostTier(host_bytes, block_bytes, self._evicted)
        self._unwritten: OrderedDict[BlockHash, None] = OrderedDict()  # in the host and not on the disk, oldest first
        self._evictions: list[BlockHash] = []  # from the host, not told yet
        self._on_change: ChangeListener | None = None
        self._num_writing = 0
        self._must_clear_disk = False
        self._dropped_writes = 0
        self._is_closing = False
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write_loop, name="kv-disk-tier", daemon=True)
        if disk is not None:
            self._writer.start()

    def put(
        self, block_hash: BlockHash, proof: bytes, payload: memoryview, is_current: IsCurrent = always_current
    ) -> bool:
        """Keeps a copy of a full, verified block; `is_current` is asked once it is copied."""
        is_kept = self._host.put(block_hash, proof, payload, is_current)
        if is_kept:
            self._want_written(block_hash)
        self._tell_changes()
        return is_kept

    def get(self, block_hash: BlockHash, proof: bytes, into: memoryview) -> str | None:
        """Copies the block into `into`, verified, and names the tier that had it. None is a miss: `into` must not be
        used."""
        if self._host.get(block_hash, proof, into):
            return self._host.name
        disk = self._readable_disk
        if disk is None or not disk.get(block_hash, proof, into):
            return None
        self._host.put(block_hash, proof, into)
        self._tell_changes()
        return disk.name

    def find(self, block_hashes: Sequence[BlockHash]) -> list[str]:
        """In which tier each of the blocks is, from the first one on as far as all are here. Never waits for a medium;
        each may be gone when it is asked for: a miss then."""
        found: list[str] = []
        disk = self._readable_disk
        for block_hash in block_hashes:
            if self._host.contains(block_hash):
                found.append(self._host.name)
            elif disk is not None and disk.contains(block_hash):
                found.append(disk.name)
            else:
                break
        return found

    def keeps(self, block_hash: BlockHash) -> bool:
        """Whether the block is here; if so it is the last one to go from now on."""
        if self._host.touch(block_hash):
            self._want_written(block_hash)
            return True
        disk = self._readable_disk
        return disk is not None and disk.contains(block_hash)

    def watch(self, on_change: ChangeListener) -> None:
        """`on_change` hears what came by itself and what went for good, from any thread and outside of all locks; at
        once what is there already."""
        if self._disk is not None:
            on_change(self._disk.hashes(), ())
        self._on_change = on_change

    def clear(self) -> None:
        """Forgets everything at once; the files, whoever wrote them, are removed by the writing thread."""
        with self._changed:
            self._must_clear_disk = self._disk is not None
            self._unwritten.clear()
            self._changed.notify_all()
        self._host.clear()

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Whether what was asked for is done: every block that was put is written or dropped, all files are removed."""
        with self._changed:
            return self._changed.wait_for(self._is_settled, timeout_s)

    def close(self) -> None:
        """Writes what is left to the disk as far as that takes no longer than CLOSE_TIMEOUT_S, ends the writing thread
        and gives the memory back."""
        if self._disk is not None and not self._disk.is_disabled:
            self.flush()
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._disk is not None:
            self._writer.join(CLOSE_TIMEOUT_S)
        self._host.close()

    def status(self) -> tuple[TierStatus, ...]:
        return (self._host.status(),) if self._disk is None else (self._host.status(), self._disk.status())

    def counters(self) -> dict[str, float]:
        """By tier: how much it holds and how often it had what was asked for."""
        counters: dict[str, float] = {"kv_tier_disk_writes_dropped": float(self._dropped_writes)} if self._disk else {}
        for tier in self.status():
            prefix = f"kv_tier_{tier.name}"
            counters |= {
                f"{prefix}_blocks": float(tier.entries),
                f"{prefix}_bytes": float(tier.size_bytes),
                f"{prefix}_capacity_bytes": float(tier.capacity_bytes),
                f"{prefix}_hits": float(tier.hits),
                f"{prefix}_misses": float(tier.misses),
                f"{prefix}_evictions": float(tier.evictions),
                f"{prefix}_corrupt": float(tier.corrupt),
                f"{prefix}_refused": float(tier.refused),
            }
        return counters

    def details(self) -> dict[str, str]:
        """Why a tier does not work."""
        return {f"kv_tier_{tier.name}_disabled": tier.disabled_reason for tier in self.status() if tier.disabled_reason}

    @property
    def _readable_disk(self) -> DiskTier | None:
        return None if self._must_clear_disk else self._disk

    def _evicted(self, block_hash: BlockHash) -> None:
        """Under the host tier's lock."""
        with self._changed:
            self._evictions.append(block_hash)
            if self._unwritten.pop(block_hash, 0) is None:
                self._dropped_writes += 1

    def _tell_changes(self) -> None:
        with self._changed:
            evicted, self._evictions = self._evictions, []
        came, removed = self._disk.take_changes() if self._disk is not None else ([], [])
        if self._on_change is None:
            return
        went = [block_hash for block_hash in (*evicted, *removed) if not self.find([block_hash])]
        if came or went:
            self._on_change(came, went)

    def _want_written(self, block_hash: BlockHash) -> None:
        if self._disk is None or self._disk.is_disabled or self._disk.contains(block_hash):
            return
        with self._changed:
            self._unwritten[block_hash] = None
            self._changed.notify_all()

    def _write_loop(self) -> None:
        disk = self._disk
        if disk is None:
            return
        while True:
            with self._changed:
                self._num_writing = 0
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._is_settled() or self._is_closing, REFRESH_S)
                if self._is_closing:
                    return
                must_clear = self._must_clear_disk
                block_hash = self._unwritten.popitem(last=False)[0] if self._unwritten and not must_clear else None
                self._num_writing = int(block_hash is not None)
            if must_clear:
                disk.clear()
                self._must_clear_disk = False
            elif block_hash is None:
                disk.refresh()
            else:
                self._write(disk, block_hash)
            self._tell_changes()

    def _write(self, disk: DiskTier, block_hash: BlockHash) -> None:
        with self._host.peek(block_hash) as block:
            if block is not None:
                disk.put(block_hash, block)

    def _is_settled(self) -> bool:
        return not self._unwritten and not self._num_writing and not self._must_clear_disk
