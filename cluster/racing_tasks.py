"""Coroutines of one connection that live and end together: the first to end ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from cluster.ended_tasks import end_tasks


async def first_of(*steps: Coroutine[Any, Any, None]) -> None:
    """Runs all until one ends; ends the others, waits for them, and raises what ended the first."""
    tasks = [asyncio.create_task(step) for step in steps]
    done: set[asyncio.Task[None]] = set()
    task = None
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_tasks(*tasks)
        # What is raised here holds this frame, and a task holds what it raised. Such a ring keeps the connection's
        # descriptors until the collector comes by, which in an idle process is never.
        task = None
        tasks.clear()
        done.clear()
