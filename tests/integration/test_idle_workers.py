"""Workers that are asked nothing sleep: how often one of their threads wakes up is counted by the kernel.

A thread that polls shows however busy the machine is: it goes to sleep again each time, which no load adds to.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from benchmarks.mock_fleet import Usage
from cluster.embedded_redis import prepare_embedded_redis
from tests.cluster.conftest import RedisServer
from tests.integration.worker_processes import WorkerFleet, WorkerProcess, fleet_in

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(300)]

# A heartbeat, a look for asks and, on the decode worker, a look at the membership every other second make some ten; a
# single loop that asks Redis twenty times a second makes forty more.
MAX_WAKE_UPS_PER_S = 25
WINDOW_S = 1.5
NUM_WINDOWS = 6  # the quietest counts: the pings behind a handshake, a new connection, are no polling
LINKED_TIMEOUT_S = 60.0


@pytest.fixture
async def folder() -> AsyncIterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tandem-idle-"))  # pytest's own are too long for a socket's address
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def redis_server(folder: Path) -> AsyncIterator[RedisServer]:
    server = RedisServer(prepare_embedded_redis(folder))
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def fleet(folder: Path, default_model_path: Path) -> AsyncIterator[WorkerFleet]:
    async with fleet_in(folder, default_model_path) as fleet:
        yield fleet


async def test_idle_workers_do_not_poll(fleet: WorkerFleet, redis_server: RedisServer) -> None:
    membership = {
        "engine": "mock",
        "redis_url": redis_server.embedded.url,
        "redis_password_file": redis_server.embedded.password_file,
    }
    prefill, decode = await asyncio.gather(
        fleet.start("prefill", "prefill-0", **membership), fleet.start("decode", "decode-0", **membership)
    )
    await decode.wait_for(
        lambda status: [peer.state for peer in status.peers] == ["ready"], LINKED_TIMEOUT_S, "linked by membership"
    )
    assert await quietest([prefill, decode]) <= MAX_WAKE_UPS_PER_S


async def quietest(workers: list[WorkerProcess]) -> float:
    """Wake-ups a second of the worker that has more of them, in the first window that is quiet enough, or the least."""
    processes = [psutil.Process(worker.process.pid) for worker in workers]
    clock, seen = asyncio.get_running_loop().time, []
    for _ in range(NUM_WINDOWS):
        before, started_s = [Usage.of(process).switches for process in processes], clock()
        await asyncio.sleep(WINDOW_S)
        woken = [Usage.of(process).switches - count for process, count in zip(processes, before, strict=True)]
        seen.append(max(woken) / (clock() - started_s))
        if seen[-1] <= MAX_WAKE_UPS_PER_S:
            break
    return min(seen)
