"""Where a deployment stops keeping up, estimated in ways that fail differently.

- capacity at the objective: where attainment crosses its target, between the runs around it
- saturation: the plateau c of achieved = min(offered, c)
- first violation: the lowest rate at which a run is saturated, misses its attainment, or grows its queue
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.run_summary import Flag
from benchmarks.statistics import Interval

TARGET_ATTAINMENT = 0.90
# A disqualified run counts as this far below the target at least.
MISSED_SHARE = 0.01
# A run with one of these shows no capacity: it did not settle, or the cache did a part of the work. A late client is no
# reason: its delay counts against the attainment already, so a run that passes in spite of it does pass.
DISQUALIFYING = frozenset({Flag.SATURATED, Flag.UNSTEADY, Flag.CACHE_WARM})


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One open-loop run as the estimators see it."""

    offered_per_s: float
    achieved_per_s: float
    attainment: Interval
    flags: frozenset[Flag]
    num_requests: int = 1

    @property
    def keeps_objective(self) -> bool:
        return self.attainment.value >= TARGET_ATTAINMENT and not self.flags & DISQUALIFYING


def capacity_at_slo(points: Sequence[RatePoint]) -> Interval:
    """The rate at which attainment falls through the target, interpolated; interval from the attainments' intervals.

    Attainment can only fall with the rate: runs that say otherwise are pooled with their neighbours, so that one
    unlucky run neither ends the search below the truth nor a lucky one above it.
    Nothing failed: [highest, highest, infinity). Nothing passed: [0, 0, lowest].
    """
    levels = _falling(sorted(points, key=lambda point: point.offered_per_s))
    passing = [level for level in levels if level.share >= TARGET_ATTAINMENT]
    if len(passing) == len(levels):
        highest = levels[-1].highest_per_s if levels else 0.0
        return Interval(highest, highest, math.inf)
    above = levels[len(passing)]
    if not passing:
        return Interval(0.0, 0.0, above.lowest_per_s)
    below = passing[-1]
    value = _crossing(below, above, below.share, above.share)
    low = _crossing(below, above, below.share_low, above.share_low)
    high = _crossing(below, above, below.share_high, above.share_high)
    return Interval(min(low, value), value, max(high, value))


@dataclass(slots=True)
class _Level:
    """Neighbouring runs taken together, and the share of their requests that kept the objective."""

    lowest_per_s: float
    highest_per_s: float
    share: float
    share_low: float
    share_high: float
    weight: float

    def pool(self, other: _Level) -> None:
        weight = self.weight + other.weight
        for name in ("share", "share_low", "share_high"):
            pooled = (getattr(self, name) * self.weight + getattr(other, name) * other.weight) / weight
            setattr(self, name, pooled)
        self.highest_per_s, self.weight = max(self.highest_per_s, other.highest_per_s), weight


def _falling(ordered: Sequence[RatePoint]) -> list[_Level]:
    """The best falling staircase through the attainments (pool adjacent violators); the same rate is one level."""
    levels: list[_Level] = []
    for point in ordered:
        value, low, high = point.attainment.value, point.attainment.low, point.attainment.high
        if point.flags & DISQUALIFYING:  # it keeps nothing, whatever its requests say
            value, low = min(value, TARGET_ATTAINMENT - MISSED_SHARE), min(low, TARGET_ATTAINMENT - MISSED_SHARE)
        level = _Level(point.offered_per_s, point.offered_per_s, value, low, high, point.num_requests)
        while levels and (levels[-1].share < level.share or levels[-1].highest_per_s == level.lowest_per_s):
            before = levels.pop()
            before.pool(level)
            level = before
        levels.append(level)
    return levels


def saturation(points: Sequence[RatePoint]) -> Interval:
    """The least-squares plateau, infinite without one; the interval is the range that leaving out one run gives."""
    if not points:
        return Interval(math.nan, math.nan, math.nan)
    offered = np.array([point.offered_per_s for point in points])
    achieved = np.array([point.achieved_per_s for point in points])
    value = _plateau(offered, achieved)
    without_one = [
        _plateau(np.delete(offered, i), np.delete(achieved, i)) for i in range(len(points)) if len(points) > 2
    ]
    return Interval(min([value, *without_one]), value, max([value, *without_one]))


def first_violation(points: Sequence[RatePoint]) -> float:
    """The lowest offered rate that does not keep the objective; infinity where all do."""
    return min((point.offered_per_s for point in points if not point.keeps_objective), default=math.inf)


def _crossing(below: _Level, above: _Level, share_below: float, share_above: float) -> float:
    """Linear between the two rates, held inside them."""
    if share_below <= TARGET_ATTAINMENT:
        return below.highest_per_s
    if share_above >= TARGET_ATTAINMENT:
        return above.lowest_per_s
    part = (share_below - TARGET_ATTAINMENT) / (share_below - share_above)
    return below.highest_per_s + part * (above.lowest_per_s - below.highest_per_s)


def _plateau(offered: np.ndarray, achieved: np.ndarray) -> float:
    """c of achieved = min(offered, c): the mean of the runs above c, at the split that fits best."""
    order = np.argsort(offered)
    offered, achieved = offered[order], achieved[order]
    best, best_loss = math.inf, float(np.sum((achieved - offered) ** 2))
    for first in range(len(offered)):
        plateau = float(achieved[first:].mean())
        loss = float(np.sum((achieved - np.minimum(offered, plateau)) ** 2))
        if loss < best_loss - 1e-12 and plateau < offered[-1]:
            best, best_loss = plateau, loss
    return best
