"""A new worker's share grows from a tenth to the whole over 15 seconds: it is cold, and everybody would rush to it.

A warming worker is a candidate of one decision with the probability of its share. While nobody is warm (the whole
cluster just started) all are candidates. Pure: time and chance are arguments.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.worker_state import WorkerState

RAMP_S = 15.0
FIRST_SHARE = 0.1


def share_of(joined_s: float, now_s: float) -> float:
    """0.1 at first, 1 after `RAMP_S`."""
    grown = max(0.0, now_s - joined_s) / RAMP_S
    return min(1.0, FIRST_SHARE + (1 - FIRST_SHARE) * grown)


def warmed(workers: Sequence[WorkerState], now_s: float, chance: random.Random) -> Sequence[WorkerState]:
    """Who is a candidate of this decision: all warm workers, and each warming one by its share."""
    newest_s = max((worker.joined_s for worker in workers), default=0.0)
    if now_s - newest_s >= RAMP_S:
        return workers
    if all(now_s - worker.joined_s < RAMP_S for worker in workers):
        return workers
    return [worker for worker in workers if chance.random() < share_of(worker.joined_s, now_s)]
