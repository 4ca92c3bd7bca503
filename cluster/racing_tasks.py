"""Coroutines of one connection that live and end together: the first to end ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_of(*steps: Coroutine[Any, Any, None]) -> None:
    """Runs all until one ends; ends the others, waits for them, and raises what ended the first."""
    tasks = [asyncio.create_task(step) for step in steps]
    done: set[asyncio.Task[None]] = set()
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # What is raised here holds this frame, and a task holds what it raised. Such a ring keeps the connection's
        # descriptors until the collector comes by, which in an idle process is never.
        del task
        tasks.clear()
        done.clear()
