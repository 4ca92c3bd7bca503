"""Which worker holds which prefix: from chained block hash to the set of its holders.

A chained hash names its whole prefix, so a worker that holds block i of a chain holds the blocks before it (a cache
evicts leaves first). Holders of a prompt are found by halving: the set only shrinks along the chain, and where it is
the same at both ends of a stretch, nothing in between needs a look. Of 2,048 blocks with ten different ends 80 are
looked at.

Sets are integers, one bit a slot. A slot belongs to one incarnation of one worker: a restart takes a new slot, and the
old one is masked out at once and swept later, so dropping a worker costs nothing on the request path. A stale entry may
cost time, never correctness: the worker compares tokens itself.

Entries stand in many dictionaries, by the first byte of their hash: a sweep has to copy the keys of what it walks, and
those of two million at once stopped the router for 34 to 49 ms.

Does not know: sequence numbers and gaps (`kv_event_log`), what a match is worth (scoring).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from cluster.identity import BlockHash, WorkerId

SPECULATIVE_TTL_S = 3.0
SWEEP_ENTRIES = 10_000  # entries looked at in one call: a few milliseconds' work for the event loop
_NUM_SHARDS = 256  # values of a hash's first byte


@dataclass(slots=True)
class _Slot:
    """One incarnation of one worker."""

    worker_id: WorkerId
    bit: int
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class IndexStatus:
    entries: int
    speculative_entries: int
    retired_slots: int  # being swept
    distinct_sets: int
    rejected: int  # blocks not entered because the index is full


@dataclass(slots=True)
class _Speculation:
    expires_s: float
    bit: int
    hashes: tuple[BlockHash, ...] = field(default=())


class PrefixIndex:
    """Not thread-safe: the router's event loop owns it."""

    def __init__(self, max_entries: int = 10_000_000) -> None:
        self.max_entries = max_entries
        self._shards: tuple[dict[BlockHash, int], ...] = tuple({} for _ in range(_NUM_SHARDS))
        self._num_entries = 0
        self._speculative: dict[BlockHash, int] = {}
        self._speculations: deque[_Speculation] = deque()
        self._slots: dict[WorkerId, _Slot] = {}
        self._workers_by_bit: dict[int, WorkerId] = {}
        self._live_mask = 0
        self._retired_mask = 0
        self._sweep: Iterator[BlockHash] | None = None
        self._sweeping_mask = 0
        # Equal sets are one object: millions of entries share a few thousand integers.
        self._interned: dict[int, int] = {}
        self._interned_by_sweep: dict[int, int] = {}
        self._rejected = 0

    def stored(self, worker_id: WorkerId, hashes: Iterable[BlockHash]) -> None:
        """The worker holds these blocks now."""
        slot = self._slot(worker_id)
        shards, interned, bit = self._shards, self._interned, slot.bit
        for block_hash in hashes:
            holders = shards[block_hash[0]]
            before = holders.get(block_hash, 0)
            if before & bit:
                continue
            if not before:
                if self._num_entries >= self.max_entries:
                    self._rejected += 1
                    continue
                self._num_entries += 1
            after = before | bit
            holders[block_hash] = interned.setdefault(after, after)
            slot.num_blocks += 1

    def removed(self, worker_id: WorkerId, hashes: Iterable[BlockHash]) -> None:
        """The worker evicted these blocks; unknown ones change nothing."""
        slot = self._slots.get(worker_id)
        if slot is None:
            return
        shards, interned, bit = self._shards, self._interned, slot.bit
        for block_hash in hashes:
            holders = shards[block_hash[0]]
            before = holders.get(block_hash, 0)
            if not before & bit:
                continue
            slot.num_blocks -= 1
            after = before & ~bit
            if after:
                holders[block_hash] = interned.setdefault(after, after)
            else:
                self._delete(block_hash)

    def drop_worker(self, worker_id: WorkerId) -> None:
        """Forgets all of a worker: it restarted, cleared its cache, or is gone. Constant time."""
        slot = self._slots.pop(worker_id, None)
        if slot is None:
            return
        del self._workers_by_bit[slot.bit]
        self._live_mask &= ~slot.bit
        self._retired_mask |= slot.bit

    def num_blocks(self, worker_id: WorkerId) -> int:
        slot = self._slots.get(worker_id)
        return slot.num_blocks if slot is not None else 0

    def match(self, hashes: Sequence[BlockHash], now_s: float) -> dict[WorkerId, int]:
        """For each worker that holds a prefix of the chain: how many blocks of it, speculative ones included."""
        self._expire(now_s)
        matched: dict[WorkerId, int] = {}
        if not hashes:
            return matched
        shards, expected = self._shards, self._speculative.get
        first, last, end = hashes[0], hashes[-1], len(hashes) - 1
        at_first = (shards[first[0]].get(first, 0) | expected(first, 0)) & self._live_mask
        at_last = (shards[last[0]].get(last, 0) | expected(last, 0)) & at_first
        self._record(at_last, end + 1, matched)
        # Stretches with other holders at the far end than at the near one: (place, its holders) of both.
        stretches = [(0, at_first, end, at_last)] if at_first != at_last else []
        while stretches:
            low, at_low, high, at_high = stretches.pop()
            while high - low > 1:
                middle = (low + high) // 2
                block = hashes[middle]
                # Who has the far end has what is before it.
                at_middle = (shards[block[0]].get(block, 0) | expected(block, 0)) & at_low | at_high
                if at_middle == at_low:
                    low = middle
                    continue
                if at_middle != at_high:
                    stretches.append((middle, at_middle, high, at_high))
                high, at_high = middle, at_middle
            self._record(at_low & ~at_high, low + 1, matched)
        return matched

    def speculate(self, worker_id: WorkerId, hashes: Sequence[BlockHash], now_s: float) -> None:
        """The worker was chosen for this prompt and will hold its blocks soon: siblings of a burst follow it."""
        bit = self._slot(worker_id).bit
        speculative = self._speculative
        for block_hash in hashes:
            speculative[block_hash] = speculative.get(block_hash, 0) | bit
        self._speculations.append(_Speculation(now_s + SPECULATIVE_TTL_S, bit, tuple(hashes)))

    def sweep(self, max_entries: int = SWEEP_ENTRIES) -> bool:
        """Clears retired slots a part at a time; True while there is more to do. Called when the router is idle."""
        if self._sweep is None:
            if not self._retired_mask:
                return False
            self._sweeping_mask = self._retired_mask
            self._sweep = (block_hash for shard in self._shards for block_hash in list(shard))
        interned = self._interned_by_sweep
        batch = list(islice(self._sweep, max_entries))
        for block_hash in batch:
            holders = self._shards[block_hash[0]]
            before = holders.get(block_hash, 0)
            after = before & ~self._sweeping_mask
            if after:
                holders[block_hash] = interned.setdefault(after, after)
            elif before:
                self._delete(block_hash)
        if len(batch) == max_entries:
            return True
        self._retired_mask &= ~self._sweeping_mask
        self._sweep = None
        self._interned, self._interned_by_sweep = interned, {}
        return bool(self._retired_mask)

    @property
    def num_entries(self) -> int:
        return self._num_entries

    def status(self) -> IndexStatus:
        return IndexStatus(
            self._num_entries,
            len(self._speculative),
            self._retired_mask.bit_count(),
            len(self._interned),
            self._rejected,
        )

    def _delete(self, block_hash: BlockHash) -> None:
        del self._shards[block_hash[0]][block_hash]
        self._num_entries -= 1

    def _record(self, holders: int, num_blocks: int, matched: dict[WorkerId, int]) -> None:
        while holders:
            bit = holders & -holders
            matched[self._workers_by_bit[bit]] = num_blocks
            holders ^= bit

    def _expire(self, now_s: float) -> None:
        while self._speculations and self._speculations[0].expires_s <= now_s:
            expired = self._speculations.popleft()
            for block_hash in expired.hashes:
                left = self._speculative.get(block_hash, 0) & ~expired.bit
                if left:
                    self._speculative[block_hash] = left
                else:
                    self._speculative.pop(block_hash, None)

    def _slot(self, worker_id: WorkerId) -> _Slot:
        slot = self._slots.get(worker_id)
        if slot is None:
            # A bit is free again only once no entry can carry it.
            used = self._live_mask | self._retired_mask
            bit = ~used & (used + 1)
            slot = self._slots[worker_id] = _Slot(worker_id, bit)
            self._workers_by_bit[bit] = worker_id
            self._live_mask |= bit
        return slot
