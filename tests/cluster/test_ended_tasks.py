"""Tasks end although a cancel was swallowed, and the caller's own cancellation passes through."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from cluster.ended_tasks import end_tasks


async def test_a_task_that_swallowed_its_first_cancel_is_cancelled_again() -> None:
    swallowed = 0

    async def loop() -> None:
        nonlocal swallowed
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        swallowed += 1
        await asyncio.Event().wait()

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await end_tasks(task, again_after_s=0.01)
    assert swallowed == 1
    assert task.cancelled()


async def test_what_a_task_raises_at_its_end_is_not_the_callers() -> None:
    async def fails() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("broken")

    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    await end_tasks(task, asyncio.create_task(asyncio.sleep(0)))
    assert isinstance(task.exception(), OSError)


async def test_no_tasks_are_ended_at_once() -> None:
    await end_tasks()


async def test_a_cancelled_caller_is_cancelled() -> None:
    released = asyncio.Event()

    async def cleans_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await released.wait()

    task = asyncio.create_task(cleans_up())
    await asyncio.sleep(0)
    ending = asyncio.create_task(end_tasks(task))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    released.set()
    await asyncio.gather(task, return_exceptions=True)
    assert task.done()
