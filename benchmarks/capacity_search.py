"""Finds the highest rate that keeps an objective, with few runs. Pure: results in, next rate out.

probe a grid upwards until one fails  ->  bisect the bracket  ->  confirm the best with other arrivals
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

# How far below its grid a search goes before it says that nothing passes.
LOWEST_SHARE = 1 / 8
# Where all of its grid passes it goes on upwards by this factor, up to this multiple of the grid's end.
STEP_UP, HIGHEST_SHARE = 1.3, 4.0


class Phase(Enum):
    """What the next probe is for."""

    GRID = "grid"
    BISECTION = "bisection"
    CONFIRMATION = "confirmation"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Probe:
    """One run's verdict. `repeat` tells runs at the same rate apart: each has its own arrivals."""

    rate_per_s: float
    repeat: int
    passed: bool


@dataclass(frozen=True, slots=True)
class Next:
    """What to run next; at DONE the rate is the answer (0: not even the lowest rate passed)."""

    phase: Phase
    rate_per_s: float
    repeat: int = 0


def next_probe(grid: Sequence[float], probes: Sequence[Probe], resolution: float) -> Next:
    """The next run of a search over an ascending grid, until the bracket's ends are within a factor `resolution`.

    A rate that fails its confirmation counts as failed. When the whole grid passes, the search goes on above it; where
    nothing fails at all the highest rate is the answer: the capacity is above it, and the caller sees that.
    """
    failed = {probe.rate_per_s for probe in probes if not probe.passed}
    passed = {probe.rate_per_s for probe in probes if probe.passed} - failed
    ceiling = min(failed, default=None)
    # A pass above a failure is luck, not capacity.
    floor = max((rate for rate in passed if ceiling is None or rate < ceiling), default=0.0)
    tried = passed | failed
    for rate in grid:
        if rate not in tried and (ceiling is None or rate < ceiling) and rate > floor:
            return Next(Phase.GRID, rate)
    if ceiling is None and floor < grid[-1] * HIGHEST_SHARE:
        # The grid ended too low.
        return Next(Phase.GRID, floor * STEP_UP)
    if floor == 0 and ceiling is not None and ceiling > grid[0] * LOWEST_SHARE:
        # The grid began too high.
        return Next(Phase.GRID, ceiling / 2)
    if ceiling is not None and floor > 0 and ceiling / floor > resolution:
        return Next(Phase.BISECTION, (floor + ceiling) / 2)
    if floor > 0 and sum(probe.rate_per_s == floor for probe in probes) < 2:
        return Next(Phase.CONFIRMATION, floor, repeat=1)
    return Next(Phase.DONE, floor)


def max_probes(grid: Sequence[float], resolution: float) -> int:
    """The runs of a search whose confirmation holds, at most: the grid, the halvings of one gap, the confirmation."""
    ratio, halvings = max(high / low for low, high in itertools.pairwise(grid)), 0
    while ratio > resolution:
        ratio, halvings = 1 + (ratio - 1) / 2, halvings + 1
    return len(grid) + halvings + 1
