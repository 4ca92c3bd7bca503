"""What waits to be written to one router: a bounded queue between the engine's steps and the router's reading.

A router that reads slowly fills it; when it is full the session is over: its requests are aborted, because tokens
that nobody reads must not hold KV blocks. It knows nothing of requests or of gRPC.
"""

from __future__ import annotations

import asyncio
from collections import deque

from tandem.v1 import worker_pb2

# Steps, failures and load reports. At 20 ms a step a router that is 1,024 messages behind has read nothing for 20 s.
MAX_QUEUED_MESSAGES = 1024


class SessionOutbox:
    """Messages of one session in order. Used on the event loop only."""

    def __init__(self, max_messages: int = MAX_QUEUED_MESSAGES) -> None:
        self._max_messages = max_messages
        self._queue: deque[worker_pb2.DecodeMessage] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False
        self.is_overflown = False

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, message: worker_pb2.DecodeMessage) -> None:
        """Queues a message; a closed outbox drops it (its reader is gone)."""
        if self._is_closed:
            return
        if len(self._queue) >= self._max_messages:
            self.is_overflown = True
            self.close()
            return
        self._queue.append(message)
        self._changed.set()

    async def get(self) -> worker_pb2.DecodeMessage | None:
        """The next message; None once the outbox is closed and, unless it overflowed, empty."""
        while True:
            if self.is_overflown:
                return None
            if self._queue:
                return self._queue.popleft()
            if self._is_closed:
                return None
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()
