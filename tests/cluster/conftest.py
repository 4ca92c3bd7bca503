"""A real Redis for the tests: the embedded server as a child process, on a socket in a private directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cluster.embedded_redis import EmbeddedRedis, prepare_embedded_redis
from cluster.guarded_exec import guarded_command
from cluster.redis_client import RedisClient, RedisUnavailable

READY_TIMEOUT_S = 60.0


class RedisServer:
    """The embedded server as a process that a test may kill, stop, and start again empty."""

    def __init__(self, embedded: EmbeddedRedis) -> None:
        self.embedded = embedded
        self._process: asyncio.subprocess.Process | None = None
        self._clients: list[RedisClient] = []

    def client(self) -> RedisClient:
        client = RedisClient(self.embedded.url, self.embedded.password_file)
        self._clients.append(client)
        return client

    async def start(self) -> None:
        command = guarded_command(os.getpid(), self.embedded.command)
        self._process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        client = self.client()
        async with asyncio.timeout(READY_TIMEOUT_S):
            while not await _answers(client):  # noqa: ASYNC110  another process has no event to set
                await asyncio.sleep(0.005)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None

    def suspend(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    async def flush(self) -> None:
        """Deletes every key, as FLUSHALL does (which Tandem's own user may not send)."""
        client = self.client()
        keys = [key async for key in client.scan(b"tandem:*")]
        if keys:
            await client.run(lambda redis: redis.delete(*keys))

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.kill()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise RuntimeError("the server is not running")
        self._process.send_signal(number)


async def _answers(client: RedisClient) -> bool:
    try:
        await client.run(lambda redis: redis.ping())
    except RedisUnavailable:
        return False
    return True


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A short private path: pytest's own are too long for a socket's address."""
    path = Path(tempfile.mkdtemp(prefix="tandem-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def redis_server(runtime_dir: Path) -> AsyncIterator[RedisServer]:
    server = RedisServer(prepare_embedded_redis(runtime_dir))
    await server.start()
    yield server
    await server.close()
