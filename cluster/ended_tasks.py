"""Ending tasks for sure.

A `cancel` may be lost. `asyncio.wait_for` of Python 3.11 returns its result when the result and the cancel come at
once, and libraries wait with it (redis-py for its writes). A loop that lost its only cancel runs on, and whoever awaits
its end waits for ever. So a task is cancelled again until it has ended.
"""

from __future__ import annotations

import asyncio
from typing import Any

# Longer than any clean-up of ours takes: a second cancel would cut that off.
AGAIN_AFTER_S = 3.0


async def end_tasks(*tasks: asyncio.Task[Any], again_after_s: float = AGAIN_AFTER_S) -> None:
    """Cancels the tasks and returns when all have ended; what they raise is dropped.

    A caller that is cancelled meanwhile raises CancelledError as it should; the tasks have been told by then.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=again_after_s)
    # An exception that nobody has asked for is reported as forgotten.
    await asyncio.gather(*tasks, return_exceptions=True)
