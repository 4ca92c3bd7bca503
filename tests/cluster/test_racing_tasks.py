"""The first coroutine to end ends the others."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

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


async def test_nothing_of_a_broken_connection_waits_for_the_collector() -> None:
    """A ring of frame, task and error would keep its sockets open until the collector comes by."""

    class Connection:
        pass

    async def breaks(connection: Connection) -> None:
        raise OSError(f"broken: {connection}")

    async def serve() -> weakref.ref[Connection]:
        connection = Connection()
        with contextlib.suppress(OSError):
            await first_of(breaks(connection), asyncio.Event().wait())  # type: ignore[arg-type]
        return weakref.ref(connection)

    gc.collect()
    gc.disable()
    try:
        served = await serve()
        await asyncio.sleep(0)  # the loop lets go of the tasks' last callbacks
        assert served() is None
    finally:
        gc.enable()
