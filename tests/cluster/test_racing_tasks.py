"""The first coroutine to end ends the others."""

from __future__ import annotations

import asyncio

import pytest

from cluster.racing_tasks import first_of


async def test_first_end_cancels_and_awaits_the_others() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def ends() -> None:
        ended.append("ends")

    await first_of(waits(), ends())
    assert ended == ["ends", "waits"]


async def test_error_of_the_first_is_raised() -> None:
    async def fails() -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        await first_of(asyncio.Event().wait(), fails())  # type: ignore[arg-type]


async def test_cancelling_the_caller_cancels_all() -> None:
    cancelled = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    task = asyncio.create_task(first_of(waits(), waits()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set()
