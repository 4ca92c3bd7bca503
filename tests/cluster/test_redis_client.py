"""Commands end in half a second, and a cut-off command never answers somebody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

import pytest

from cluster.errors import StartupError
from cluster.redis_client import COMMAND_TIMEOUT_S, RedisClient, RedisUnavailable
from tests.cluster.conftest import RedisServer

pytestmark = pytest.mark.cluster


async def test_f12_command_to_a_silent_server_ends_in_half_a_second(redis_server: RedisServer) -> None:
    client = redis_server.client()
    await client.run(lambda redis: redis.ping())
    redis_server.suspend()
    started = time.monotonic()
    try:
        with pytest.raises(RedisUnavailable):
            await client.run(lambda redis: redis.ping())
    finally:
        redis_server.resume()
    assert time.monotonic() - started < COMMAND_TIMEOUT_S + 10  # it would be for ever


async def test_f14_s_b44_cancelled_command_never_answers_the_next_caller(redis_server: RedisServer) -> None:
    client = redis_server.client()
    await client.run(lambda redis: redis.mset({"tandem:a": "A", "tandem:b": "B"}))
    for delay_steps in range(40):
        task = asyncio.create_task(client.run(lambda redis: redis.get("tandem:a")))
        for _ in range(delay_steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await client.run(lambda redis: redis.get("tandem:b")) == b"B"


async def test_f14_s_b44_timed_out_command_never_answers_the_next_caller(redis_server: RedisServer) -> None:
    client = redis_server.client()
    await client.run(lambda redis: redis.mset({"tandem:a": "A", "tandem:b": "B"}))
    redis_server.suspend()
    try:
        with pytest.raises(RedisUnavailable):
            await client.run(lambda redis: redis.get("tandem:a"))
    finally:
        redis_server.resume()
    assert await client.run(lambda redis: redis.get("tandem:b")) == b"B"


async def test_f10_cancel_that_comes_with_the_answer_is_not_lost(redis_server: RedisServer) -> None:
    async def loses_a_cancel(_: object) -> str:
        # What `asyncio.wait_for` does in Python 3.11, and redis-py with it, when both come in one turn of the loop.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "answer"

    task = asyncio.create_task(redis_server.client().run(loses_a_cancel))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()


async def test_scan_finds_every_key_once_asked_for(redis_server: RedisServer) -> None:
    client = redis_server.client()
    keys = {f"tandem:worker:{number}": "x" for number in range(2500)}
    await client.run(lambda redis: redis.mset(keys))
    assert {key.decode() async for key in client.scan(b"tandem:worker:*")} == set(keys)


def test_url_that_is_none_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match="redis url"):
        RedisClient("http://x")


def test_missing_password_file_is_a_startup_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="Redis password"):
        RedisClient("redis://127.0.0.1:1", tmp_path / "none")


async def test_f30_no_free_descriptor_is_redis_unavailable_and_passes(redis_server: RedisServer) -> None:
    program = (
        "import asyncio, os, pathlib, resource, sys\n"
        "from cluster.redis_client import RedisClient, RedisUnavailable\n"
        "async def main():\n"
        "    client = RedisClient(sys.argv[1], pathlib.Path(sys.argv[2]))\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "    taken = []\n"
        "    try:\n"
        "        while True: taken.append(os.dup(0))\n"
        "    except OSError: pass\n"
        "    try:\n"
        "        await client.run(lambda redis: redis.ping())\n"
        "    except RedisUnavailable as error: print('unavailable')\n"
        "    for descriptor in taken: os.close(descriptor)\n"
        "    print(await client.run(lambda redis: redis.ping()))\n"
        "    await client.close()\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    embedded = redis_server.embedded
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, embedded.url, str(embedded.password_file),
        stdout=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    printed, _ = await asyncio.wait_for(child.communicate(), 20)
    assert printed.decode().split() == ["unavailable", "True"]
