"""The pool over its lower tiers: blocks are saved before they are evicted, and fetched when a prompt begins with them.

    pool ──KvSaver──> store     ahead of evictions
    pool <──KvRestorer── store  before an admission, while others run

The scheduler asks `must_wait` for each sequence that it would admit: the first time, a prefix that only a lower tier
holds begins to be fetched if that is faster than to compute it, and the sequence stays in the queue until it is there.
So what is fetched at once is what the scheduler looks at. Nothing here waits for a copy or for a disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Chunks
from typing import Protocol

from cluster.identity import BlockHash
from engine.block_pool import BlockPool
from engine.block_store import BlockStore
from engine.kv_restorer import KvRestorer, Restore, WritableBlocks
from engine.kv_saver import KvSaver, ReadableBlocks
from engine.prefix_cache import PrefixChain, TokenIds
from engine.restore_costs import RestoreCosts
from engine.sequence import Sequence


class TieredMemory(ReadableBlocks, WritableBlocks, Protocol):
    """What of a KV pool's memory is read and written (`engine.kv_memory.KvMemory`)."""


class TierEvents(Protocol):
    """Hears what lower tiers do by themselves (`cluster.kv_events.KvEventPublisher`). Must only take a note."""

    def has_tiers(self) -> None: ...

    def came_below(self, hashes: Chunks[BlockHash]) -> None: ...

    def went_below(self, hashes: Chunks[BlockHash]) -> None: ...


class KvTiering:
    """Owned by the engine. `must_wait`, `saw_step` and `forget` are for its thread; the rest is for any."""

    def __init__(
        self, pool: BlockPool, memory: TieredMemory, store: BlockStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._store = store
        self._clock = clock
        self.costs = RestoreCosts(memory.layout.block_bytes, memory.layout.block_tokens)
        self._saver = KvSaver(pool, memory, store)
        self._restorer = KvRestorer(pool, memory, store, self.costs, clock)
        self._restores: dict[Sequence, Restore] = {}
        self._on_restored: Callable[[], None] = _nobody_waits
        self._num_declined = 0
        self._events: TierEvents | None = None

    def watch(self, events: TierEvents | None) -> None:
        """Before `start`: who hears what lies below."""
        self._events = events
        if events is not None:
            events.has_tiers()
        self._store.watch(self._changed)

    def start(self, on_restored: Callable[[], None]) -> None:
        """`on_restored` is called from another thread when a sequence may not have to wait any more."""
        self._on_restored = on_restored
        self._saver.start()
        self._restorer.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the threads, and with them every use of the pool's memory."""
        self._restorer.stop(timeout_s)
        self._saver.stop(timeout_s)

    # --- the engine thread --------------------------------------------------------------------------------------------

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether the sequence's prefix is on its way. It sets out when this is first asked, where that pays."""
        restore = self._restores.get(sequence)
        if restore is not None:
            if not restore.done.done() and self._clock() < restore.deadline_s:
                return True
            self.forget(sequence)
            return False
        if sequence.has_asked_tiers or sequence.blocks or sequence.wants_prompt_logprobs:
            return False
        sequence.has_asked_tiers = True
        restore = self._begin(sequence.chain, sequence.token_ids)
        if restore is None:
            return False
        self._restores[sequence] = restore
        restore.done.add_done_callback(lambda _: self._on_restored())
        return True

    def forget(self, sequence: Sequence) -> None:
        """Nobody waits for this sequence's prefix any more (one that has none on its way changes nothing)."""
        restore = self._restores.pop(sequence, None)
        if restore is not None:
            restore.done.cancel()

    def saw_step(self, num_tokens: int, step_s: float) -> None:
        self.costs.saw_step(num_tokens, step_s)

    @property
    def next_deadline_s(self) -> float | None:
        """When a sequence stops waiting whatever happens."""
        return min((restore.deadline_s for restore in self._restores.values()), default=None)

    # --- any thread ---------------------------------------------------------------------------------------------------

    @property
    def restore_ms_per_block(self) -> float:
        """From the dearest tier that was fetched from, as far as is known."""
        return self.costs.dearest_block_s * 1000

    def counters(self) -> dict[str, float]:
        """Sums since the start, and what the tiers hold now."""
        restorer, evictions = self._restorer, self._pool.evictions
        counters: dict[str, float] = {
            "kv_tier_unsaved_blocks": float(self._pool.num_unsaved),
            "kv_tier_saved_blocks": float(self._saver.num_saved),
            "kv_tier_spoilt_saves": float(self._saver.num_spoilt),
            "kv_tier_evicted_saved_blocks": float(evictions.saved),
            "kv_tier_evicted_lost_blocks": float(evictions.lost),
            "kv_tier_restores": float(restorer.num_restores),
            "kv_tier_restores_declined": float(self._num_declined),
            "kv_tier_restores_without_room": float(restorer.num_without_room),
            "kv_tier_restores_overdue": float(restorer.num_overdue),
            "kv_tier_restore_seconds": restorer.busy_s,
        }
        for tier, num_blocks in list(restorer.num_blocks_from.items()):
            counters[f"kv_tier_restored_blocks_from_{tier}"] = float(num_blocks)
            counters[f"kv_tier_{tier}_ms_per_block"] = self.costs.block_s(tier) * 1000
        return counters | self._store.counters()

    def details(self) -> dict[str, str]:
        return self._store.details()

    def _begin(self, chain: PrefixChain, token_ids: TokenIds) -> Restore | None:
        """Sets out to fetch what only a lower tier has of a sequence's prefix, where that pays."""
        block_tokens = self._pool.block_tokens
        most = (len(token_ids) - 1) // block_tokens
        first = self._pool.count_cached_tokens(chain, token_ids) // block_tokens
        if first >= most:
            return None
        tiers = self._store.find(chain.hash_chain.hashes[first:most])
        if not tiers:
            return None
        if not self.costs.pays(tiers):
            self._num_declined += 1
            return None
        return self._restorer.begin(chain, token_ids, first + len(tiers))

    def _changed(self, came: Chunks[BlockHash], went: Chunks[BlockHash]) -> None:
        """From the store, on any thread."""
        self._pool.was_lost(went)
        if self._events is not None:
            self._events.came_below(came)
            self._events.went_below(went)


def _nobody_waits() -> None:
    """Before `start`: no sequence is scheduled yet."""


def open_tiering(
    pool: BlockPool, memory: TieredMemory, store: BlockStore | None, events: TierEvents | None
) -> KvTiering | None:
    """Of a worker: None without a store."""
    if store is None:
        return None
    tiering = KvTiering(pool, memory, store)
    tiering.watch(events)
    return tiering
