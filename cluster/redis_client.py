"""Redis as Tandem uses it: soft state off the request path, so every command answers within half a second or fails.

There is no retry here: whoever asks goes on with what it knows and asks again at its next tick.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from cluster.errors import StartupError
from cluster.rpc_security import read_secret

COMMAND_TIMEOUT_S = 0.5
# Heartbeats, the view's poll and the KV events of one process, each with at most one command under way.
MAX_CONNECTIONS = 4
SCAN_BATCH = 1000

Answer = TypeVar("Answer")


class RedisUnavailable(Exception):
    """Redis did not answer in time, or not as it should. Serving goes on without it."""


class RedisClient:
    """A bounded pool of connections to one Redis. Owned by the process that opened it, which closes it."""

    def __init__(self, url: str, password_file: Path | None = None) -> None:
        """Connects lazily. Raises `StartupError` for a URL that is not one, or a bad password file."""
        password = read_secret(password_file, "Redis password") if password_file else None
        try:
            self._redis = redis.asyncio.Redis.from_url(
                url,
                password=password,
                socket_timeout=COMMAND_TIMEOUT_S,
                socket_connect_timeout=COMMAND_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                max_connections=MAX_CONNECTIONS,
            )
        except ValueError as error:
            raise StartupError(f"redis url {url!r}: {error}") from None

    async def run(self, command: Callable[[redis.asyncio.Redis], Awaitable[Answer]]) -> Answer:
        """The command's answer. Raises `RedisUnavailable` after at most `COMMAND_TIMEOUT_S`.

        A command that is cut off leaves its connection closed, so no later caller can read its answer.
        """
        task = asyncio.current_task()
        num_cancels = task.cancelling() if task is not None else 0
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                answer = await command(self._redis)
        except (AuthenticationError, NoPermissionError) as error:
            raise RedisUnavailable(f"refused: {error}") from error
        except (RedisError, OSError, TimeoutError) as error:
            raise RedisUnavailable(str(error) or type(error).__name__) from error
        if task is not None and task.cancelling() > num_cancels:
            # redis-py waits with `asyncio.wait_for`, which in Python 3.11 loses a cancel that comes with the result.
            raise asyncio.CancelledError
        return answer

    async def scan(self, pattern: bytes) -> AsyncIterator[bytes]:
        """Every key that matches and was there throughout. Raises `RedisUnavailable`."""
        cursor = 0
        while True:
            cursor, keys = await self.run(functools.partial(_scan, cursor=cursor, pattern=pattern))
            for key in keys:
                yield key
            if cursor == 0:
                return

    async def close(self) -> None:
        await self._redis.aclose()


async def _scan(redis: redis.asyncio.Redis, cursor: int, pattern: bytes) -> tuple[int, list[Any]]:
    return await redis.scan(cursor, pattern, SCAN_BATCH)
