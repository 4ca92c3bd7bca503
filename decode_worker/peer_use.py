"""Whether one prefill worker is in use: how often it is pinged, and whether its link is still worth keeping.

    a transfer is live, or P lists one of ours     a ping every interval: silence ends transfers, lists end orphans
    the last ping found nothing of ours there      a slow keep-alive; the next transfer brings the pace back

The pair of lists of live attempts in ping and pong is what finds an attempt that only one side still knows. So the pace
slackens only after a pong, to a ping that was sent without anything live, has listed nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress


class PeerUse:
    """Owned by its `PrefillPeer`. Used on the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_used_s: float | None = None
        self._is_in_use = asyncio.Event()

    def began(self) -> None:
        """A request needs the peer now."""
        self._last_used_s = self._clock()
        self._is_in_use.set()

    def ping_sent(self, num_live: int) -> None:
        if num_live:
            self.began()
        else:
            self._is_in_use.clear()

    def pong_came(self, num_listed: int) -> None:
        if num_listed:
            self._is_in_use.set()

    def was_used_within(self, seconds: float) -> bool:
        return self._last_used_s is not None and self._clock() - self._last_used_s < seconds

    async def until_ping_is_due(
        self, interval_s: float, idle_interval_s: float, is_ping_out: Callable[[], bool]
    ) -> None:
        """One interval while something may be live or a ping is out, else until the keep-alive is due. Who comes into
        use in between is pinged an interval later."""
        await asyncio.sleep(interval_s)
        if self._is_in_use.is_set() or is_ping_out():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, idle_interval_s - interval_s)):
                await self._is_in_use.wait()
        if self._is_in_use.is_set():
            await asyncio.sleep(interval_s)
