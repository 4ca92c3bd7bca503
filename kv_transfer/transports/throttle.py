"""An artificially slow link, so that tests see what a transfer hides and what it exposes."""

from __future__ import annotations

import time


class Throttle:
    """Lets bytes through at a rate, by holding up the sending thread. A rate of 0 is no throttle."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def pass_through(self, num_bytes: int) -> None:
        if self._bytes_per_s <= 0:
            return
        now_s = time.monotonic()
        self._free_at_s = max(self._free_at_s, now_s) + num_bytes / self._bytes_per_s
        time.sleep(max(0.0, self._free_at_s - now_s))
