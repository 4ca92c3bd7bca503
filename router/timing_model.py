"""How long things take: the models that every routing term is computed from, refined while the cluster runs.

    prefill  t_p(u, c) = c0 + c1 u + c2 u (c + u/2)     u uncached, c cached prompt tokens
    decode   t_s(B, K) = alpha + beta B + gamma K       B sequences, K tokens of KV in the batch

All times in milliseconds. Refinement is recursive least squares with forgetting; until enough was seen a prior serves,
so that routing never stops for lack of a model. It is stretched by what was measured over what it said: three numbers
take many samples, that the machine is twice as slow takes one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

FORGETTING = 0.98
MIN_SAMPLES = 20
# How little the prior is trusted, in units of its own coefficients: a few samples move it.
PRIOR_VARIANCE = 1.0
# Between two holds a direction grows by 18 %, and a hold takes as long as all the rest of a sample.
SAMPLES_PER_HOLD = 8

Vector = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class TimingPrior:
    """Coefficients from a published sweep of a similar machine."""

    prefill: tuple[float, float, float]  # c0 ms, c1 ms/token, c2 ms/token^2
    decode: tuple[float, float, float]  # alpha ms, beta ms/sequence, gamma ms/token


class LinearTiming:
    """Three non-negative coefficients over three features, fitted online: the prior's until enough was seen.

    In plain floats: two samples a request, and for three numbers an array library costs ten times the arithmetic.
    """

    def __init__(self, prior: tuple[float, float, float]) -> None:
        # Features differ by many orders of magnitude; each is measured in units of its prior coefficient.
        self._unit = [max(coefficient, 1e-9) for coefficient in prior]
        self._coefficients = [coefficient / unit for coefficient, unit in zip(prior, self._unit, strict=True)]
        self._covariance = [[PRIOR_VARIANCE * (row == column) for column in range(3)] for row in range(3)]
        self._num_samples = 0
        self._prior = prior
        self._measured_ms = self._expected_ms = 0.0  # of all samples, by the prior
        # What decisions read; changes once for each measurement.
        self.coefficients: tuple[float, float, float] = prior

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def observe(self, features: Vector, measured_ms: float) -> None:
        """One measurement. What is not a positive finite time is not one, and is ignored."""
        if not (math.isfinite(measured_ms) and measured_ms > 0):
            return
        # Relative errors count: a long prompt must not outweigh a hundred short ones.
        x0, x1, x2 = (feature * unit / measured_ms for feature, unit in zip(features, self._unit, strict=True))
        projected = [row[0] * x0 + row[1] * x1 + row[2] * x2 for row in self._covariance]
        spread = FORGETTING + x0 * projected[0] + x1 * projected[1] + x2 * projected[2]
        known = self._coefficients
        error = 1.0 - (x0 * known[0] + x1 * known[1] + x2 * known[2])
        self._coefficients = [
            coefficient + along / spread * error for coefficient, along in zip(known, projected, strict=True)
        ]
        self._covariance = [
            [(value - along / spread * other) / FORGETTING for value, other in zip(row, projected, strict=True)]
            for row, along in zip(self._covariance, projected, strict=True)
        ]
        self._num_samples += 1
        if self._num_samples % SAMPLES_PER_HOLD == 0:
            self._hold_unseen_directions()
        if self._num_samples < MIN_SAMPLES:
            self.coefficients = self._stretched_prior(features, measured_ms)
        else:
            c0, c1, c2 = (max(0.0, value * unit) for value, unit in zip(self._coefficients, self._unit, strict=True))
            self.coefficients = (c0, c1, c2)

    def _stretched_prior(self, features: Vector, measured_ms: float) -> Vector:
        """The prior times measured over expected, where the prior itself counts as one average sample. Long prompts
        count more: their times say more of the machine, and are what decisions hang on."""
        p0, p1, p2 = self._prior
        self._measured_ms += measured_ms
        self._expected_ms += features[0] * p0 + features[1] * p1 + features[2] * p2
        prior_ms = self._expected_ms / self._num_samples
        stretch = (self._measured_ms + prior_ms) / (self._expected_ms + prior_ms) if prior_ms > 0 else 1.0
        return (p0 * stretch, p1 * stretch, p2 * stretch)

    def _hold_unseen_directions(self) -> None:
        """Forgetting makes what no sample points at grow for ever: each direction is held at the prior's, by itself."""
        sizes, directions = np.linalg.eigh(np.array(self._covariance))
        self._covariance = ((directions * np.minimum(sizes, PRIOR_VARIANCE)) @ directions.T).tolist()


class TimingModel:
    """Prefill and decode times of one kind of worker. Owned by the router's event loop."""

    def __init__(self, prior: TimingPrior) -> None:
        self._prefill = LinearTiming(prior.prefill)
        self._decode = LinearTiming(prior.decode)

    @property
    def prefill_coefficients(self) -> tuple[float, float, float]:
        """c0, c1, c2."""
        return self._prefill.coefficients

    @property
    def decode_coefficients(self) -> tuple[float, float, float]:
        """alpha, beta, gamma."""
        return self._decode.coefficients

    @property
    def is_prefill_fitted(self) -> bool:
        return self._prefill.num_samples >= MIN_SAMPLES

    @property
    def is_decode_fitted(self) -> bool:
        return self._decode.num_samples >= MIN_SAMPLES

    def prefill_ms(self, uncached: float, cached: float) -> float:
        c0, c1, c2 = self._prefill.coefficients
        return c0 + c1 * uncached + c2 * uncached * (cached + uncached / 2)

    def step_ms(self, batch: float, context_tokens: float) -> float:
        alpha, beta, gamma = self._decode.coefficients
        return alpha + beta * batch + gamma * context_tokens

    def observe_prefill(self, uncached: float, cached: float, measured_ms: float) -> None:
        self._prefill.observe(_prefill_features(uncached, cached), measured_ms)

    def observe_step(self, batch: float, context_tokens: float, measured_ms: float) -> None:
        self._decode.observe(_decode_features(batch, context_tokens), measured_ms)


def exposed_transfer_ms(
    num_bytes: float, bytes_per_ms: float, prefill_ms: float, num_layers: int, round_trip_ms: float
) -> float:
    """What is left of a layer-by-layer transfer after the prefill ended: one layer, and what the link lagged behind."""
    transfer_ms = num_bytes / bytes_per_ms
    lag_ms = max(0.0, transfer_ms - prefill_ms) * (num_layers - 1) / num_layers
    return transfer_ms / num_layers + lag_ms + round_trip_ms


def _prefill_features(uncached: float, cached: float) -> Vector:
    return (1.0, uncached, uncached * (cached + uncached / 2))


def _decode_features(batch: float, context_tokens: float) -> Vector:
    return (1.0, batch, context_tokens)
