"""What the pool evicts comes back from below as it was, and whatever happens on the way costs time alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from cluster.identity import BlockHash, RequestId
from cluster.sampling_params import SamplingParams
from engine.block_pool import BlockPool
from engine.kv_restorer import FETCH_TIMEOUT_S
from engine.kv_tiering import KvTiering
from engine.prefix_cache import proof_of
from engine.request import FinishReason
from kv_transfer.tiers.tier_stack import TierStack
from tests.engine.engine_bench import DEADLINE_S, EngineBench
from tests.engine.hash_runner import HashRunner, expected_tokens, fingerprints
from tests.engine.test_block_pool import EventLog

BLOCK_TOKENS = 4
BLOCK_BYTES = 8 * BLOCK_TOKENS
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def prompt(num_tokens: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 50, num_tokens)]


def wait_until(is_reached: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_reached():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.001)


class Store(TierStack):
    """The real one in host memory, with doors: a closed one holds who puts or gets until it is opened."""

    def __init__(self, num_blocks: int = 1000) -> None:
        super().__init__(num_blocks * BLOCK_BYTES, BLOCK_BYTES)
        self.put_door, self.get_door = threading.Event(), threading.Event()
        self.put_door.set()
        self.get_door.set()
        self.num_putting = self.num_getting = 0
        self.num_to_give: int | None = None  # then everything is a miss
        self.puts: dict[BlockHash, tuple[bytes, bytes]] = {}

    def put(
        self, block_hash: BlockHash, proof: bytes, payload: memoryview, is_current: Callable[[], bool] = lambda: True
    ) -> bool:
        half = payload.nbytes // 2
        begun = bytes(payload[:half])  # a copy takes its time
        self.num_putting += 1
        assert self.put_door.wait(DEADLINE_S)
        is_kept = super().put(block_hash, proof, memoryview(begun + bytes(payload[half:])), is_current)
        if is_kept:
            with self._host.peek(block_hash) as kept:
                assert kept is not None
                self.puts[block_hash] = proof, bytes(kept.payload)
        return is_kept

    def get(self, block_hash: BlockHash, proof: bytes, into: memoryview) -> str | None:
        self.num_getting += 1
        assert self.get_door.wait(DEADLINE_S)
        if self.num_to_give is not None:
            self.num_to_give -= 1
            if self.num_to_give < 0:
                return None
        return super().get(block_hash, proof, into)


@contextmanager
def bench_with(store: Store, *, always_pays: bool = True, **options: object) -> Iterator[EngineBench]:
    with EngineBench(block_tokens=BLOCK_TOKENS, store=store, **options) as bench:  # type: ignore[arg-type]
        assert bench.tiering is not None
        if always_pays:
            bench.tiering.costs.pays = lambda tiers: True  # type: ignore[method-assign]
        try:
            yield bench
        finally:
            store.put_door.set()
            store.get_door.set()
    store.close()


def answer(bench: EngineBench, request_id: str, token_ids: Sequence[int], **fields: object) -> int:
    """Runs one request to its end; its tokens must be right. Gives how many tokens were cached."""
    bench.submit(request_id, token_ids, sampling=GREEDY, **fields)
    assert bench.sink.end(request_id).finish_reason is FinishReason.LENGTH
    assert bench.sink.tokens(request_id) == expected_tokens(token_ids, GREEDY)
    return bench.sink.of(request_id)[0].cached_tokens


def push_out(bench: EngineBench, prefix: Sequence[int], seed: int = 100) -> None:
    """Other prompts take the pool until nothing of this one is cached in it."""
    chain = bench.pool.new_chain(b"tenant")
    token_ids = np.array([*prefix, 0], np.int32)
    wait_until_saved(bench)
    for number in range(200):
        if bench.pool.count_cached_tokens(chain, token_ids) == 0:
            return
        answer(bench, f"other-{seed}-{number}", prompt(12, seed + number))
        wait_until_saved(bench)
    raise AssertionError("the prefix stays in the pool")


def wait_until_saved(bench: EngineBench) -> None:
    wait_until(lambda: not bench.pool.num_unsaved, "the saver does not get there")


def check_contents(store: Store, prompts: Sequence[Sequence[int]]) -> None:
    """Whatever the store was ever given is what its name says, to the last byte."""
    right: dict[BlockHash, tuple[bytes, bytes]] = {}
    pool = BlockPool(1, BLOCK_TOKENS, "hash-model")
    for token_ids in prompts:
        history = np.array([*token_ids, *expected_tokens(token_ids, GREEDY)], np.int32)
        chain = pool.new_chain(b"tenant").hash_chain
        chain.extend(history)
        for index, block_hash in enumerate(chain.hashes):
            span = np.arange(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
            parent = chain.hashes[index - 1] if index else BlockHash(bytes(16))
            right[block_hash] = (
                proof_of(parent, history[span].tobytes()),
                fingerprints(history[span], span).tobytes(),
            )
    assert store.puts
    for block_hash, put in store.puts.items():
        assert right[block_hash] == put


def test_an_evicted_prefix_comes_back_and_gives_the_same_tokens() -> None:
    store = Store()
    with bench_with(store, num_blocks=16) as bench:
        token_ids = prompt(30, 1)
        assert answer(bench, "first", token_ids) == 0
        push_out(bench, token_ids)
        num_computed = bench.runner.num_computed_tokens
        assert answer(bench, "again", token_ids) == 28
        assert bench.runner.num_computed_tokens - num_computed == 2 + GREEDY.max_tokens - 1
        assert answer(bench, "once more", token_ids) == 28
        counters = bench.engine.counters()
    assert counters["kv_tier_restores"] == 1
    assert counters["kv_tier_restored_blocks_from_host"] == 7
    assert counters["kv_tier_evicted_lost_blocks"] == 0
    check_contents(store, [token_ids, *(prompt(12, 100 + number) for number in range(200))])


def test_another_tenant_finds_nothing() -> None:
    store = Store()
    with bench_with(store, num_blocks=16) as bench:
        token_ids = prompt(30, 1)
        answer(bench, "first", token_ids)
        push_out(bench, token_ids)
        assert answer(bench, "other", token_ids, scope_key=b"another tenant") == 0
    assert store.num_getting == 0


def test_only_the_part_that_the_pool_lacks_is_fetched() -> None:
    store = Store()
    with bench_with(store, num_blocks=24) as bench:
        token_ids = prompt(42, 1)
        answer(bench, "long", token_ids)
        push_out(bench, token_ids)
        answer(bench, "its start", token_ids[:22])
        assert store.num_getting == 5
        assert answer(bench, "again", token_ids) == 40
        assert store.num_getting == 10


def test_a_fetch_that_does_not_pay_is_not_made() -> None:
    store = Store()
    with bench_with(store, num_blocks=16, always_pays=False) as bench:
        assert bench.tiering is not None
        bench.tiering.costs.saw_fetch("host", 1, 10.0)
        bench.tiering.costs.saw_step(1000, 0.001)
        token_ids = prompt(30, 1)
        answer(bench, "first", token_ids)
        push_out(bench, token_ids)
        assert answer(bench, "again", token_ids) == 0
        assert bench.engine.counters()["kv_tier_restores_declined"] == 1
    assert store.num_getting == 0


def test_others_run_while_a_prefix_is_on_its_way() -> None:
    store = Store()
    with bench_with(store, num_blocks=24) as bench:
        token_ids = prompt(30, 1)
        answer(bench, "first", token_ids)
        push_out(bench, token_ids)
        store.get_door.clear()
        bench.submit("again", token_ids, sampling=GREEDY)
        wait_until(lambda: store.num_getting == 1, "nothing is fetched")
        assert answer(bench, "other", prompt(9, 5)) == 0
        assert bench.sink.of("again") == []
        store.get_door.set()
        assert bench.sink.end("again").finish_reason is FinishReason.LENGTH
        assert bench.sink.tokens("again") == expected_tokens(token_ids, GREEDY)
        assert bench.sink.of("again")[0].cached_tokens == 28


def test_kv34_a_store_that_gives_less_than_it_said_is_a_shorter_hit() -> None:
    store = Store()
    with bench_with(store, num_blocks=16) as bench:
        token_ids = prompt(30, 1)
        answer(bench, "first", token_ids)
        push_out(bench, token_ids)
        store.num_to_give = 3
        assert answer(bench, "again", token_ids) == 12


def test_kv56_who_is_cancelled_during_a_fetch_ends_at_once_and_leaves_nothing() -> None:
    store = Store()
    with bench_with(store, num_blocks=16) as bench:
        token_ids = prompt(30, 1)
        answer(bench, "first", token_ids)
        push_out(bench, token_ids)
        store.get_door.clear()
        bench.submit("again", token_ids, sampling=GREEDY)
        wait_until(lambda: store.num_getting == 1, "nothing is fetched")
        bench.engine.cancel(RequestId("again"))
        assert bench.sink.end("again").finish_reason is FinishReason.CANCELLED
        assert bench.pool.census().owned > 0, "a copy is under way into these blocks"
        store.get_door.set()
        wait_until(lambda: bench.pool.census().owned == 0, "the fetch keeps its blocks")
        assert store.num_getting == 1, "nobody waits: the rest is not fetched"
        assert bench.tiering is not None
        assert bench.tiering._restores == {}


def test_kv56_a_stop_during_a_fetch_and_a_save_gives_every_block_back() -> None:
    store = Store()
    with bench_with(store, num_blocks=16) as bench:
        token_ids = prompt(30, 1)
        answer(bench, "first", token_ids)
        push_out(bench, token_ids)
        store.get_door.clear()
        store.put_door.clear()
        bench.submit("again", token_ids, sampling=GREEDY)
        wait_until(lambda: store.num_getting == 1, "nothing is fetched")
        stopper = threading.Thread(target=bench.engine.stop, args=(DEADLINE_S,))
        stopper.start()
        store.get_door.set()
        store.put_door.set()
        stopper.join(DEADLINE_S)
        assert not stopper.is_alive()
        assert bench.sink.end("again").finish_reason is FinishReason.CANCELLED
        assert bench.pool.census().owned == 0


def test_kv64_a_store_that_hangs_is_waited_for_no_longer_than_its_time() -> None:
    store = Store()
    now_s = [0.0]
    with bench_with(store, num_blocks=32, clock=lambda: now_s[0]) as bench:
        token_ids = prompt(30, 1)
        answer(bench, "first", token_ids)
        push_out(bench, token_ids)
        store.get_door.clear()
        bench.submit("again", token_ids, sampling=GREEDY)
        wait_until(lambda: store.num_getting == 1, "nothing is fetched")
        now_s[0] = FETCH_TIMEOUT_S + 1
        bench.engine._inbox.wake()  # real time would have
        assert bench.sink.end("again").finish_reason is FinishReason.LENGTH
        assert bench.sink.tokens("again") == expected_tokens(token_ids, GREEDY)
        assert answer(bench, "others", prompt(30, 2)) == 0, "a hanging store is not asked again"
        assert bench.engine.counters()["kv_tier_restores_overdue"] == 0, "nobody else's prefix lies below"
        store.get_door.set()


def test_k20_a_preempted_sequence_finds_below_what_the_pool_has_lost() -> None:
    sampling = SamplingParams(max_tokens=16, temperature=0.0)
    for attempt in range(20):  # whether a victim's blocks were saved in time is up to the machine
        prompts = [prompt(1 + index % 12, 100 * attempt + index) for index in range(24)]
        with bench_with(Store(), num_blocks=10, max_sequences=8, max_batch_tokens=16) as bench:
            tokens = bench.run(prompts, [sampling] * len(prompts))
            counters = bench.engine.counters()
        assert tokens == [expected_tokens(token_ids, sampling) for token_ids in prompts]
        assert counters["preemptions"] > 0
        if counters["kv_tier_restores"] > 0:  # of its own blocks: no two prompts begin alike
            return
    raise AssertionError("no preempted sequence found its blocks below")


def test_kv30_nothing_of_a_prompt_is_stored_before_its_kv_is_written() -> None:
    store = Store()
    with bench_with(store, num_blocks=9, is_gated=True, max_batch_tokens=16) as bench:
        token_ids = prompt(30, 1)
        bench.submit("r", token_ids, sampling=GREEDY)
        bench.permit(1)  # half of the prompt; the other half's kernel is held back
        wait_until(lambda: bench.pool.census().owned == 8, "the prompt does not start")
        assert store.puts == {}, "its blocks are in use, some of them without KV"
        bench.permit(100)
        bench.sink.end("r")
        wait_until_saved(bench)
        assert len(store.puts) == 33 // BLOCK_TOKENS
    check_contents(store, [token_ids])


def test_kv31_blocks_that_were_filled_and_not_verified_are_never_stored() -> None:
    runner, store = HashRunner(8, BLOCK_TOKENS), Store()
    pool = BlockPool(8, BLOCK_TOKENS, "hash-model")
    tiering = KvTiering(pool, runner, store)
    tiering.start(lambda: None)
    token_ids = np.array(prompt(16, 1), np.int32)
    good, bad = pool.new_chain(b"tenant"), pool.new_chain(b"tenant")
    refs = pool.reserve(bad, token_ids, 4)
    assert refs is not None
    runner.kv[:] = 1  # a transfer writes; what it wrote does not verify
    assert pool.oldest_unsaved(8) == []
    pool.quarantine(refs)
    pool.unquarantine(refs)
    again = pool.reserve(good, token_ids, 4)
    assert again is not None
    for index, ref in enumerate(again):
        span = np.arange(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
        runner.kv.reshape(-1, BLOCK_TOKENS)[ref.block] = fingerprints(token_ids[span], span)
    pool.publish(good, token_ids, again, 8)  # the first half verified
    pool.release(again)
    wait_until(lambda: not pool.num_unsaved, "the saver does not get there")
    tiering.stop(DEADLINE_S)
    assert len(store.puts) == 2
    check_contents(store, [token_ids.tolist()])
    store.close()


def test_kv32_a_block_that_is_evicted_while_it_is_copied_is_not_kept() -> None:
    store = Store()
    store.put_door.clear()
    with bench_with(store, num_blocks=8) as bench:
        first = prompt(12, 1)
        answer(bench, "first", first)
        wait_until(lambda: store.num_putting == 1, "nothing is copied")
        answer(bench, "second", prompt(25, 2))  # takes the block whose copy is not done yet
        assert bench.pool.evictions.lost > 0
        store.put_door.set()
        wait_until_saved(bench)
        assert bench.engine.counters()["kv_tier_spoilt_saves"] >= 1
        spoilt = bench.pool.new_chain(b"tenant").hash_chain
        spoilt.extend(np.array([*first, *expected_tokens(first, GREEDY)], np.int32))
        assert not any(block_hash in store.puts for block_hash in spoilt.hashes[2:])
    check_contents(store, [first, prompt(25, 2)])


@pytest.mark.parametrize("seed", range(3))
def test_kv65_many_prompts_through_a_small_pool_and_a_small_store_all_end_right(seed: int) -> None:
    chance = np.random.default_rng(seed)
    starts = [prompt(20, 1000 + number) for number in range(6)]
    prompts = [
        [*starts[int(chance.integers(6))], *prompt(int(chance.integers(1, 9)), int(index))] for index in range(60)
    ]
    store = Store(num_blocks=60)
    with bench_with(store, num_blocks=20, max_sequences=4) as bench:
        for number in range(0, len(prompts), 6):
            for index, token_ids in enumerate(prompts[number : number + 6], number):
                bench.submit(f"r{index}", token_ids, sampling=GREEDY)
            for index, token_ids in enumerate(prompts[number : number + 6], number):
                assert bench.sink.end(f"r{index}").finish_reason is FinishReason.LENGTH
                assert bench.sink.tokens(f"r{index}") == expected_tokens(token_ids, GREEDY)
            wait_until_saved(bench)
        wait_until(lambda: bench.pool.census().owned == 0, "blocks leaked")
        assert bench.engine.counters()["kv_tier_restores"] > 0
    check_contents(store, prompts)


def test_a_block_that_is_saved_is_demoted_and_one_that_is_lost_is_removed() -> None:
    events, woken = EventLog(), threading.Event()
    pool = BlockPool(4, BLOCK_TOKENS, "model", events=events)
    pool.save_below(woken.set)
    token_ids = np.array(prompt(16, 1), np.int32)
    chain = pool.new_chain(b"tenant")
    refs = pool.reserve(chain, token_ids, 4)
    assert refs is not None
    pool.publish(chain, token_ids, refs, 16)
    assert not woken.is_set(), "its blocks are in use"
    pool.release(refs)
    assert woken.is_set()
    last, third, second, first = pool.oldest_unsaved(4)
    pool.was_saved(last, is_kept=True)
    pool.was_saved(third, is_kept=True)
    pool.was_saved(second, is_kept=False)
    assert pool.oldest_unsaved(4) == [first]
    pool.was_lost([last.block_hash])
    assert pool.allocate(4) is not None
    assert events.below == {third.block_hash}
    assert events.known == set()
    assert (pool.evictions.saved, pool.evictions.lost) == (1, 3)


def test_what_a_store_loses_for_good_is_told_and_what_the_pool_still_has_is_not_gone() -> None:
    store = Store(num_blocks=4)
    events = BelowLog()
    with bench_with(store, num_blocks=16) as bench:
        assert bench.tiering is not None
        bench.tiering.watch(events)
        answer(bench, "first", prompt(30, 1))
        wait_until_saved(bench)
        wait_until(lambda: len(events.went) == 33 // BLOCK_TOKENS - 4, "the store holds four blocks")
        assert all(not store.find([block_hash]) for block_hash in events.went)
    assert events.has_told


class BelowLog:
    """Implements `engine.kv_tiering.TierEvents`."""

    def __init__(self) -> None:
        self.went: list[BlockHash] = []
        self.has_told = False

    def has_tiers(self) -> None:
        self.has_told = True

    def came_below(self, hashes: Sequence[BlockHash]) -> None:
        assert not hashes, "nobody else stores anything"

    def went_below(self, hashes: Sequence[BlockHash]) -> None:
        self.went.extend(hashes)
