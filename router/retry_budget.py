"""How often requests may be placed again: once each for free, more only from a common budget.

The budget is a share of the requests that came lately, so that a failing fleet is not hit by many times its load. The
first move is free: it is what brings a dead worker's streams to others. Pure: every call is given the time.
"""

from __future__ import annotations

FREE_MOVES = 1
RETRY_SHARE = 0.2  # of the requests
# Also with no traffic a few requests may try once more.
MIN_RETRIES_PER_S = 2.0
MAX_SAVED = 50.0


class RetryBudget:
    """Owned by the dispatcher."""

    def __init__(self, now_s: float) -> None:
        self._saved = MAX_SAVED
        self._at_s = now_s
        self.num_refused = 0

    def request_came(self) -> None:
        self._saved = min(MAX_SAVED, self._saved + RETRY_SHARE)

    def may_move(self, num_moves: int, now_s: float) -> bool:
        """Whether a request that was moved `num_moves` times already may move again; pays for it."""
        if num_moves < FREE_MOVES:
            return True
        self._saved = min(MAX_SAVED, self._saved + max(0.0, now_s - self._at_s) * MIN_RETRIES_PER_S)
        self._at_s = now_s
        if self._saved < 1:
            self.num_refused += 1
            return False
        self._saved -= 1
        return True
