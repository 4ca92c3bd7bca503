"""Who got more than its share of the requests lately, and what it is worth that somebody else gets this one.

A worker that holds several things that many ask for answers them fastest, so it gets them all for as long as it keeps
up. Each of them may be less than a worker's share (`hot_prefixes` knows only those that are more). So a request costs a
part of its whole prompt's time there for each request that the worker is beyond its share: in the end another worker
computes it and holds it too. No more of these count than half of those who ask for the prefix, who may leave with it: a
copy takes a place in a cache, and one that hardly anybody asks for makes nothing more even.

Pure: every call is given the time.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.identity import WorkerId
from router.fading_counts import FadingCounts
from router.worker_state import WorkerState

PRICE = 0.3  # of a whole prompt's prefill, for each request beyond
FAIR_SHARE = 1.1  # of the mean: chance alone gives some workers more than others
MIN_SHARE = 16.0  # requests lately: who had fewer is busy with none of them, whatever the mean of a large fleet is
MIN_ASKED = 4.0  # below it no copy could pay
MAX_WORKERS = 65_536  # counted


class FairShares:
    """Owned by a policy."""

    def __init__(self) -> None:
        self._placed: FadingCounts[WorkerId] = FadingCounts(MAX_WORKERS)

    def placed(self, worker_id: WorkerId, now_s: float) -> None:
        """One more request, for whatever, whose prompt this worker has."""
        self._placed.count(worker_id, now_s)

    def prices(self, workers: Sequence[WorkerState], num_asked: float, now_s: float) -> Sequence[float]:
        """Of each worker, what a request for a prefix that so many ask for costs there, in prefills of its whole
        prompt; empty: nothing anywhere."""
        if num_asked < MIN_ASKED or not workers:
            return ()
        placed = self._placed.of_all([worker.worker_id for worker in workers], now_s)
        fair, most = max(MIN_SHARE, FAIR_SHARE * sum(placed) / len(placed)), num_asked / 2
        if max(placed) <= fair:
            return ()
        return [PRICE * min(had - fair, most) if had > fair else 0.0 for had in placed]
