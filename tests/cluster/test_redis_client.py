"""Commands end in half a second, and a cut-off command never answers somebody else."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from cluster.errors import StartupError
from cluster.redis_client import COMMAND_TIMEOUT_S, RedisClient, RedisUnavailable
from tests.cluster.conftest import RedisServer


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
    assert time.monotonic() - started < COMMAND_TIMEOUT_S + 0.2


async def test_f14_cancelled_command_never_answers_the_next_caller(redis_server: RedisServer) -> None:
    client = redis_server.client()
    await client.run(lambda redis: redis.mset({"tandem:a": "A", "tandem:b": "B"}))
    for delay_steps in range(40):
        task = asyncio.create_task(client.run(lambda redis: redis.get("tandem:a")))
        for _ in range(delay_steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await client.run(lambda redis: redis.get("tandem:b")) == b"B"


async def test_f14_timed_out_command_never_answers_the_next_caller(redis_server: RedisServer) -> None:
    client = redis_server.client()
    await client.run(lambda redis: redis.mset({"tandem:a": "A", "tandem:b": "B"}))
    redis_server.suspend()
    try:
        with pytest.raises(RedisUnavailable):
            await client.run(lambda redis: redis.get("tandem:a"))
    finally:
        redis_server.resume()
    assert await client.run(lambda redis: redis.get("tandem:b")) == b"B"


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
