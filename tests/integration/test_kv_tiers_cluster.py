"""A mock cluster whose prefill worker has a small pool over host memory: the router knows what lies below."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import RunningCluster
from tests.integration.grpc_client import generate_tokens
from tests.integration.mock_tokens import VOCAB_SIZE, expected_tokens

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(300)]

NUM_BLOCKS = 40
CLUSTER = f"""
engine: mock
mock_prefill_ms: [1.0, 1.0, 0.0]
prefill: {{workers: 1, num_kv_blocks: {NUM_BLOCKS}, kv_host_tier_bytes: 4000000}}
decode: {{workers: 1, num_kv_blocks: {NUM_BLOCKS}}}
router: {{prefill_fallback: deny}}
"""
PROMPT_TOKENS = 400
PROMPT_BLOCKS = PROMPT_TOKENS // 16


def prompt(seed: int) -> list[int]:
    return [(7 * index + 1000 * seed + 1) % VOCAB_SIZE for index in range(PROMPT_TOKENS)]


def prefill_worker(status: dict[str, Any]) -> dict[str, Any]:
    (worker,) = (worker for worker in status["workers"] if worker["role"] == "prefill")
    found: dict[str, Any] = worker
    return found


def test_the_router_hears_of_what_lies_below_a_pool_and_the_worker_brings_it_back(
    start_own_cluster: Callable[..., RunningCluster], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    cluster = start_own_cluster("--config", str(file))
    for seed in range(3):  # each one takes more than half of the pool
        tokens, _ = generate_tokens(cluster.grpc_address, prompt(seed), 4)
        assert tokens == expected_tokens(prompt(seed), 4)
        cluster.wait_for(lambda status: is_saved(status, (seed + 1) * PROMPT_BLOCKS), 60, "all is saved")  # noqa: B023
    cluster.wait_for(lambda status: cached_blocks(status) > NUM_BLOCKS, 60, "the router hears of the blocks below")
    tokens, answer = generate_tokens(cluster.grpc_address, prompt(0), 4)
    assert tokens == expected_tokens(prompt(0), 4)
    assert answer.usage.cached_tokens == PROMPT_TOKENS - 16
    status = cluster.wait_for(
        lambda status: prefill_worker(status)["counters"].get("kv_tier_restores", 0) > 0, 60, "its report tells of it"
    )
    counters = prefill_worker(status)["counters"]
    assert counters["kv_tier_restores"] == 1
    assert counters["kv_tier_evicted_lost_blocks"] == 0


def is_saved(status: dict[str, Any], num_blocks: int) -> bool:
    """So many blocks ever: a report of before the prompt has nothing that is not saved either."""
    counters = prefill_worker(status)["counters"]
    return bool(counters.get("kv_tier_saved_blocks", 0) >= num_blocks and counters["kv_tier_unsaved_blocks"] == 0)


def cached_blocks(status: dict[str, Any]) -> int:
    """Of the prefill worker, as the router believes, with those below."""
    believed: int = status["prefix_index"]["workers"][prefill_worker(status)["worker_id"]]["blocks_with_tiers"]
    return believed
