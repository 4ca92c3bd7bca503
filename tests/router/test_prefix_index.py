"""The index knows who holds which prefix, through restarts, evictions and bursts."""

from __future__ import annotations

import hashlib
import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.identity import BlockHash, WorkerId
from router.prefix_index import SPECULATIVE_TTL_S, PrefixIndex

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def chain(length: int, name: str = "x") -> list[BlockHash]:
    hashes, parent = [], name.encode()
    for _ in range(length):
        parent = hashlib.blake2b(parent, digest_size=16).digest()
        hashes.append(BlockHash(parent))
    return hashes


def test_each_worker_is_matched_as_far_as_it_holds_the_chain() -> None:
    index, blocks = PrefixIndex(), chain(100)
    for worker, length in ((A, 100), (B, 37), (C, 1)):
        index.stored(worker, blocks[:length])
    assert index.match(blocks, 0.0) == {A: 100, B: 37, C: 1}
    assert index.match(blocks[:10], 0.0) == {A: 10, B: 10, C: 1}
    assert index.match(chain(5, "other"), 0.0) == {}
    assert index.match([], 0.0) == {}


@pytest.mark.parametrize("held", [0, 1, 2, 3, 63, 64, 65, 2047, 2048])
def test_halving_finds_every_length(held: int) -> None:
    index, blocks = PrefixIndex(), chain(2048)
    index.stored(A, blocks[:held])
    assert index.match(blocks, 0.0) == ({A: held} if held else {})


def test_evicted_block_leaves_the_index() -> None:
    index, blocks = PrefixIndex(), chain(8)
    index.stored(A, blocks)
    index.stored(B, blocks)
    index.removed(A, blocks[4:])
    assert index.match(blocks, 0.0) == {A: 4, B: 8}
    index.removed(B, blocks)
    index.removed(A, blocks)
    assert index.status().entries == 0
    assert (index.num_blocks(A), index.num_blocks(B)) == (0, 0)


def test_rt18_a_restarted_worker_holds_nothing_of_its_past() -> None:
    index, blocks = PrefixIndex(), chain(8)
    index.stored(A, blocks)
    index.drop_worker(A)
    assert index.match(blocks, 0.0) == {}
    index.stored(A, blocks[:2])
    assert index.match(blocks, 0.0) == {A: 2}


def test_swept_slots_free_their_entries_and_their_bits() -> None:
    index = PrefixIndex()
    for restart in range(50):
        index.stored(A, chain(20, f"life {restart}"))
        index.stored(B, chain(5))
        index.drop_worker(A)
        while index.sweep(max_entries=7):
            pass
    assert index.status().entries == 5
    assert index.status().retired_slots == 0
    assert index.match(chain(5), 0.0) == {B: 5}
    # A new worker takes a bit that was swept: sets stay small however often somebody restarts.
    index.stored(C, chain(1, "c"))
    assert max(max(shard.values()) for shard in index._shards if shard) < 8


def test_a_sweep_never_copies_the_whole_index() -> None:
    """Nor all its sets: either would stop the router that has millions of entries."""
    num_blocks = 20_000
    index, blocks = PrefixIndex(), chain(num_blocks)
    index.stored(A, blocks)
    index.stored(B, blocks)
    index.drop_worker(A)
    peaks = []
    tracemalloc.start()
    try:
        goes_on = True
        while goes_on:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            goes_on = index.sweep(max_entries=100)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert len(peaks) >= num_blocks // 100
    assert max(peaks) < num_blocks  # bytes: a copy of all keys takes eight times as many
    assert index.match(blocks, 0.0) == {B: num_blocks}
    assert index.status().distinct_sets == 1


def test_an_entry_that_was_stored_again_during_a_sweep_stays() -> None:
    index, blocks = PrefixIndex(), chain(10)
    index.stored(A, blocks)
    index.drop_worker(A)
    index.sweep(max_entries=3)
    index.stored(A, blocks)
    while index.sweep(max_entries=3):
        pass
    assert index.match(blocks, 0.0) == {A: 10}


def test_rt1_siblings_of_a_burst_follow_the_choice_until_it_expires() -> None:
    index, blocks = PrefixIndex(), chain(16)
    index.speculate(A, blocks, now_s=10.0)
    assert index.match(blocks, 10.1) == {A: 16}
    assert index.match(blocks, 10.0 + SPECULATIVE_TTL_S) == {}
    assert index.status().speculative_entries == 0


def test_a_confirmed_speculation_outlives_its_time() -> None:
    index, blocks = PrefixIndex(), chain(4)
    index.speculate(A, blocks, now_s=0.0)
    index.stored(A, blocks)
    assert index.match(blocks, 100.0) == {A: 4}


def test_rt23_chains_that_end_alike_and_differ_before_are_distinct() -> None:
    index = PrefixIndex()
    index.stored(A, chain(4, "one"))
    assert index.match(chain(4, "two"), 0.0) == {}


def test_rt26_a_full_index_refuses_and_counts_instead_of_growing() -> None:
    index = PrefixIndex(max_entries=10)
    index.stored(A, chain(25))
    assert index.status().entries == 10
    assert index.status().rejected == 15


def test_a_thousand_workers_share_their_sets() -> None:
    index, shared = PrefixIndex(), chain(10)
    for number in range(1000):
        index.stored(WorkerId(f"w{number}"), shared)
    assert len(index.match(shared, 0.0)) == 1000


class IndexAgainstModel(RuleBasedStateMachine):
    """Any order of events: a match is what a plain dictionary of sets says."""

    workers = st.sampled_from([A, B, C])
    chains = st.sampled_from([chain(12, "p"), chain(12, "q")])

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[WorkerId, set[BlockHash]] = {A: set(), B: set(), C: set()}

    @rule(worker=workers, blocks=chains, length=st.integers(0, 12))
    def store(self, worker: WorkerId, blocks: Sequence[BlockHash], length: int) -> None:
        self.index.stored(worker, blocks[:length])
        self.held[worker] |= set(blocks[:length])

    @rule(worker=workers, blocks=chains, length=st.integers(0, 12))
    def evict_the_leaves(self, worker: WorkerId, blocks: Sequence[BlockHash], length: int) -> None:
        leaves = set(blocks[length:])
        self.index.removed(worker, leaves)
        self.held[worker] -= leaves

    @rule(worker=workers)
    def restart(self, worker: WorkerId) -> None:
        self.index.drop_worker(worker)
        self.held[worker] = set()

    @rule(entries=st.integers(1, 5))
    def sweep(self, entries: int) -> None:
        self.index.sweep(entries)

    @invariant()
    def matches_the_model(self) -> None:
        for blocks in (chain(12, "p"), chain(12, "q")):
            expected = {}
            for worker, held in self.held.items():
                length = next((at for at, block in enumerate(blocks) if block not in held), len(blocks))
                if length:
                    expected[worker] = length
            assert self.index.match(blocks, 0.0) == expected
        for worker, held in self.held.items():
            assert self.index.num_blocks(worker) == len(held)


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(30))
def test_halving_finds_what_looking_at_every_block_finds(seed: int) -> None:
    """Chains that many workers hold to many lengths, stored, expected or evicted from the end on, some restarted."""
    chance = random.Random(seed)
    index = PrefixIndex()
    blocks = chain(chance.choice((1, 2, 3, 17, 256, 1000)))
    held: dict[WorkerId, int] = {}
    for number in range(chance.choice((1, 3, 40, 100))):
        worker_id = WorkerId(f"worker-{number}")
        stored, expected = (chance.choice((0, 1, chance.randrange(len(blocks) + 1), len(blocks))) for _ in range(2))
        index.stored(worker_id, blocks[:stored])
        index.speculate(worker_id, blocks[:expected], 0.0)
        kept = chance.randrange(stored + 1) if chance.random() < 0.3 else stored
        index.removed(worker_id, blocks[kept:stored])
        if chance.random() < 0.1:
            index.drop_worker(worker_id)
            kept = expected = 0
        held[worker_id] = max(kept, expected)
    asked = [*blocks, *chain(chance.choice((0, 0, 1, 300)), "own")]
    assert index.match(asked, 1.0) == {worker_id: count for worker_id, count in held.items() if count}
