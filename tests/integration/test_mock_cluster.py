"""`tandem serve --engine mock`: real processes, handoff and caches; tokens are known without a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.conftest import RunningCluster
from tests.integration.grpc_client import generate_tokens
from tests.integration.mock_tokens import VOCAB_SIZE, expected_tokens

pytestmark = [pytest.mark.model, pytest.mark.cluster]

PROMPT = [(7 * index) % VOCAB_SIZE for index in range(1000)]


def _workers(status: dict[str, Any], role: str) -> list[dict[str, Any]]:
    return [worker for worker in status["workers"] if worker["role"] == role]


def test_a_mock_cluster_hands_kv_over_and_finds_prefixes(start_own_cluster: Callable[..., RunningCluster]) -> None:
    cluster = start_own_cluster(
        "--engine", "mock", "--prefill", "2", "--decode", "2", "--policy", "cache_aware", "--prefill-fallback", "deny"
    )
    assert {worker["details"]["backend"] for worker in cluster.status_of_ready()["workers"]} == {"mock"}
    tokens, first = generate_tokens(cluster.grpc_address, PROMPT, 20)
    assert tokens == expected_tokens(PROMPT, 20)
    assert first.timeline.prefill_worker_id
    assert first.timeline.kv_bytes > 0
    # 1,000 tokens take 108.5 ms by the default timing; a busy machine may add to it.
    assert first.timeline.prefill_compute_us > 100_000
    cluster.wait_for(_hears_of_blocks, 60, "the router hears of the first prompt's blocks")
    tokens, second = generate_tokens(cluster.grpc_address, [*PROMPT[:992], *range(50)], 5)
    assert tokens == expected_tokens([*PROMPT[:992], *range(50)], 5)
    assert second.usage.cached_tokens == 992, second
    status = cluster.wait_for(_all_are_idle, 60, "every block is free or cached")
    assert sum(worker["counters"].get("transfers_acknowledged", 0) for worker in _workers(status, "prefill")) >= 1


def _hears_of_blocks(status: dict[str, Any]) -> bool:
    """Of those 62 that the two prompts share."""
    believed = status["prefix_index"]["workers"]
    return any(believed[worker["worker_id"]]["blocks"] >= 62 for worker in _workers(status, "prefill"))


def _all_are_idle(status: dict[str, Any]) -> bool:
    loads = [worker["load"] for worker in status["workers"]]
    return status["block_conservation_error"] == 0 and all(
        load["free_blocks"] == load["total_blocks"] for load in loads
    )
