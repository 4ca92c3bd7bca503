"""The estimators of a run, as pure functions of numbers: weighted percentiles, intervals, warm-up, steady state.

Latencies of neighbouring requests are correlated (they share a queue), so intervals resample blocks of neighbours, not
single requests. Randomness comes in as a seed.

Sources: MSER-5: White, "An effective truncation heuristic for bias reduction in simulation output" (1997). Moving block
bootstrap: Künsch (1989).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

CONFIDENCE = 0.95
NUM_RESAMPLES = 400
# Cells of a resampled matrix at one time: 8 MB.
MAX_RESAMPLED_CELLS = 1 << 20
MSER_BATCH = 5
# Student's t, one-sided 1 %, for SLOPE_BATCHES - 2 = 18 degrees of freedom.
SLOPE_BATCHES = 20
SLOPE_T_CRITICAL = 2.552


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % confidence interval."""

    low: float
    value: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class SlopeTest:
    """Whether a series grows: its slope per second and Student's t of it over batch means."""

    slope_per_s: float
    t_value: float
    growth_share: float  # growth over the window as a share of the mean

    @property
    def is_growing(self) -> bool:
        return self.t_value > SLOPE_T_CRITICAL


def percentile(values: npt.ArrayLike, share: float, weights: npt.ArrayLike | None = None) -> float:
    """The smallest value with at least `share` of the weight at or below it; NaN for no values."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return math.nan
    weight = np.ones_like(array) if weights is None else np.asarray(weights, dtype=np.float64)
    order = np.argsort(array, kind="stable")
    return _sorted_percentile(array[order], np.cumsum(weight[order]), share)


def mean_interval(values: npt.ArrayLike, seed: int) -> Interval:
    """The mean of a correlated series with its block bootstrap interval."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return Interval(math.nan, math.nan, math.nan)
    # The mean of a resample needs each value's multiplicity only.
    means = _multiplicities(array.size, seed) @ array / array.size
    return _interval(float(array.mean()), means)


def percentile_interval(
    values: npt.ArrayLike, share: float, seed: int, groups: Sequence[int] | None = None, weights: npt.ArrayLike = 1.0
) -> Interval:
    """A percentile with its block bootstrap interval.

    `groups[i]` is the request that value i belongs to (0, 1, 2, ... in order of time): requests are resampled, with all
    their values. Without groups each value is its own request. `weights` as in `percentile`.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return Interval(math.nan, math.nan, math.nan)
    weight = np.broadcast_to(np.asarray(weights, dtype=np.float64), array.shape)
    group = np.arange(array.size) if groups is None else np.asarray(groups)
    order = np.argsort(array, kind="stable")
    array, weight, group = array[order], weight[order], group[order]
    value = _sorted_percentile(array, np.cumsum(weight), share)
    multiplicities = _multiplicities(int(group.max()) + 1, seed)
    rows = max(1, MAX_RESAMPLED_CELLS // array.size)
    parts = [
        _resampled_percentiles(array, weight * multiplicities[first : first + rows][:, group], share)
        for first in range(0, NUM_RESAMPLES, rows)
    ]
    return _interval(value, np.concatenate(parts))


def median_interval(values: Sequence[float]) -> Interval:
    """Median, least and greatest of a few repeated runs: too few for a confidence interval, so the spread is shown."""
    return Interval(min(values), float(np.median(values)), max(values))


def paired_interval(first: npt.ArrayLike, second: npt.ArrayLike, seed: int) -> Interval:
    """Mean of second - first over pairs that saw the same arrival, with its interval."""
    return mean_interval(np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64), seed)


def mser5(values: npt.ArrayLike) -> int:
    """How many leading values are warm-up: the cut that minimises the standard error of the mean of what stays.

    A cut beyond the first half is not trusted (the series never settled): then half its length is returned.
    """
    array = np.asarray(values, dtype=np.float64)
    num_batches = array.size // MSER_BATCH
    if num_batches < 4:
        return 0
    batches = array[: num_batches * MSER_BATCH].reshape(num_batches, MSER_BATCH).mean(axis=1)
    # Suffix sums give every cut's variance in one pass.
    count = np.arange(num_batches, 0, -1, dtype=np.float64)
    centred = batches - batches.mean()
    total = np.cumsum(centred[::-1])[::-1]
    squares = np.cumsum((centred**2)[::-1])[::-1]
    variance = np.maximum(squares / count - (total / count) ** 2, 0.0)
    statistic = variance / count
    half = num_batches // 2
    return int(np.argmin(statistic[: half + 1])) * MSER_BATCH


def slope_test(times_s: npt.ArrayLike, values: npt.ArrayLike) -> SlopeTest:
    """Least squares over the means of 20 consecutive batches, which takes most of the series' correlation away."""
    time, value = np.asarray(times_s, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if time.size < SLOPE_BATCHES:
        return SlopeTest(0.0, 0.0, 0.0)
    batch_times = np.array([part.mean() for part in np.array_split(time, SLOPE_BATCHES)])
    batch_values = np.array([part.mean() for part in np.array_split(value, SLOPE_BATCHES)])
    centred = batch_times - batch_times.mean()
    spread = float(centred @ centred)
    if spread == 0.0:
        return SlopeTest(0.0, 0.0, 0.0)
    slope = float(centred @ batch_values) / spread
    residual = batch_values - batch_values.mean() - slope * centred
    error = math.sqrt(float(residual @ residual) / (SLOPE_BATCHES - 2) / spread)
    mean = float(value.mean())
    growth = slope * float(time[-1] - time[0]) / mean if mean else 0.0
    if error == 0.0:
        return SlopeTest(slope, math.inf if slope > 0 else 0.0, growth)
    return SlopeTest(slope, slope / error, growth)


def in_flight(starts_s: npt.ArrayLike, ends_s: npt.ArrayLike, grid_s: npt.ArrayLike) -> FloatArray:
    """How many requests have started and not ended at each time of the grid."""
    grid = np.asarray(grid_s, dtype=np.float64)
    started = np.searchsorted(np.sort(np.asarray(starts_s, dtype=np.float64)), grid, side="right")
    ended = np.searchsorted(np.sort(np.asarray(ends_s, dtype=np.float64)), grid, side="right")
    return (started - ended).astype(np.float64)


def _sorted_percentile(values: FloatArray, cumulated: FloatArray, share: float) -> float:
    place = int(np.searchsorted(cumulated, share * cumulated[-1] * (1 - 1e-12)))
    return float(values[min(place, values.size - 1)])


def _resampled_percentiles(values: FloatArray, weights: FloatArray, share: float) -> FloatArray:
    """Of each row of weights [resamples, values], over ascending values; a row without any weight is left out."""
    cumulated = np.cumsum(weights, axis=1)
    total = cumulated[:, -1]
    places = (cumulated < (share * (1 - 1e-12) * total)[:, None]).sum(axis=1)
    estimates: FloatArray = values[np.minimum(places, values.size - 1)][total > 0]
    return estimates


@lru_cache(maxsize=4)
def _multiplicities(count: int, seed: int) -> FloatArray:
    """[NUM_RESAMPLES, count]: how often each element stands in each moving-block resample of about that length.

    The statistics of one run ask for the same one again and again. Read-only.
    """
    rng = np.random.default_rng(seed)
    block = max(1, round(math.sqrt(count))) if count >= 30 else 1
    num_blocks = math.ceil(count / block)
    result = np.zeros((NUM_RESAMPLES, count))
    for row in result:
        # Circular, so that the ends are not drawn less often than the middle.
        starts = rng.integers(0, count, num_blocks)
        places = (starts[:, None] + np.arange(block)).ravel()[:count] % count
        row += np.bincount(places, minlength=count)
    result.flags.writeable = False
    return result


def _interval(value: float, estimates: FloatArray) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(estimates, (tail, 1 - tail))
    # A skewed resampling distribution may leave the estimate out; the interval is of the estimate.
    return Interval(min(float(low), value), value, max(float(high), value))
