"""Fits the timing models to a sweep's measurements: least squares of relative errors with coefficients >= 0."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
NUM_COEFFICIENTS = 3


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One prompt: `uncached` tokens computed behind `cached` ones."""

    uncached: float
    cached: float
    measured_ms: float


@dataclass(frozen=True, slots=True)
class StepSample:
    """One decode step of `batch` sequences with `context_tokens` KV tokens in all."""

    batch: float
    context_tokens: float
    measured_ms: float


@dataclass(frozen=True, slots=True)
class TimingFit:
    """Three coefficients and how well they say what was measured."""

    coefficients: tuple[float, float, float]
    median_relative_error: float
    num_samples: int


def fit_prefill(samples: Sequence[PrefillSample]) -> TimingFit:
    """c0, c1, c2 of `c0 + c1 u + c2 u (c + u / 2)`."""
    features = [(1.0, s.uncached, s.uncached * (s.cached + s.uncached / 2)) for s in samples]
    return _fit(np.array(features), np.array([s.measured_ms for s in samples]), "prefill")


def fit_decode(samples: Sequence[StepSample]) -> TimingFit:
    """alpha, beta, gamma of `alpha + beta B + gamma K`."""
    features = [(1.0, s.batch, s.context_tokens) for s in samples]
    return _fit(np.array(features), np.array([s.measured_ms for s in samples]), "decode")


def _fit(features: FloatArray, measured_ms: FloatArray, what: str) -> TimingFit:
    """Exact non-negative least squares: the best of all 7 sets of active coefficients that come out non-negative."""
    if len(measured_ms) < NUM_COEFFICIENTS:
        raise ValueError(f"{what}: {len(measured_ms)} measurements, at least {NUM_COEFFICIENTS} are needed to fit")
    # Relative errors: a long prompt must not outweigh the short ones.
    scaled = features / measured_ms[:, None]
    best, best_loss = np.zeros(NUM_COEFFICIENTS), np.inf
    for size in range(1, NUM_COEFFICIENTS + 1):
        for active in itertools.combinations(range(NUM_COEFFICIENTS), size):
            columns = list(active)
            solved, *_ = np.linalg.lstsq(scaled[:, columns], np.ones(len(measured_ms)), rcond=None)
            loss = float(np.sum((scaled[:, columns] @ solved - 1) ** 2))
            if (solved >= 0).all() and loss < best_loss - 1e-12:
                best, best_loss = np.zeros(NUM_COEFFICIENTS), loss
                best[columns] = solved
    errors = np.abs(features @ best / measured_ms - 1)
    c0, c1, c2 = (float(value) for value in best)
    return TimingFit((c0, c1, c2), float(np.median(errors)), len(measured_ms))
