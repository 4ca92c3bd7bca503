"""Faults under load on mock workers, whose every token is known beforehand: none is wrong, none is lost, none is sent
twice. The load is a few streams that run all the time; each is compared token by token.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import psutil
import pytest
from tandem.v1 import inference_pb2, inference_pb2_grpc

from tests.integration.conftest import RunningCluster
from tests.integration.grpc_client import generate_tokens
from tests.integration.mock_tokens import VOCAB_SIZE, expected_tokens

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(600)]

NUM_STREAMS = 6
NUM_TOKENS = 24
PROMPT_TOKENS = 400
BACK_TIMEOUT_S = 60.0


class Load:
    """Streams one after the other on each of `NUM_STREAMS` threads, until the block ends."""

    def __init__(self, address: str, prompt_tokens: int = PROMPT_TOKENS, num_tokens: int = NUM_TOKENS) -> None:
        self._address = address
        self._half = prompt_tokens // 2
        self._num_tokens = num_tokens
        self._is_over = threading.Event()
        self.num_done = 0
        self._pool = ThreadPoolExecutor(NUM_STREAMS)
        self._futures: list[Future[None]] = [self._pool.submit(self._run, thread) for thread in range(NUM_STREAMS)]

    def wait_for(self, count: int) -> None:
        """Until so many more answers have ended well, and fails with the first one that did not."""
        target, deadline = self.num_done + count, time.monotonic() + BACK_TIMEOUT_S + count
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
            prompt = [3 * token % VOCAB_SIZE for token in range(self._half)]
            prompt += [(7919 * thread + 104_729 * number + token) % VOCAB_SIZE for token in range(self._half)]
            tokens, _ = generate_tokens(self._address, prompt, self._num_tokens)
            assert tokens == expected_tokens(prompt, self._num_tokens)
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


def test_f01_f02_rt65_s_b56_sigkill_of_a_prefill_worker_under_load_loses_no_request_and_touches_no_decode_worker(
    cluster: RunningCluster,
) -> None:
    before = _decode_workers(cluster.status_of_ready())
    with under_load(cluster) as load:
        _signal(cluster, "prefill-0", signal.SIGKILL)
        load.wait_for(2)
        with urllib.request.urlopen(f"{cluster.url}/readyz", timeout=30) as ready:  # noqa: S310
            assert ready.status == 200
        cluster.wait_for(lambda status: _decode_workers(status) == before, BACK_TIMEOUT_S, "the same decode workers")


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


def test_f10_s_b66_redis_killed_under_load_fails_nobody_and_prefixes_are_found_again(cluster: RunningCluster) -> None:
    with under_load(cluster) as load:
        _child(cluster, "valkey-server").kill()
        load.wait_for(4 * NUM_STREAMS)
    shared = [3 * token % VOCAB_SIZE for token in range(PROMPT_TOKENS // 2)]
    prompt = [*shared, *range(PROMPT_TOKENS // 2)]
    _until_cached(cluster, prompt, 192)


def test_f20_s_b54_s_b55_workers_that_drain_one_after_the_other_under_load_fail_nobody(cluster: RunningCluster) -> None:
    with under_load(cluster) as load:
        for worker_id in ("prefill-0", "decode-0"):
            before = _worker(cluster.status_of_ready(), worker_id)["incarnation"]
            _signal(cluster, worker_id, signal.SIGTERM)
            cluster.wait_for(_is_another(worker_id, before), BACK_TIMEOUT_S, f"{worker_id} drained and came back")
            load.wait_for(2)


def test_f15_s_b66_a_killed_router_breaks_its_streams_visibly_and_the_next_one_serves(cluster: RunningCluster) -> None:
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
    cluster.wait_for(_is_whole, 60, "workers let go of what nobody reads")


@pytest.mark.fronts("http", "grpc")
def test_rt56_s_b49_s_b50_clients_that_leave_at_any_moment_leave_no_block_behind(cluster: RunningCluster) -> None:
    """Queued, in prefill (48 ms), as it ends, in transfer, at the first token, in the middle: `whole_again` counts."""
    moments_s = [0.0, 0.005, 0.02, 0.043, 0.048, 0.053, 0.06, 0.08, 0.12, 0.25]

    def leave(number: int) -> None:
        prompt = [(31 * number + token) % VOCAB_SIZE for token in range(PROMPT_TOKENS)]
        ends_s = moments_s[number % len(moments_s)]
        if number % 2:
            _leave_http(cluster.url, prompt, ends_s)
        else:
            _leave_grpc(cluster.grpc_address, prompt, ends_s)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        list(pool.map(leave, range(12 * len(moments_s))))
    with under_load(cluster):
        pass  # what comes next is served, and right


def test_s_b52_hundreds_of_answers_later_they_are_still_right(cluster: RunningCluster) -> None:
    load = Load(cluster.grpc_address, prompt_tokens=48, num_tokens=3)
    try:
        load.wait_for(300)
    finally:
        load.close()


def test_rt63_prefixes_are_still_followed_when_one_of_the_workers_is_dead(cluster: RunningCluster) -> None:
    prompt = [11 * token % VOCAB_SIZE for token in range(PROMPT_TOKENS)]
    generate_tokens(cluster.grpc_address, prompt, 2)
    _signal(cluster, "prefill-0", signal.SIGKILL)
    generate_tokens(cluster.grpc_address, prompt, 2)
    _until_cached(cluster, prompt, PROMPT_TOKENS - 16)


# --- the cluster ------------------------------------------------------------------------------------------------------


def _worker(status: dict[str, Any], worker_id: str) -> dict[str, Any]:
    worker: dict[str, Any] = next(worker for worker in status["workers"] if worker["worker_id"] == worker_id)
    return worker


def _decode_workers(status: dict[str, Any]) -> dict[str, str]:
    """Those that are ready, with their incarnations."""
    workers = [worker for worker in status["workers"] if worker["role"] == "decode" and worker["state"] == "ready"]
    return {worker["worker_id"]: worker["incarnation"] for worker in workers}


def _leave_grpc(address: str, prompt: list[int], after_s: float) -> None:
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), max_tokens=NUM_TOKENS)
    with grpc.insecure_channel(address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=BACK_TIMEOUT_S)
        leaving = threading.Timer(after_s, call.cancel)
        leaving.start()
        with suppress(grpc.RpcError):
            _ = list(call)
        leaving.join()


def _leave_http(url: str, prompt: list[int], after_s: float) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    fields = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": NUM_TOKENS, "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=BACK_TIMEOUT_S) as connection:
        connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        ends_s = time.monotonic() + after_s
        while (left_s := ends_s - time.monotonic()) > 0:
            connection.settimeout(left_s)
            with suppress(TimeoutError):
                if not connection.recv(65536):
                    return


def _until_cached(cluster: RunningCluster, prompt: list[int], num_tokens: int) -> None:
    """The router hears of blocks a moment after an answer, and of all of them again a moment after a new Redis."""
    deadline = time.monotonic() + BACK_TIMEOUT_S
    while (cached := generate_tokens(cluster.grpc_address, prompt, 2)[1].usage.cached_tokens) < num_tokens:
        assert time.monotonic() < deadline, f"{cached} tokens were found"


def _signal(cluster: RunningCluster, worker_id: str, number: signal.Signals) -> int:
    def says_its_pid(status: dict[str, Any]) -> bool:
        return "pid" in _worker(status, worker_id)["details"]  # it does not while it has no time to answer

    status = cluster.wait_for(says_its_pid, BACK_TIMEOUT_S, f"{worker_id} answers")
    pid = int(_worker(status, worker_id)["details"]["pid"])
    os.kill(pid, number)
    return pid


def _child(cluster: RunningCluster, word: str) -> psutil.Process:
    for child in psutil.Process(cluster.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            if word in f" {' '.join(child.cmdline())} ":
                return child
    raise AssertionError(f"no process of the cluster has {word!r} in its command")


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
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except OSError:
        return False
