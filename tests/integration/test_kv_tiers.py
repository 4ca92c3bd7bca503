"""Real workers with a pool that is too small: what it evicts comes back from host memory, or another's from disk."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tandem.v1 import worker_pb2

from tests.integration.test_two_workers import BACK_TIMEOUT_S, reference_row
from tests.integration.worker_processes import Router, WorkerFleet, WorkerProcess, all_blocks_are_back, fleet_in

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(300)]

NUM_BLOCKS = 16  # of 16 tokens
PROMPT_TOKENS = 200
CACHED_TOKENS = 192  # its full blocks
OTHER_TOKENS = 230
NUM_TOKENS = 16
MIB = 2**20


@pytest.fixture
async def fleet(tmp_path: Path, default_model_path: Path) -> AsyncIterator[WorkerFleet]:
    async with fleet_in(tmp_path, default_model_path) as fleet:
        yield fleet


async def push_out(router: Router, worker: WorkerProcess) -> None:
    """Another prompt takes the pool, once everything in it has a copy."""
    await worker.wait_for(all_is_saved, 60, "all is saved")
    other = random.Random(1).choices(range(1000, 40_000), k=OTHER_TOKENS)
    assert (await router.generate("other", other, 1)).failure is None


def counter(worker_counters: dict[str, float], name: str) -> int:
    return int(worker_counters.get(f"kv_tier_{name}", 0))


async def test_an_evicted_prompt_comes_back_from_host_memory_and_for_another_worker_from_the_disk(
    fleet: WorkerFleet, tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    tiers = {"num_kv_blocks": NUM_BLOCKS, "kv_host_tier_bytes": 64 * MIB, "kv_disk_tier": str(folder)}
    row = reference_row(PROMPT_TOKENS)
    first = await fleet.start("aggregated", "first", **tiers)
    async with Router(first) as router:
        answer = await router.generate("computed", row["prompt"], NUM_TOKENS)
        assert (answer.token_ids, answer.first.cached_tokens) == (row["tokens"][:NUM_TOKENS], 0)
        await push_out(router, first)
        answer = await router.generate("restored", row["prompt"], NUM_TOKENS)
        assert (answer.token_ids, answer.first.cached_tokens) == (row["tokens"][:NUM_TOKENS], CACHED_TOKENS)
    await first.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, "every block is back")
    status = await first.wait_for(all_is_on_disk, 60, "every block has its file")
    assert counter(dict(status.counters), "restored_blocks_from_host") > 0
    assert counter(dict(status.counters), "restored_blocks_from_disk") == 0
    assert await asyncio.to_thread(first.stop) == 0

    second = await fleet.start("aggregated", "second", **tiers)
    async with Router(second) as router:
        answer = await router.generate("elsewhere", row["prompt"], NUM_TOKENS)
        assert (answer.token_ids, answer.first.cached_tokens) == (row["tokens"][:NUM_TOKENS], CACHED_TOKENS)
    status = await second.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, "every block is back")
    assert counter(dict(status.counters), "restored_blocks_from_disk") == CACHED_TOKENS // 16
    assert await asyncio.to_thread(second.stop) == 0


def all_is_saved(status: worker_pb2.WorkerStatus) -> bool:
    """A block is copied when its last user has left, which may be a moment after the answer's end."""
    return all_blocks_are_back(status) and status.counters["kv_tier_unsaved_blocks"] == 0


def all_is_on_disk(status: worker_pb2.WorkerStatus) -> bool:
    counters = status.counters
    return (
        counters["kv_tier_unsaved_blocks"] == 0 and counters["kv_tier_disk_blocks"] == counters["kv_tier_host_blocks"]
    )
