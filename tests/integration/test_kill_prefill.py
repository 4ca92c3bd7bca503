"""A killed prefill worker, and a client that hangs up: a correct answer or a clear error, and no block is lost."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.exactness.make_greedy_reference import REFERENCE_FILE
from tests.integration.conftest import RunningCluster
from tests.integration.grpc_client import generate_tokens

pytestmark = [pytest.mark.model, pytest.mark.cluster]

LONG_PROMPT_TOKENS = 1000
# 1,000 tokens of float32 KV are 46 MB: two seconds and more on this link, so the kill falls into the transfer.
SLOW_LINK_BYTES_PER_S = 20_000_000


def test_sigkill_of_prefill_in_mid_transfer_ends_in_the_right_answer(
    start_own_cluster: Callable[..., RunningCluster],
) -> None:
    # A policy that prefills in the pool whenever it has one: `cache_aware` may rightly find the slow link too dear.
    cluster = start_own_cluster(
        "--dtype", "float32", "--policy", "least_loaded", "--link-bytes-per-s", str(SLOW_LINK_BYTES_PER_S)
    )
    row = _reference_row(LONG_PROMPT_TOKENS)
    prefill = _worker(cluster.status_of_ready(), "prefill")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate_tokens, cluster.grpc_address, row["prompt"], 64)
        cluster.wait_for(_kv_moves, 60, "KV moves")
        os.kill(int(prefill["details"]["pid"]), signal.SIGKILL)
        tokens, _ = answer.result(timeout=120)
    assert tokens == row["tokens"]
    cluster.wait_for(_all_blocks_are_back, 60, "every block free or cached, none quarantined")
    # The supervisor starts the worker again, under its name and as a new peer.
    cluster.wait_for(lambda status: _is_restarted(status, prefill), 60, "prefill worker is back")
    # Prompts that nobody has; the decode worker may compute some itself until it has met its new peer.
    prompts = (row["prompt"][end - 1 :: -1] for end in itertools.count(100))
    deadline = time.monotonic() + 60
    while not generate_tokens(cluster.grpc_address, next(prompts), 4)[1].timeline.prefill_worker_id:
        assert time.monotonic() < deadline, "the new prefill worker computes no prompt"


def test_client_that_hangs_up_gives_its_blocks_back(start_own_cluster: Callable[..., RunningCluster]) -> None:
    cluster = start_own_cluster()
    body = json.dumps({"model": "SmolLM2-135M-Instruct", "prompt": "Tell me", "max_tokens": 2000, "stream": True,
                       "ignore_eos": True}).encode()  # fmt: skip
    address = urlsplit(cluster.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    status = cluster.wait_for(_all_blocks_are_back, 60, "blocks of the aborted request are back")
    assert _worker(status, "decode")["load"]["running_requests"] == 0


def _reference_row(num_tokens: int) -> dict[str, Any]:
    row: dict[str, Any] = next(
        row for row in json.loads(REFERENCE_FILE.read_text()) if len(row["prompt"]) == num_tokens
    )
    return row


def _worker(status: dict[str, Any], role: str) -> dict[str, Any]:
    worker: dict[str, Any] = next(worker for worker in status["workers"] if worker["role"] == role)
    return worker


def _all_blocks_are_back(status: dict[str, Any]) -> bool:
    return all(
        worker["load"]["free_blocks"] == worker["load"]["total_blocks"]
        and worker["load"]["quarantined_blocks"] == 0
        and worker["block_conservation_error"] == 0
        for worker in status["workers"]
    )


def _is_restarted(status: dict[str, Any], before: dict[str, Any]) -> bool:
    return any(
        worker["worker_id"] == before["worker_id"]
        and worker["incarnation"] != before["incarnation"]
        and worker["state"] == "ready"  # known is not enough: a router that cannot reach it yet prefills elsewhere
        for worker in status["workers"]
    )


def _kv_moves(status: dict[str, Any]) -> bool:
    return bool(_worker(status, "decode")["counters"].get("kv_bytes_received", 0) > 0)
