"""Waiting for what another task or thread is about to do, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE_S = 60.0


async def until(is_reached: Callable[[], bool], what: str = "") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_reached():
        assert time.monotonic() < deadline, f"not reached in {DEADLINE_S} s: {what}"
        await asyncio.sleep(0.002)
