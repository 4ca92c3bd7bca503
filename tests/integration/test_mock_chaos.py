"""Faults under load on mock workers, whose every token is known beforehand: none is wrong, none is lost, none is sent
twice. The load is a few streams that run all the time; each is compared token by token.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import psutil
import pytest

from tests.integration.conftest import RunningCluster
from tests.integration.grpc_client import generate_tokens
from tests.integration.mock_tokens import VOCAB_SIZE, expected_tokens

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(300)]

NUM_STREAMS = 6
NUM_TOKENS = 24
PROMPT_TOKENS = 400
BACK_TIMEOUT_S = 30.0


class Load:
    """Streams one after the other on each of `NUM_STREAMS` threads, until the block ends."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_over = threading.Event()
        self.num_done = 0
        self._pool = ThreadPoolExecutor(NUM_STREAMS)
        self._futures: list[Future[None]] = [self._pool.submit(self._run, thread) for thread in range(NUM_STREAMS)]

    def wait_for(self, count: int) -> None:
        """Until so many more answers have ended well, and fails with the first one that did not."""
        target, deadline = self.num_done + count, time.monotonic() + BACK_TIMEOUT_S
        while self.num_done < target:
            for future in self._futures:
                if future.done():
                    future.result()
            assert time.monotonic() < deadline, f"{self.num_done} of {target} answers"
            time.sleep(0.02)

    def close(self) -> None:
        self._is_over.set()
        self._pool.shutdown()
        for future in self._futures:
            future.result()

    def _run(self, thread: int) -> None:
        number = 0
        while not self._is_over.is_set():
            number += 1
            # Half of a prompt is shared by everybody, so that caches and routing by prefix take part.
            prompt = [3 * token % VOCAB_SIZE for token in range(PROMPT_TOKENS // 2)]
            prompt += [(7919 * thread + 104_729 * number + token) % VOCAB_SIZE for token in range(PROMPT_TOKENS // 2)]
            tokens, _ = generate_tokens(self._address, prompt, NUM_TOKENS)
            assert tokens == expected_tokens(prompt, NUM_TOKENS)
            self.num_done += 1


@contextmanager
def under_load(cluster: RunningCluster) -> Iterator[Load]:
    load = Load(cluster.grpc_address)
    try:
        load.wait_for(NUM_STREAMS)
        yield load
        load.wait_for(2 * NUM_STREAMS)
    finally:
        load.close()


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    """Prompts of 400 tokens take 48 ms, answers of 24 tokens some 300 ms: faults fall into every phase."""
    return start_cluster("--engine", "mock", "--prefill", "2", "--decode", "3")


@pytest.fixture(autouse=True)
def whole_again(cluster: RunningCluster) -> Iterator[None]:
    """After each fault the cluster has all its workers, and every block is free or cached."""
    yield
    cluster.wait_for(_is_whole, BACK_TIMEOUT_S, "all workers are back and every block is accounted for")


def test_f03_sigkill_of_a_decode_worker_under_load_loses_no_token(cluster: RunningCluster) -> None:
    with under_load(cluster):
        _signal(cluster, "decode-1", signal.SIGKILL)


def test_f01_f02_sigkill_of_a_prefill_worker_under_load_loses_no_request(cluster: RunningCluster) -> None:
    with under_load(cluster):
        _signal(cluster, "prefill-0", signal.SIGKILL)


def test_f04_a_decode_worker_that_stands_still_for_two_seconds_sends_no_token_twice(cluster: RunningCluster) -> None:
    with under_load(cluster) as load:
        pid = _signal(cluster, "decode-2", signal.SIGSTOP)
        try:
            load_goes_on_s = time.monotonic() + 2.0
            while time.monotonic() < load_goes_on_s:
                time.sleep(0.05)
        finally:
            os.kill(pid, signal.SIGCONT)
        load.wait_for(NUM_STREAMS)


def test_f06_a_prefill_worker_that_stands_still_is_left_for_another(cluster: RunningCluster) -> None:
    with under_load(cluster) as load:
        pid = _signal(cluster, "prefill-1", signal.SIGSTOP)
        try:
            load.wait_for(2 * NUM_STREAMS)
        finally:
            os.kill(pid, signal.SIGCONT)


def test_f10_redis_killed_under_load_fails_nobody_and_prefixes_are_found_again(cluster: RunningCluster) -> None:
    with under_load(cluster) as load:
        _child(cluster, "valkey-server").kill()
        load.wait_for(4 * NUM_STREAMS)
    shared = [3 * token % VOCAB_SIZE for token in range(PROMPT_TOKENS // 2)]
    prompt = [*shared, *range(PROMPT_TOKENS // 2)]
    assert generate_tokens(cluster.grpc_address, prompt, 2)[1].usage.cached_tokens >= 192


def test_f20_workers_that_drain_one_after_the_other_under_load_fail_nobody(cluster: RunningCluster) -> None:
    with under_load(cluster) as load:
        for worker_id in ("prefill-0", "decode-0", "decode-1"):
            before = _worker(cluster.status(), worker_id)["incarnation"]
            _signal(cluster, worker_id, signal.SIGTERM)
            cluster.wait_for(_is_another(worker_id, before), BACK_TIMEOUT_S, f"{worker_id} drained and came back")
            load.wait_for(2)


def test_f15_a_killed_router_breaks_its_streams_visibly_and_the_next_one_serves(cluster: RunningCluster) -> None:
    prompt = list(range(PROMPT_TOKENS))
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(generate_tokens, cluster.grpc_address, prompt, 4000) for _ in range(NUM_STREAMS)]
        cluster.wait_for(lambda status: status["running_requests"] == NUM_STREAMS, BACK_TIMEOUT_S, "streams run")
        _child(cluster, " router ").kill()
        for stream in streams:
            with pytest.raises(grpc.RpcError):  # never an end that looks like one
                stream.result(BACK_TIMEOUT_S)
    deadline = time.monotonic() + BACK_TIMEOUT_S
    while not _is_served(cluster):
        assert time.monotonic() < deadline, "the next router does not serve"
        time.sleep(0.1)
    cluster.wait_for(_is_whole, 10, "workers let go of what nobody reads")


def test_rt63_prefixes_are_still_followed_when_one_of_the_workers_is_dead(cluster: RunningCluster) -> None:
    prompt = [11 * token % VOCAB_SIZE for token in range(PROMPT_TOKENS)]
    generate_tokens(cluster.grpc_address, prompt, 2)
    _signal(cluster, "prefill-0", signal.SIGKILL)
    generate_tokens(cluster.grpc_address, prompt, 2)
    assert generate_tokens(cluster.grpc_address, prompt, 2)[1].usage.cached_tokens >= PROMPT_TOKENS - 16


# --- the cluster ------------------------------------------------------------------------------------------------------


def _worker(status: dict[str, Any], worker_id: str) -> dict[str, Any]:
    worker: dict[str, Any] = next(worker for worker in status["workers"] if worker["worker_id"] == worker_id)
    return worker


def _signal(cluster: RunningCluster, worker_id: str, number: signal.Signals) -> int:
    pid = int(_worker(cluster.status(), worker_id)["details"]["pid"])
    os.kill(pid, number)
    return pid


def _child(cluster: RunningCluster, word: str) -> psutil.Process:
    children = psutil.Process(cluster.process.pid).children(recursive=True)
    return next(child for child in children if word in f" {' '.join(child.cmdline())} ")


def _is_another(worker_id: str, before: str) -> Callable[[dict[str, Any]], bool]:
    def is_reached(status: dict[str, Any]) -> bool:
        now = [worker for worker in status["workers"] if worker["worker_id"] == worker_id]
        return bool(now) and now[0]["incarnation"] != before and now[0]["state"] == "ready"

    return is_reached


def _is_whole(status: dict[str, Any]) -> bool:
    workers = status["workers"]
    return (
        status["pools"] == {"decode": 3, "prefill": 2}
        and all(worker["state"] == "ready" for worker in workers)
        and status["block_conservation_error"] == 0
        and all(worker["load"]["free_blocks"] == worker["load"]["total_blocks"] for worker in workers)
        and all(worker["booked"] == {"requests": 0, "prefill_tokens": 0, "kv_tokens": 0} for worker in workers)
    )


def _is_served(cluster: RunningCluster) -> bool:
    body = json.dumps({"model": "SmolLM2-135M-Instruct", "prompt": "a", "max_tokens": 2}).encode()
    request = urllib.request.Request(  # noqa: S310  our own URL
        f"{cluster.url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except OSError:
        return False
