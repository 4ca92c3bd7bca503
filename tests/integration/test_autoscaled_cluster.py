"""`tandem serve --autoscale` with mock workers: the ratio follows the traffic, and no client notices.

Minutes of policy are shortened to seconds; the processes, the router, Redis and the drains are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.autoscaler.decide import Action
from deploy.autoscaler.journal import Entry, TickEntry, read_journal
from deploy.autoscaler.replay import replay
from tests.integration.conftest import RunningCluster
from tests.integration.grpc_client import generate_tokens
from tests.integration.mock_tokens import VOCAB_SIZE, expected_tokens

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(600)]

POLICY = """\
version: 1
name: seconds
tick_s: 1.0
start_timeout_s: 30.0
slo: {ttft_ms: 1500.0, itl_ms: 60.0}
prefill: {min: 1, max: 2}
decode: {min: 1, max: 2}
scale_down: {window_s: 4.0, cooldown_s: 2.0, after_up_s: 2.0}
"""
# A drain is over before a stream is: what is left moves.
DRAIN_TIMEOUT_S = "1"
TIMEOUT_S = 120.0


class Traffic:
    """Streams whose tokens are checked, a given number at a time."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._pool = ThreadPoolExecutor(200)
        self._answers: list[Future[None]] = []

    def send(self, prompt_tokens: int, output_tokens: int, count: int) -> None:
        for _ in range(count):
            number = len(self._answers)
            prompt = [(31 * number + 7 * index) % VOCAB_SIZE for index in range(prompt_tokens)]
            self._answers.append(self._pool.submit(self._ask, prompt, output_tokens))

    def _ask(self, prompt: list[int], output_tokens: int) -> None:
        tokens, _ = generate_tokens(self._cluster.grpc_address, prompt, output_tokens)
        assert tokens == expected_tokens(prompt, output_tokens)

    def finish(self) -> int:
        """Raises what the first answer that was not right raised; the number of those that were."""
        for answer in self._answers:
            answer.result(TIMEOUT_S)
        return len(self._answers)

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    return tmp_path


def pools(cluster: RunningCluster) -> tuple[int, int]:
    """Ready prefill and decode workers."""
    ready = [worker["role"] for worker in cluster.status()["workers"] if worker["state"] == "ready"]
    return ready.count("prefill"), ready.count("decode")


def send_until(traffic: Traffic, shape: tuple[int, int, int], is_reached: Callable[[], bool], what: str) -> None:
    """`shape`: prompt tokens, output tokens, requests a second."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_reached():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not reached in {TIMEOUT_S} s: {what}")
        traffic.send(*shape)
        time.sleep(1.0)


def test_rt47_f20_the_ratio_follows_the_traffic_and_no_stream_is_hurt(
    start_own_cluster: Callable[..., RunningCluster], home: Path
) -> None:
    policy = home / "policy.yaml"
    policy.write_text(POLICY)
    cluster = start_own_cluster("--engine", "mock", "--autoscale", str(policy), "--drain-timeout-s", DRAIN_TIMEOUT_S)
    traffic = Traffic(cluster)
    try:
        send_until(traffic, (1200, 4, 12), lambda: pools(cluster)[0] == 2, "prompts grow prefill")
        send_until(traffic, (20, 250, 16), lambda: pools(cluster) == (1, 2), "answers grow decode, prefill shrinks")
        # Streams of some 6 s run while the pool goes back to its minimum: a drain of 1 s cannot wait for them.
        traffic.send(20, 400, 6)
        cluster.wait_for(lambda _: pools(cluster) == (1, 1), TIMEOUT_S, "back to the minimum")
        num_answers = traffic.finish()
    finally:
        traffic.close()
    assert num_answers > 50
    (journal,) = (home / "scaler").glob("*.jsonl")
    entries = list(read_journal(journal))
    _check_decisions(entries)


def _check_decisions(entries: list[Entry]) -> None:
    ticks = [entry for entry in entries if isinstance(entry, TickEntry)]
    prefill = [tick.decision.prefill.action for tick in ticks]
    decode = [tick.decision.decode.action for tick in ticks]
    assert Action.UP in prefill
    assert Action.UP in decode
    # Each at its own time, unless this machine is so busy that tokens are late from the start.
    first_up = ticks[decode.index(Action.UP)].decision.decode
    assert prefill.index(Action.UP) < decode.index(Action.UP) or "ITL" in first_up.reason
    assert Action.DOWN in prefill
    assert Action.DOWN in decode
    assert all(tick.decision.prefill.current >= 1 and tick.decision.decode.current >= 1 for tick in ticks)
    assert all(tick.is_same for tick in replay(entries)), "a recorded run decides the same again"
