"""Preemption by swap: the KV that comes back is the KV that went, and it goes only where that is predicted to pay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cluster.sampling_params import SamplingParams
from engine.block_pool import BlockPool
from engine.kv_memory import KvMemory, layout_of
from engine.scheduler import MAX_PREEMPTIONS, Scheduler
from engine.sequence import Sequence
from engine.swap_space import FIXED_COPY_S, SwapCosts, SwapSpace, swap_pays
from tests.engine.engine_bench import EngineBench, make_request
from tests.engine.hash_runner import CONFIG, HashRunner, expected_tokens
from tests.engine.test_speculation import KINDS, drafter_named, prompt

EVERYTHING = 2**30


def swap_always(bench: EngineBench) -> None:
    assert bench.swap is not None
    bench.swap._costs = SwapCosts(token_s=1.0, block_copy_s=0.0)  # computing is slow here, copying costs nothing
    bench.swap.saw_step = lambda num_tokens, step_s: None  # type: ignore[method-assign]


@pytest.mark.parametrize("speculation", ["off", "sometimes right", "trees"])
@pytest.mark.parametrize("way", ["restart", "swap", "swap into little room"])
def test_ten_blocks_and_32_requests_all_end_with_their_tokens(way: str, speculation: str) -> None:
    prompts = [prompt(1 + index % 12, index) for index in range(32)]
    sampling = [SamplingParams(max_tokens=16, **KINDS[index % len(KINDS)]) for index in range(32)]
    drafter = drafter_named(speculation, prompts, sampling)
    swap_bytes = {"restart": 0, "swap": EVERYTHING, "swap into little room": 5 * 32}[way]
    with EngineBench(
        num_blocks=10, block_tokens=4, max_sequences=8, max_batch_tokens=16, swap_bytes=swap_bytes, speculator=drafter
    ) as bench:
        if bench.swap is not None:
            swap_always(bench)
        assert bench.run(prompts, sampling) == [expected_tokens(*pair) for pair in zip(prompts, sampling, strict=True)]
        counters = bench.engine.counters()
    assert 0 < counters["preemptions"] <= 32 * MAX_PREEMPTIONS
    if way == "swap":
        assert counters["preemptions_swapped"] == counters["preemptions"] == counters["swapped_in"]
    elif way == "swap into little room":
        assert 0 < counters["preemptions_swapped"] <= counters["preemptions"]


def preempted_once(num_tokens: int, costs: SwapCosts, max_bytes: int = EVERYTHING) -> tuple[Sequence, Scheduler, Any]:
    """A sequence that has computed its prompt and gave way."""
    runner = HashRunner(64, 16)
    pool = BlockPool(64, 16, "model", on_block_freed=runner.poison)
    with EngineBench() as bench:
        limits = bench.limits
    swap = SwapSpace(runner, 16 * 8, max_bytes)
    swap._costs = costs
    scheduler = Scheduler(pool, limits, swap=swap)
    request = make_request("r0", prompt(num_tokens), max_tokens=8)
    sequence = Sequence(request, pool.new_chain(b"tenant"), 4096, 0, 0.0)
    scheduler.add(sequence)
    while sequence.num_uncomputed:
        (chunk,) = scheduler.schedule().chunks
        sequence.num_computed += chunk.num_tokens
    sequence.append(1)
    scheduler._preempt(sequence, scheduler.schedule())
    return sequence, scheduler, swap


@pytest.mark.parametrize(("num_tokens", "is_swapped"), [(20, False), (60, True), (200, True)])
def test_short_contexts_restart_and_long_ones_are_swapped(num_tokens: int, is_swapped: bool) -> None:
    costs = SwapCosts(token_s=2 * FIXED_COPY_S / 40, block_copy_s=FIXED_COPY_S / 100)  # they meet near 43 tokens
    sequence, scheduler, swap = preempted_once(num_tokens, costs)
    assert (sequence in swap) == is_swapped
    (chunk,) = scheduler.schedule().chunks
    assert chunk.num_tokens == (1 if is_swapped else min(64, num_tokens + 1))
    assert sequence not in swap


def test_without_room_a_sequence_restarts() -> None:
    sequence, _, swap = preempted_once(200, SwapCosts(1.0, 0.0), max_bytes=12 * 128)
    assert sequence not in swap
    assert swap.used_bytes == 0


def test_who_ends_while_swapped_leaves_nothing() -> None:
    sequence, scheduler, swap = preempted_once(200, SwapCosts(1.0, 0.0))
    assert swap.used_bytes == 13 * 128
    scheduler.finish(sequence)
    assert swap.used_bytes == 0


def test_k20_what_is_still_cached_is_not_copied_back() -> None:
    class Counting(HashRunner):
        num_written = 0

        def restore_blocks(self, blocks: Any, saved: np.ndarray) -> None:
            assert len(blocks) == len(saved)
            Counting.num_written += len(blocks)
            super().restore_blocks(blocks, saved)

    sequence, scheduler, swap = preempted_once(100, SwapCosts(1.0, 0.0))
    swap._memory = Counting(64, 16)
    pool = scheduler._pool
    refs = pool.allocate(3)
    assert refs is not None
    chain = pool.new_chain(b"tenant")
    pool.publish(chain, sequence.token_ids, refs, 48)  # another request left the first three blocks in the cache
    pool.release(refs)
    scheduler.schedule()
    assert Counting.num_written == 7 - 3
    assert sequence.num_computed == 100


def test_the_rates_are_learnt_from_steps_and_copies() -> None:
    ticks = iter([0.0, FIXED_COPY_S + 0.4])
    runner = HashRunner(8, 4)
    swap = SwapSpace(runner, 32, EVERYTHING, clock=lambda: next(ticks))
    assert not swap_pays(10_000, 1, swap._costs), "nothing is known of a token's cost: no copy"
    swap.saw_step(1, 0.010)
    swap.saw_step(512, 0.512)
    swap.saw_step(1, 0.020)
    assert swap._costs.token_s == pytest.approx(0.001)
    sequence = Sequence(make_request("r", prompt(32)), BlockPool(8, 4, "m").new_chain(b""), 64, 0, 0.0)
    sequence.blocks, sequence.num_computed = BlockPool(8, 4, "m").allocate(8) or [], 32
    before = swap._costs.block_copy_s
    assert swap.save(sequence, 4)
    assert swap._costs.block_copy_s == pytest.approx(before + 0.2 * (0.05 - before))


def test_a_pools_blocks_come_back_bit_for_bit() -> None:
    memory = KvMemory(layout_of(CONFIG, "bfloat16", 4), 6)
    content = np.random.default_rng(0).integers(0, 255, memory.size_bytes).astype(np.uint8)
    memory._array[:] = content
    saved = memory.save_blocks([4, 1])
    memory.zero()
    memory.restore_blocks([0, 5], saved)
    size = memory.layout.block_bytes
    assert bytes(memory.run(0, 0, 3)) == content[4 * size : 5 * size].tobytes()
    assert bytes(memory.run(5, 0, 3)) == content[size : 2 * size].tobytes()
    memory.close()
