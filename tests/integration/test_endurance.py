"""What hours of it would show, in seconds: idle connections cost next to nothing, faults at random cost nothing at all.

`python -m benchmarks.idle_connections` and `benchmarks.soak` are the same with thousands of connections and for hours.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from benchmarks.idle_connections import Connection, first_token_ms, open_idle
from benchmarks.soak import FLAGS, Soak
from tests.integration.conftest import RunningCluster

pytestmark = [pytest.mark.model, pytest.mark.cluster]

TIMEOUT_S = 120.0
NUM_IDLE = 300  # of each kind: what a process may open without asking for more
MAX_BYTES_EACH = 40 * 1024
NUM_ROUNDS, NUM_ASKED = 3, 15
HTTP_2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
NUM_FAULTS = 4
SEED = 11  # kills, stops and asks workers and Redis


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., RunningCluster]) -> RunningCluster:
    return start_cluster(*FLAGS)


async def test_f33_idle_connections_cost_little_memory_and_no_work(cluster: RunningCluster) -> None:
    router = next(
        one for one in psutil.Process(cluster.process.pid).children(recursive=True) if "router" in one.cmdline()
    )
    async with (
        asyncio.timeout(TIMEOUT_S),
        httpx.AsyncClient(base_url=cluster.url, trust_env=False, timeout=60) as client,
    ):
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await _cpu_s(client, model, router)
        before_s, before_bytes = await _cpu_s(client, model, router), router.memory_info().rss
        http, grpc = urlsplit(cluster.url), urlsplit(f"grpc://{cluster.grpc_address}")
        opened = [await open_idle(http.hostname or "", http.port or 0) for _ in range(NUM_IDLE)]
        opened += [await _open_grpc(grpc.hostname or "", grpc.port or 0) for _ in range(NUM_IDLE)]
        each_bytes = (router.memory_info().rss - before_bytes) / len(opened)
        with_them_s = await _cpu_s(client, model, router)
        num_open = sum(not reader.at_eof() for reader, _ in opened)
        for _, writer in opened:
            writer.close()
    assert num_open == 2 * NUM_IDLE
    assert each_bytes <= MAX_BYTES_EACH
    assert with_them_s <= 2 * before_s, (
        "work for each request, by the router's CPU time: waiting depends on the machine"
    )


async def _cpu_s(client: httpx.AsyncClient, model: str, router: psutil.Process) -> float:
    """The router's CPU time for some requests, the least of some rounds."""
    rounds = []
    for first in range(NUM_ROUNDS):
        started = sum(router.cpu_times()[:2])
        for number in range(NUM_ASKED):
            await first_token_ms(client, model, 1000 * first + number)
        rounds.append(sum(router.cpu_times()[:2]) - started)
    return min(rounds)


async def _open_grpc(host: str, port: int) -> Connection:
    """It has shaken hands; a client would hold it for its next call."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(HTTP_2_PREFACE)
    async with asyncio.timeout(TIMEOUT_S):
        await reader.readexactly(9)
    return reader, writer


async def test_f44_faults_at_random_cost_no_answer_no_block_and_no_descriptor(cluster: RunningCluster) -> None:
    supervisor = psutil.Process(cluster.process.pid)
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False, timeout=TIMEOUT_S) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        ends_s = time.monotonic() + TIMEOUT_S
        soak = Soak(client, supervisor, SEED, ends_s, pause_s=(0.5, 1.0), max_faults=NUM_FAULTS)
        async with asyncio.timeout(2 * TIMEOUT_S):
            await soak.run(model)
            lost = await soak.lost_blocks()
    assert soak.faults.total() == NUM_FAULTS, "or the machine was too slow for them"
    assert set(soak.outcomes) == {"whole"}, soak.outcomes
    assert sum(soak.outcomes.values()) >= NUM_FAULTS
    assert lost == 0
    assert soak.growing() == []
