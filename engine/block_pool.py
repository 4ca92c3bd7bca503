"""Who may use which KV block: allocation, references, generations, the prefix cache, quarantine.

    FREE ──allocate──> OWNED ──last release──> CACHED when published, else FREE
     ^                   │ ^──match_prefix──────┘ │
     │                   └──quarantine──> QUARANTINED ──unquarantine──> FREE
     └───────────────eviction (least recently used)──┘  whoever saves below has copied it before (`save_below`)

Every block is in exactly one state. A `BlockRef` names a block at one generation; the generation moves on when the last
reference is dropped, so a late or double release is an error and never touches the next owner.

The pool knows no tensors and no requests. One lock guards it: the wire thread reserves while the engine thread
extends; no call holds it for longer than its own list of blocks. A failed allocation takes nothing.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from cluster.block_hash import HashChain, HashScope
from cluster.identity import BlockHash, BlockId, BlockRef
from engine.block_states import BlockBusy, BlockState, EvictionCounts, KvEvents, StaleBlock, UnknownBlock
from engine.prefix_cache import CacheEntry, PrefixCache, PrefixChain, TokenIds
from engine.request import BlockCensus


class BlockPool:
    """The blocks of one KV pool. All methods are safe to call from any thread."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        model_fingerprint: str,
        *,
        events: KvEvents | None = None,
        free_watermark_blocks: int = 0,
        on_block_freed: Callable[[int], None] | None = None,
        on_first_use: Callable[[int], None] | None = None,
    ) -> None:
        """`free_watermark_blocks`: an eviction goes on until so many blocks are free beyond what was asked for, so that
        evictions come in batches. `on_block_freed` is called under the lock for each block whose content is dead,
        `on_first_use` outside of it when blocks are given out that never were before: so many have been by now, and
        they are the pool's first ones."""
        if num_blocks < 1 or block_tokens < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_tokens} tokens cannot serve anything")
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._fingerprint = model_fingerprint
        self._events = events
        self._free_watermark_blocks = free_watermark_blocks
        self._on_block_freed = on_block_freed
        self._on_first_use = on_first_use
        self._freed_listeners: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._state = [BlockState.FREE] * num_blocks
        self._num_refs = [0] * num_blocks
        self._generation = [0] * num_blocks
        self._entry: list[CacheEntry | None] = [None] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))  # those that were used before, the last freed first
        self._num_ever_used = 0  # the first ones of the pool
        self._cached: OrderedDict[int, CacheEntry] = OrderedDict()  # least recently used first
        # Of the cached ones, those that no lower tier is known to have, in the same order.
        self._unsaved: OrderedDict[int, CacheEntry] = OrderedDict()
        self._wake_saver: Callable[[], None] | None = None
        self._evictions = EvictionCounts()
        self._num_owned = 0
        self._num_quarantined = 0
        self._cache = PrefixCache(block_tokens)

    # --- references -------------------------------------------------------------------------------------------------

    def allocate(self, num_blocks: int) -> list[BlockRef] | None:
        """So many blocks with one reference each, or None: there are not enough now and nothing was taken."""
        with self._lock:
            if num_blocks > len(self._free) + len(self._cached):
                return None
            num_ever_used, taken = self._num_ever_used, self._take(num_blocks)
        self._tell_first_used(num_ever_used)
        return taken

    def reserve(
        self, chain: PrefixChain, token_ids: TokenIds, num_blocks: int, *, spare_blocks: int = 0
    ) -> list[BlockRef] | None:
        """`match_prefix` and `allocate` in one: `num_blocks` in all, the cached ones first (`chain.num_blocks`).

        None: not possible now with `spare_blocks` left over; nothing was taken and no listener is called.
        """
        with self._lock:
            entries = list(self._cache.walk(chain, token_ids))
            num_idle = sum(self._state[entry.block] is BlockState.CACHED for entry in entries)
            num_fresh = num_blocks - len(entries)
            if num_fresh + spare_blocks > len(self._free) + len(self._cached) - num_idle:
                chain.restart()
                return None
            num_ever_used, taken = self._num_ever_used, self._pin(chain, entries) + self._take(num_fresh)
        self._tell_first_used(num_ever_used)
        return taken

    def share(self, refs: Sequence[BlockRef]) -> None:
        """Takes one more reference to each: a posted send, or a second sequence with the same prefix."""
        with self._lock:
            for ref in refs:
                self._check_owned(ref)
            for ref in refs:
                self._num_refs[ref.block] += 1

    def release(self, refs: Sequence[BlockRef]) -> int:
        """Drops one reference to each. Gives how many blocks came back: published ones to the cache, others to the
        free list. The last block of a prefix becomes the first to be evicted."""
        num_returned = 0
        with self._lock:
            for ref in refs:
                self._check_owned(ref)
            for ref in reversed(refs):
                self._check_owned(ref)  # again: the same reference twice in one call
                num_returned += self._drop_reference(ref.block)
        if num_returned:
            self._tell_freed()
        return num_returned

    def holds(self, refs: Sequence[BlockRef]) -> bool:
        """Whether every reference is current and owned: the fence in front of a late write."""
        with self._lock:
            return all(
                0 <= ref.block < self.num_blocks
                and self._state[ref.block] is BlockState.OWNED
                and self._generation[ref.block] == ref.generation
                for ref in refs
            )

    def add_freed_listener(self, listener: Callable[[], None]) -> None:
        """`listener` is called, outside the lock and from any thread, after blocks came back. It must not block."""
        self._freed_listeners.append(listener)

    # --- prefix cache -----------------------------------------------------------------------------------------------

    def new_chain(self, scope_key: bytes) -> PrefixChain:
        """A sequence's place in the cache, within the scope of its tenant and this model."""
        return PrefixChain(HashChain(HashScope(scope_key, self._fingerprint, self.block_tokens)))

    def match_prefix(self, chain: PrefixChain, token_ids: TokenIds) -> list[BlockRef]:
        """The longest cached prefix, one reference taken to each block; moves `chain` there.

        At least one token is left over: a prompt of exactly n blocks hits n - 1.
        """
        with self._lock:
            return self._pin(chain, list(self._cache.walk(chain, token_ids)))

    def count_cached_tokens(self, chain: PrefixChain, token_ids: TokenIds) -> int:
        """How many tokens `match_prefix` would give now. Takes nothing, and promises nothing for later."""
        with self._lock:
            return sum(1 for _ in self._cache.walk(chain, token_ids)) * self.block_tokens

    def publish(self, chain: PrefixChain, token_ids: TokenIds, refs: Sequence[BlockRef], num_tokens: int) -> None:
        """Enters the full blocks among the first `num_tokens` tokens, whose KV must be written and verified.

        `refs` is the sequence's whole block table. Blocks whose prefix is in the cache already are left as they are.
        """
        first, end = chain.num_blocks, num_tokens // self.block_tokens
        if end <= first or not chain.can_publish:
            return
        chain.hash_chain.extend(token_ids[: end * self.block_tokens])
        with self._lock:
            if chain.last_entry is not None and not chain.last_entry.is_live:
                chain.can_publish = False
            parent = chain.last_entry.block_hash if chain.last_entry else None
            run: list[BlockHash] = []
            while chain.can_publish and chain.num_blocks < end:
                entry = self._enter(chain, token_ids, refs[chain.num_blocks])
                if entry is not None:
                    run.append(entry.block_hash)
                    continue
                self._tell_stored(parent, run)
                parent, run = chain.last_entry.block_hash if chain.last_entry else None, []
            self._tell_stored(parent, run)

    def reset_prefix_cache(self) -> int:
        """Forgets every prefix; running requests keep their blocks. Gives how many entries were dropped."""
        with self._lock:
            entries = self._cache.clear()
            num_returned = self._unpublish(entries)
            if self._events is not None:
                self._events.cleared()
        if num_returned:
            self._tell_freed()
        return len(entries)

    # --- lower tiers --------------------------------------------------------------------------------------------------

    def save_below(self, wake: Callable[[], None]) -> None:
        """From now on a lower tier keeps copies of what may be evicted. `wake` is called, under the lock, when
        `oldest_unsaved` has something to say: it must only take a note."""
        with self._lock:
            self._wake_saver = wake
            self._unsaved = OrderedDict((block, entry) for block, entry in self._cached.items() if not entry.is_saved)
            if self._unsaved:
                wake()

    def oldest_unsaved(self, max_blocks: int) -> list[CacheEntry]:
        """Cached blocks that have no copy below yet, the first to be evicted first.

        Takes no reference: who copied one must see that its entry `is_live` still before it uses the copy.
        """
        with self._lock:
            return list(itertools.islice(self._unsaved.values(), max_blocks))

    @property
    def num_unsaved(self) -> int:
        """Cached blocks that have no copy below yet."""
        return len(self._unsaved)

    def was_saved(self, entry: CacheEntry, *, is_kept: bool) -> None:
        """The entry was copied below; not `is_kept`: no tier took it, and it is not asked for again while it lies."""
        with self._lock:
            entry.is_saved = is_kept and entry.is_live
            if self._unsaved.get(entry.block) is entry:
                del self._unsaved[entry.block]

    def was_lost(self, hashes: Sequence[BlockHash]) -> None:
        """No lower tier has these blocks any more."""
        with self._lock:
            for block_hash in hashes:
                entry = self._cache.find(block_hash)
                if entry is not None:
                    entry.is_saved = False

    @property
    def evictions(self) -> EvictionCounts:
        return self._evictions

    # --- quarantine -------------------------------------------------------------------------------------------------

    def quarantine(self, refs: Sequence[BlockRef]) -> None:
        """Takes blocks out of use while a writer may still be alive. The caller must hold their only reference."""
        with self._lock:
            for ref in refs:
                self._check_owned(ref)
                if self._num_refs[ref.block] != 1 or self._entry[ref.block] is not None:
                    raise BlockBusy(f"block {ref.block} is shared or published: no peer can be writing into it")
            for ref in refs:
                self._state[ref.block] = BlockState.QUARANTINED
                self._num_refs[ref.block] = 0
            self._num_owned -= len(refs)
            self._num_quarantined += len(refs)

    def unquarantine(self, refs: Sequence[BlockRef]) -> None:
        """Gives blocks back once every possible writer is proven silent."""
        with self._lock:
            for ref in refs:
                self._check_current(ref)
                if self._state[ref.block] is not BlockState.QUARANTINED:
                    raise BlockBusy(f"block {ref.block} is {self._state[ref.block].value}, not quarantined")
            for ref in refs:
                self._num_quarantined -= 1
                self._generation[ref.block] += 1
                self._make_free(ref.block)
        self._tell_freed()

    # --- counts -----------------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could take now: free, or cached and evictable."""
        return len(self._free) + len(self._cached)

    def census(self) -> BlockCensus:
        """Where every block is. The four counts are kept apart, so that a lost block shows."""
        with self._lock:
            return BlockCensus(
                total=self.num_blocks,
                free=len(self._free),
                owned=self._num_owned,
                cached=len(self._cached),
                quarantined=self._num_quarantined,
            )

    # --- under the lock ---------------------------------------------------------------------------------------------

    def _check_current(self, ref: BlockRef) -> None:
        if not 0 <= ref.block < self.num_blocks:
            raise UnknownBlock(f"block {ref.block} is not in a pool of {self.num_blocks}")
        generation = self._generation[ref.block]
        if ref.generation != generation:
            raise StaleBlock(f"block {ref.block} is at generation {generation}, the reference at {ref.generation}")

    def _check_owned(self, ref: BlockRef) -> None:
        self._check_current(ref)
        if self._state[ref.block] is not BlockState.OWNED:
            raise BlockBusy(f"block {ref.block} is {self._state[ref.block].value}, not owned")

    def _take(self, num_blocks: int) -> list[BlockRef]:
        if num_blocks > len(self._free):
            self._evict_until_free(num_blocks + self._free_watermark_blocks)
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._state[block] = BlockState.OWNED
            self._num_refs[block] = 1
        self._num_owned += num_blocks
        self._num_ever_used = max(self._num_ever_used, 1 + max(blocks, default=-1))
        return [BlockRef(BlockId(block), self._generation[block]) for block in blocks]

    def _pin(self, chain: PrefixChain, entries: Sequence[CacheEntry]) -> list[BlockRef]:
        """One more reference to each entry's block; the chain stands at the last one."""
        chain.restart()
        refs = []
        for entry in entries:
            block = entry.block
            if self._state[block] is BlockState.CACHED:
                del self._cached[block]
                self._unsaved.pop(block, None)
                entry.is_saved = False  # a tier that has it may drop it while it is used here: asked again
                self._state[block] = BlockState.OWNED
                self._num_owned += 1
            self._num_refs[block] += 1
            refs.append(BlockRef(BlockId(block), self._generation[block]))
            chain.last_entry = entry
        chain.num_blocks = len(refs)
        return refs

    def _drop_reference(self, block: int) -> int:
        self._num_refs[block] -= 1
        if self._num_refs[block] > 0:
            return 0
        self._num_owned -= 1
        self._generation[block] += 1
        entry = self._entry[block]
        if entry is None:
            self._make_free(block)
        else:
            self._state[block] = BlockState.CACHED
            self._cached[block] = entry
            if self._wake_saver is not None:
                self._unsaved[block] = entry
                self._wake_saver()
        return 1

    def _make_free(self, block: int) -> None:
        self._state[block] = BlockState.FREE
        if self._on_block_freed is not None:
            self._on_block_freed(block)
        self._free.appendleft(block)  # its pages are there, and may still be in a cache

    def _evict_until_free(self, num_blocks: int) -> None:
        evicted: list[CacheEntry] = []
        while len(self._free) < num_blocks and self._cached:
            oldest = next(iter(self._cached.values()))
            removed = self._cache.remove(oldest)
            self._unpublish(removed)
            evicted.extend(removed)
        if self._wake_saver is not None:
            self._count_evicted(evicted)
        if self._events is None:
            return
        if saved := [entry.block_hash for entry in evicted if entry.is_saved]:
            self._events.demoted(saved)
        if lost := [entry.block_hash for entry in evicted if not entry.is_saved]:
            self._events.removed(lost)

    def _unpublish(self, entries: Sequence[CacheEntry]) -> int:
        """Blocks without an owner become free, deepest first; owned ones only lose their name."""
        num_freed = 0
        for entry in reversed(entries):
            self._entry[entry.block] = None
            if self._state[entry.block] is BlockState.CACHED:
                del self._cached[entry.block]
                self._unsaved.pop(entry.block, None)
                self._make_free(entry.block)
                num_freed += 1
        return num_freed

    def _count_evicted(self, entries: Sequence[CacheEntry]) -> None:
        num_saved = sum(entry.is_saved for entry in entries)
        self._evictions = EvictionCounts(
            self._evictions.saved + num_saved, self._evictions.lost + len(entries) - num_saved
        )

    def _enter(self, chain: PrefixChain, token_ids: TokenIds, ref: BlockRef) -> CacheEntry | None:
        self._check_owned(ref)
        own = self._entry[ref.block]
        if own is not None and own.block_hash != chain.hash_chain.hashes[chain.num_blocks]:
            raise BlockBusy(f"block {ref.block} is published with another prefix")
        entry = self._cache.insert(chain, token_ids, ref.block)
        if entry is not None:
            self._entry[ref.block] = entry
        return entry

    def _tell_stored(self, parent: BlockHash | None, hashes: Sequence[BlockHash]) -> None:
        if hashes and self._events is not None:
            self._events.stored(parent, hashes)

    # --- outside the lock -------------------------------------------------------------------------------------------

    def _tell_first_used(self, num_before: int) -> None:
        if self._on_first_use is not None and self._num_ever_used > num_before:
            self._on_first_use(self._num_ever_used)

    def _tell_freed(self) -> None:
        for listener in self._freed_listeners:
            listener()
