"""The pool's states, references, generations, prefix cache and quarantine."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.block_hash import HASH_BYTES, HashChain, HashScope, hash_blocks
from cluster.identity import BlockHash, BlockId, BlockRef
from engine.block_pool import BlockPool
from engine.block_states import BlockBusy, BlockState, StaleBlock, UnknownBlock
from engine.prefix_cache import PrefixChain

BLOCK = 4
SCOPE_KEY = b"tenant"


class EventLog:
    """Replays the events into the set of hashes that the router would believe in."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.below: set[bytes] = set()
        self.stored_runs: list[tuple[BlockHash | None, list[BlockHash]]] = []

    def stored(self, parent: BlockHash | None, hashes: Sequence[BlockHash]) -> None:
        assert parent is None or parent in self.known, "a stored run hangs on an unknown parent"
        assert not self.known & set(hashes)
        self.known |= set(hashes)
        self.stored_runs.append((parent, list(hashes)))

    def demoted(self, hashes: Sequence[BlockHash]) -> None:
        self.removed(hashes)
        self.below |= set(hashes)

    def removed(self, hashes: Sequence[BlockHash]) -> None:
        assert hashes
        assert set(hashes) <= self.known
        self.known -= set(hashes)

    def cleared(self) -> None:
        self.known.clear()


def make_pool(num_blocks: int = 8, block_tokens: int = BLOCK, events: EventLog | None = None) -> BlockPool:
    return BlockPool(num_blocks, block_tokens, "model", events=events)


def prompt(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.arange(num_tokens, dtype=np.int32) + 1000 * seed


def reserve(pool: BlockPool, num_blocks: int) -> list[BlockRef]:
    refs = pool.allocate(num_blocks)
    assert refs is not None
    return refs


def prefill(pool: BlockPool, token_ids: np.ndarray, scope_key: bytes = SCOPE_KEY) -> tuple[list[BlockRef], int]:
    """What a worker does with a prompt: match, allocate the rest, publish. Gives the blocks and the cached tokens."""
    chain = pool.new_chain(scope_key)
    hits = pool.match_prefix(chain, token_ids)
    num_missing = -(-len(token_ids) // pool.block_tokens) - len(hits)
    refs = hits + reserve(pool, num_missing)
    pool.publish(chain, token_ids, refs, len(token_ids))
    return refs, len(hits) * pool.block_tokens


def test_allocation_is_all_or_nothing() -> None:
    pool = make_pool(4)
    reserve(pool, 3)
    assert pool.allocate(2) is None
    assert pool.num_available == 1
    assert pool.census().owned == 3


def test_kv63_a_double_release_is_an_error_and_changes_nothing() -> None:
    pool = make_pool(4)
    refs = reserve(pool, 1)
    assert pool.release(refs) == 1
    with pytest.raises(StaleBlock):
        pool.release(refs)
    reserve(pool, 4)  # the block was not entered twice
    assert pool.census().conservation_error == 0


def test_the_same_reference_twice_in_one_release_is_an_error() -> None:
    pool = make_pool(4)
    (ref,) = reserve(pool, 1)
    with pytest.raises(StaleBlock):
        pool.release([ref, ref])
    assert pool.census().conservation_error == 0


def test_a_stale_reference_never_frees_the_next_owner() -> None:
    pool = make_pool(1)
    old = reserve(pool, 1)
    pool.release(old)
    new = reserve(pool, 1)
    assert new[0].block == old[0].block
    with pytest.raises(StaleBlock):
        pool.release(old)
    assert not pool.holds(old)
    assert pool.holds(new)


@pytest.mark.parametrize("block", [-1, 8, 2**31])
def test_s_b46_an_unknown_block_is_a_typed_error(block: int) -> None:
    pool = make_pool(8)
    ref = BlockRef(BlockId(block), 0)
    with pytest.raises(UnknownBlock):
        pool.release([ref])
    assert not pool.holds([ref])


def test_a_block_that_was_never_allocated_cannot_be_released() -> None:
    with pytest.raises(BlockBusy):
        make_pool().release([BlockRef(BlockId(0), 0)])


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    pool = make_pool(2)
    refs = reserve(pool, 2)
    pool.share(refs)
    assert pool.release(refs) == 0
    assert pool.holds(refs)
    assert pool.release(refs) == 2
    assert pool.census().free == 2


def test_a_block_that_was_used_is_used_again_before_one_that_never_was() -> None:
    pool = make_pool(8)
    first = reserve(pool, 3)
    pool.release(first[1:])
    assert {ref.block for ref in reserve(pool, 3)} == {1, 2, 3}


def test_first_uses_are_told_once_and_only_when_there_are_any() -> None:
    told: list[int] = []
    pool = BlockPool(8, BLOCK, "model", on_first_use=told.append)
    pool.release(reserve(pool, 3))
    reserve(pool, 3)
    assert told == [3]
    assert pool.reserve(pool.new_chain(SCOPE_KEY), prompt(9), 2) is not None
    assert told == [3, 5]
    assert pool.allocate(0) == []
    assert pool.allocate(9) is None
    assert told == [3, 5]


def test_freed_blocks_are_announced_once_for_each_release_that_gives_any() -> None:
    pool = make_pool(4)
    calls: list[int] = []
    pool.add_freed_listener(lambda: calls.append(pool.num_available))
    refs = reserve(pool, 3)
    pool.share(refs)
    pool.release(refs)
    assert calls == []
    pool.release(refs)
    assert calls == [4]


def test_freed_content_is_poisoned_before_anyone_can_take_it() -> None:
    freed: list[int] = []
    pool = BlockPool(2, BLOCK, "model", on_block_freed=freed.append)
    refs, _ = prefill(pool, prompt(4))
    pool.release(refs)
    assert freed == []  # cached: its content is alive
    reserve(pool, 2)
    assert freed == [refs[0].block]


# --- prefix cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "cached"), [(32, 16), (33, 32), (16, 0), (1, 0), (17, 16), (48, 32)])
def test_k1_full_hit_recomputes_the_last_block(num_tokens: int, cached: int) -> None:
    pool = make_pool(16, block_tokens=16)
    refs, first_hit = prefill(pool, prompt(num_tokens))
    pool.release(refs)
    _, second_hit = prefill(pool, prompt(num_tokens))
    assert (first_hit, second_hit) == (0, cached)
    assert num_tokens - second_hit >= 1


def test_k1_the_hash_chain_is_whole_after_a_capped_hit() -> None:
    pool = make_pool(16, block_tokens=16)
    pool.release(prefill(pool, prompt(32))[0])
    pool.release(prefill(pool, prompt(32))[0])
    assert prefill(pool, prompt(49))[1] == 32


def test_k4_a_reused_block_leaves_its_old_hash() -> None:
    events = EventLog()
    pool = make_pool(2, events=events)
    old = prompt(8)
    pool.release(prefill(pool, old)[0])
    pool.release(prefill(pool, prompt(8, seed=1))[0])
    assert prefill(pool, np.append(old, 1)[:5])[1] == 0
    scope = HashScope(SCOPE_KEY, "model", BLOCK)
    assert not events.known & set(hash_blocks(old, scope)[1:])


class ConstantHashes(HashChain):
    """F42, K5: every block of every sequence has the same hash."""

    def extend(self, token_ids: np.ndarray) -> None:
        self.hashes = [BlockHash(bytes(HASH_BYTES))] * (len(token_ids) // self.block_tokens)


def constant_chain() -> PrefixChain:
    return PrefixChain(ConstantHashes(HashScope(SCOPE_KEY, "model", BLOCK)))


def test_f42_k5_a_colliding_hash_never_gives_foreign_kv() -> None:
    pool = make_pool(32)
    first, second = prompt(12), prompt(12, seed=1)
    for token_ids in (first, second):
        chain = constant_chain()
        assert pool.match_prefix(chain, token_ids) == []
        refs = reserve(pool, 3)
        for num_tokens in (4, 8, 12):
            pool.publish(chain, token_ids, refs, num_tokens)
        pool.release(refs)
    assert pool.match_prefix(constant_chain(), second) == []
    assert len(pool.match_prefix(constant_chain(), first)) == 1


def test_k5_equal_tokens_after_a_different_prefix_are_no_hit_under_a_colliding_hash() -> None:
    pool = make_pool(32)
    token_ids = np.array([1, 2, 3, 4, 1, 2, 3, 4, 9], dtype=np.int32)
    chain = constant_chain()
    pool.publish(chain, token_ids, reserve(pool, 3), 9)
    assert len(pool.match_prefix(constant_chain(), token_ids)) == 1  # block 0 only: block 1 is another prefix


def test_f43_another_tenant_never_hits() -> None:
    pool = make_pool(16)
    pool.release(prefill(pool, prompt(16), b"tenant-a")[0])
    assert prefill(pool, prompt(16), b"tenant-b")[1] == 0
    assert prefill(pool, prompt(16), b"tenant-a")[1] == 12


def test_a_cached_block_is_evicted_least_recently_used_and_tail_first() -> None:
    events = EventLog()
    pool = make_pool(6, events=events)
    old, recent = prompt(12), prompt(12, seed=1)
    pool.release(prefill(pool, old)[0])
    pool.release(prefill(pool, recent)[0])
    reserve(pool, 2)
    assert pool.count_cached_tokens(pool.new_chain(SCOPE_KEY), old) == 4
    assert pool.count_cached_tokens(pool.new_chain(SCOPE_KEY), recent) == 8
    assert len(events.known) == 4


def test_a_matched_block_cannot_be_evicted() -> None:
    pool = make_pool(4)
    pool.release(prefill(pool, prompt(9))[0])
    hits = pool.match_prefix(pool.new_chain(SCOPE_KEY), prompt(9))
    assert len(hits) == 2
    assert pool.allocate(3) is None
    assert len(reserve(pool, 2)) == 2
    assert pool.holds(hits)


def test_an_eviction_batch_keeps_blocks_free_beyond_the_need() -> None:
    pool = BlockPool(8, BLOCK, "model", free_watermark_blocks=3)
    pool.release(prefill(pool, prompt(32))[0])
    reserve(pool, 1)
    assert pool.census().free == 3


def test_evicting_a_parent_drops_what_hangs_on_it() -> None:
    events = EventLog()
    pool = make_pool(4, events=events)
    token_ids = prompt(8)
    first, second = pool.new_chain(SCOPE_KEY), pool.new_chain(SCOPE_KEY)
    ours, theirs = reserve(pool, 1), reserve(pool, 2)
    pool.publish(first, token_ids, ours, 4)
    pool.publish(second, token_ids, theirs, 8)  # block 0 is a twin of ours, block 1 hangs on ours
    pool.release(ours)
    reserve(pool, 2)  # takes the last free block and evicts ours
    assert events.known == set()
    assert pool.holds(theirs)
    pool.release(theirs)
    assert pool.census().cached == 0


def test_a_sequence_whose_ancestor_was_evicted_stops_publishing() -> None:
    events = EventLog()
    pool = make_pool(4, events=events)
    token_ids = prompt(12)
    first, second = pool.new_chain(SCOPE_KEY), pool.new_chain(SCOPE_KEY)
    ours, theirs = reserve(pool, 1), reserve(pool, 3)
    pool.publish(first, token_ids, ours, 4)
    pool.publish(second, token_ids, theirs, 4)
    pool.release(ours)
    reserve(pool, 1)
    pool.publish(second, token_ids, theirs, 12)
    assert events.known == set()


def test_publishing_in_steps_stores_each_block_once_with_its_parent() -> None:
    events = EventLog()
    pool = make_pool(8, events=events)
    token_ids, refs, chain = prompt(14), reserve(pool, 4), pool.new_chain(SCOPE_KEY)
    for num_tokens in (3, 5, 5, 13, 14):
        pool.publish(chain, token_ids, refs, num_tokens)
    names = hash_blocks(token_ids, HashScope(SCOPE_KEY, "model", BLOCK))
    assert events.stored_runs == [(None, names[:1]), (names[0], names[1:])]


def test_the_engine_may_publish_again_what_the_wire_published() -> None:
    pool = make_pool(8)
    token_ids, refs = prompt(12), reserve(pool, 3)
    pool.publish(pool.new_chain(SCOPE_KEY), token_ids, refs, 8)
    engine_chain = pool.new_chain(SCOPE_KEY)
    pool.publish(engine_chain, token_ids, refs, 12)
    assert engine_chain.num_blocks == 3
    assert pool.count_cached_tokens(pool.new_chain(SCOPE_KEY), prompt(13)) == 12


def test_a_released_block_cannot_be_published() -> None:
    pool = make_pool(8)
    refs = reserve(pool, 1)
    pool.release(refs)
    with pytest.raises(StaleBlock):
        pool.publish(pool.new_chain(SCOPE_KEY), prompt(4), refs, 4)


def test_reset_forgets_all_and_running_requests_keep_their_blocks() -> None:
    events = EventLog()
    pool = make_pool(8, events=events)
    running, _ = prefill(pool, prompt(8))
    pool.release(prefill(pool, prompt(8, seed=1))[0])
    assert pool.reset_prefix_cache() == 4
    assert events.known == set()
    assert pool.holds(running)
    assert pool.census().free == 6
    assert prefill(pool, prompt(9))[1] == 0


def test_a_reservation_is_one_step_and_a_refused_one_tells_nobody() -> None:
    pool = make_pool(6)
    pool.release(prefill(pool, prompt(9))[0])
    calls: list[int] = []
    pool.add_freed_listener(lambda: calls.append(1))
    chain = pool.new_chain(SCOPE_KEY)
    assert pool.reserve(chain, prompt(9), 7) is None
    assert pool.reserve(chain, prompt(9), 5, spare_blocks=2) is None
    assert (chain.num_blocks, pool.num_available, calls) == (0, 6, [])
    refs = pool.reserve(chain, prompt(9), 5, spare_blocks=1)
    assert refs is not None
    assert (len(refs), chain.num_blocks, pool.num_available) == (5, 2, 1)
    assert pool.match_prefix(pool.new_chain(SCOPE_KEY), prompt(9)) == refs[:2]


# --- quarantine -------------------------------------------------------------------------------------------------------


def test_quarantined_blocks_are_out_of_use_until_every_writer_is_silent() -> None:
    pool = make_pool(4)
    refs = reserve(pool, 4)
    pool.quarantine(refs[:3])
    pool.release(refs[3:])
    assert pool.census().quarantined == 3
    assert not pool.holds(refs[:3])
    assert pool.allocate(2) is None
    with pytest.raises(BlockBusy):
        pool.release(refs[:3])
    pool.unquarantine(refs[:3])
    assert len(reserve(pool, 4)) == 4
    with pytest.raises(StaleBlock):
        pool.unquarantine(refs[:3])


def test_a_shared_or_published_block_cannot_be_quarantined() -> None:
    pool = make_pool(8)
    shared, (published, _) = reserve(pool, 1), prefill(pool, prompt(4))
    pool.share(shared)
    for refs in (shared, published):
        with pytest.raises(BlockBusy):
            pool.quarantine(refs)


# --- properties -------------------------------------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Random use by several sequences; the pool is recounted from its states after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.events = EventLog()
        self.freed: list[int] = []
        self.pool = BlockPool(10, BLOCK, "model", events=self.events, on_block_freed=self.freed.append)
        self.live: list[list[BlockRef]] = []
        self.quarantined: list[list[BlockRef]] = []
        self.dead: list[BlockRef] = []

    @rule(num_tokens=st.integers(1, 24), family=st.integers(0, 2), is_published=st.booleans())
    def run_a_prompt(self, num_tokens: int, family: int, is_published: bool) -> None:
        token_ids = prompt(num_tokens, seed=family)
        chain = self.pool.new_chain(SCOPE_KEY)
        hits = self.pool.match_prefix(chain, token_ids)
        assert len(hits) * BLOCK < num_tokens
        available = self.pool.num_available
        num_missing = -(-num_tokens // BLOCK) - len(hits)
        rest = self.pool.allocate(num_missing)
        assert (rest is None) == (num_missing > available)
        if rest is None:
            self.pool.release(hits)
            return
        if is_published:
            self.pool.publish(chain, token_ids, hits + rest, num_tokens)
        self.live.append(hits + rest)

    @rule(num_tokens=st.integers(1, 24), family=st.integers(0, 2), spare_blocks=st.integers(0, 2))
    def reserve_a_prompt(self, num_tokens: int, family: int, spare_blocks: int) -> None:
        token_ids, chain, available = (
            prompt(num_tokens, seed=family),
            self.pool.new_chain(SCOPE_KEY),
            self.pool.num_available,
        )
        num_blocks = -(-num_tokens // BLOCK) + 1
        refs = self.pool.reserve(chain, token_ids, num_blocks, spare_blocks=spare_blocks)
        if refs is None:
            assert self.pool.num_available == available < num_blocks + spare_blocks
            return
        assert len(refs) == num_blocks
        assert self.pool.num_available >= spare_blocks
        self.live.append(refs)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.live:
            refs = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
            self.pool.release(refs)
            self.dead.extend(ref for ref in refs if not self.pool.holds([ref]))

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if self.live:
            refs = data.draw(st.sampled_from(self.live))
            self.pool.share(refs)
            self.live.append(list(refs))

    @rule(num_blocks=st.integers(1, 3))
    def cancel_a_transfer(self, num_blocks: int) -> None:
        refs = self.pool.allocate(num_blocks)
        if refs is not None:
            self.pool.quarantine(refs)
            self.quarantined.append(refs)

    @rule()
    def drained(self) -> None:
        if self.quarantined:
            self.pool.unquarantine(self.quarantined.pop())

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        assert self.events.known == set()

    @rule()
    def late_release(self) -> None:
        for ref in self.dead[-3:]:
            assert not self.pool.holds([ref])
            with pytest.raises(StaleBlock):
                self.pool.release([ref])

    @invariant()
    def every_block_is_in_exactly_one_state(self) -> None:
        census, states = self.pool.census(), self.pool._state
        assert census.conservation_error == 0
        counted = {state: states.count(state) for state in BlockState}
        assert counted == {
            BlockState.FREE: census.free,
            BlockState.OWNED: census.owned,
            BlockState.CACHED: census.cached,
            BlockState.QUARANTINED: census.quarantined,
        }
        owned = {ref.block for refs in self.live for ref in refs}
        assert census.owned == len(owned)
        assert all(self.pool.holds(refs) for refs in self.live)
        assert sorted(self.pool._free) == [b for b, state in enumerate(states) if state is BlockState.FREE]

    @invariant()
    def the_index_knows_exactly_what_is_cached(self) -> None:
        names = {entry.block_hash for entry in self.pool._entry if entry is not None}
        assert self.events.known == names
        assert len(self.pool._cache) == len(names)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolProperties = PoolMachine.TestCase


def test_two_threads_lose_no_block() -> None:
    pool = make_pool(16)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(300):
                token_ids = prompt(9, seed=(seed + turn) % 3)
                chain = pool.new_chain(SCOPE_KEY)
                hits = pool.match_prefix(chain, token_ids)
                rest = pool.allocate(3 - len(hits))
                if rest is not None:
                    pool.publish(chain, token_ids, hits + rest, 9)
                pool.release(hits + (rest or []))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failures == []
    census = pool.census()
    assert (census.owned, census.conservation_error) == (0, 0)
