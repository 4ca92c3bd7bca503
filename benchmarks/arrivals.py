"""When requests arrive: every time is drawn from a seed before the run starts, and is never rescaled afterwards.

Rescaling the gaps so that the last arrival falls exactly on count / rate would take away the variance of the count and
tie all gaps to each other: a Poisson process that is none. So a process is cut at the end of the window, and the number
of arrivals is whatever it is. This file knows times only; `workload` says what arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
ArrivalKind = Literal["poisson", "gamma", "bursts", "constant"]

# Gaps are drawn in batches of the expected number and this share more; the loop draws again where that was too few.
DRAW_MARGIN = 1.2
MIN_DRAW = 16


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """A stationary arrival process of one mean rate."""

    kind: ArrivalKind
    rate_per_s: float
    cv: float = 1.0  # gamma: coefficient of variation of the gaps; 1 is Poisson, above 1 is burstier
    burst_size: int = 1  # bursts: requests that arrive at one instant; the bursts themselves are Poisson

    def __post_init__(self) -> None:
        if not self.rate_per_s > 0:
            raise ValueError(f"rate_per_s is {self.rate_per_s}, must be above 0")
        if not self.cv > 0:
            raise ValueError(f"cv is {self.cv}, must be above 0; for evenly spaced arrivals use kind 'constant'")
        if self.burst_size < 1:
            raise ValueError(f"burst_size is {self.burst_size}, must be at least 1")


def arrival_times(process: ArrivalProcess, duration_s: float, seed: int) -> FloatArray:
    """Ascending seconds in [0, duration_s). The same arguments give the same times."""
    rng = np.random.default_rng(seed)
    if process.kind == "constant":
        return np.arange(0.0, duration_s, 1.0 / process.rate_per_s)
    if process.kind == "bursts":
        bursts = _renewal(rng, process.rate_per_s / process.burst_size, 1.0, duration_s)
        return np.repeat(bursts, process.burst_size)
    cv = 1.0 if process.kind == "poisson" else process.cv
    return _renewal(rng, process.rate_per_s, cv, duration_s)


def stretched(times_s: FloatArray, time_factor: float) -> FloatArray:
    """A trace's times at another speed: factor 2 takes twice as long. The only way that times are ever changed."""
    if not time_factor > 0:
        raise ValueError(f"time_factor is {time_factor}, must be above 0")
    return times_s * time_factor


def fano_factor(times_s: FloatArray, duration_s: float, num_windows: int) -> float:
    """Variance over mean of the counts in equal windows: about 1 for Poisson, cv squared for long windows of gamma."""
    counts, _ = np.histogram(times_s, bins=num_windows, range=(0.0, duration_s))
    return float(counts.var(ddof=1) / counts.mean())


def _renewal(rng: np.random.Generator, rate_per_s: float, cv: float, duration_s: float) -> FloatArray:
    """Independent gamma gaps of mean 1 / rate and the given coefficient of variation, cut at the window's end."""
    shape = 1.0 / cv**2
    draw = max(MIN_DRAW, int(rate_per_s * duration_s * DRAW_MARGIN))
    times = np.cumsum(rng.gamma(shape, 1.0 / (shape * rate_per_s), draw))
    while times[-1] < duration_s:
        more = np.cumsum(rng.gamma(shape, 1.0 / (shape * rate_per_s), draw))
        times = np.concatenate((times, times[-1] + more))
    return times[times < duration_s]
