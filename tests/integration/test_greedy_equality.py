"""Tokens through router, prefill and decode process equal transformers' greedy tokens in float32."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tandem.v1 import inference_pb2

from tests.exactness.make_greedy_reference import REFERENCE_FILE, greedy_tokens, load_reference_model
from tests.integration.conftest import RunningCluster
from tests.integration.grpc_client import generate_tokens
from tests.integration.worker_processes import Router, fleet_in

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(900)]

# Every prompt is to travel: a decode worker would help out where several come at once.
APART = ("--prefill", "1", "--decode", "1", "--prefill-fallback", "deny")
TOPOLOGIES = {
    "shm": (*APART, "--transport", "shm"),
    "tcp": (*APART, "--transport", "tcp"),
    "aggregated": ("--prefill", "0", "--decode", "0", "--aggregated", "1"),
}
NUM_AT_A_TIME = 4
NUM_CONCURRENT = 16
LIVE_ROWS = (0, 5, 16)
EAGER_WORKER = "tests.integration.eager_worker"


@pytest.fixture(scope="module")
def reference() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(REFERENCE_FILE.read_text())
    return rows


def test_greedy_reference_is_live(reference: list[dict[str, Any]], default_model_path: Path) -> None:
    torch.set_num_threads(1)
    model, _ = load_reference_model(default_model_path)
    for row in (reference[index] for index in LIVE_ROWS):
        tokens, _ = greedy_tokens(model, row["prompt"], 8)
        assert tokens == row["tokens"][:8]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_tokens_equal_transformers(
    topology: str, reference: list[dict[str, Any]], start_own_cluster: Callable[..., RunningCluster]
) -> None:
    cluster = start_own_cluster(*TOPOLOGIES[topology], "--dtype", "float32")

    def ask(row: dict[str, Any]) -> tuple[list[int], inference_pb2.GenerateResponse]:
        return generate_tokens(cluster.grpc_address, row["prompt"], len(row["tokens"]))

    # A few at a time: what stands beside a sequence must not change its tokens, and the suite stays short.
    with ThreadPoolExecutor(NUM_AT_A_TIME) as pool:
        answers = list(pool.map(ask, reference))
    for row, (tokens, last) in zip(reference, answers, strict=True):
        assert tokens == row["tokens"], f"prompt of {len(row['prompt'])} tokens"
        assert last.usage.prompt_tokens == len(row["prompt"])
        if topology != "aggregated":
            assert last.timeline.prefill_worker_id
            assert last.timeline.prefill_worker_id != last.timeline.decode_worker_id
            assert last.timeline.transport == topology


def test_concurrent_requests_are_batched_and_have_the_tokens_they_have_alone(
    reference: list[dict[str, Any]], start_own_cluster: Callable[..., RunningCluster]
) -> None:
    cluster = start_own_cluster(*TOPOLOGIES["shm"], "--dtype", "float32")
    rows = [*reference[:14], reference[16], reference[20]]
    with ThreadPoolExecutor(NUM_CONCURRENT) as pool:
        answers = list(pool.map(lambda row: generate_tokens(cluster.grpc_address, row["prompt"], 64)[0], rows))
    assert answers == [row["tokens"] for row in rows]
    decode = [worker for worker in cluster.status_of_ready()["workers"] if worker["role"] == "decode"]
    assert max(worker["counters"]["max_batch_size"] for worker in decode) >= NUM_CONCURRENT // 4


async def test_s33_only_the_decode_worker_speculates_with_a_trained_drafter_and_no_token_changes(
    reference: list[dict[str, Any]], tmp_path: Path, default_model_path: Path
) -> None:
    """The prefill worker knows nothing of it; the drafter learns each request from the rows that decoding gives."""
    rows = reference[:6]
    async with fleet_in(tmp_path, default_model_path, EAGER_WORKER) as fleet:
        prefill, decode = await asyncio.gather(
            fleet.start("prefill", "prefill-0"), fleet.start("decode", "decode-0", speculation="eagle")
        )
        async with Router(decode) as router:
            answers = await asyncio.gather(
                *(router.generate(f"r{number}", row["prompt"], 64, [prefill]) for number, row in enumerate(rows))
            )
        counters = (await decode.status()).counters
        assert [answer.token_ids for answer in answers] == [row["tokens"] for row in rows]
        assert {answer.last.timeline.prefill_worker_id for answer in answers} == {"prefill-0"}
        assert counters["speculation_drafts_accepted"] > 0
        assert not any(name.startswith("speculation") for name in (await prefill.status()).counters)
