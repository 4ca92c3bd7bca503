"""What waits to be written to one client: updates of all its choices, between the workers' steps and its reading.

A client that reads slowly finds several steps merged into one batch. The queue is bounded: when it is full the client
has fallen behind by thousands of steps and its answer is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.sequence import SequenceUpdate

MAX_WAITING_UPDATES = 8192


class AnswerInbox:
    """One reader, used on the event loop only."""

    __slots__ = ("_max_updates", "_on_overflow", "_updates", "_waiter")

    def __init__(self, on_overflow: Callable[[], None], max_updates: int = MAX_WAITING_UPDATES) -> None:
        """`on_overflow` is called once for each update that found the queue full."""
        self._updates: list[SequenceUpdate] = []
        self._waiter: asyncio.Future[None] | None = None
        self._on_overflow = on_overflow
        self._max_updates = max_updates

    def put(self, update: SequenceUpdate) -> None:
        # An end must always find room: there is one for each choice.
        is_end = update.error is not None or (update.event is not None and update.event.finish_reason != 0)
        if len(self._updates) >= self._max_updates and not is_end:
            self._on_overflow()
            return
        self._updates.append(update)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[SequenceUpdate]:
        """Everything that has come, at least one update."""
        while not self._updates:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        updates, self._updates = self._updates, []
        return updates
