"""How long things take: the models that every routing term is computed from, refined while the cluster runs.

    prefill  t_p(u, c) = c0 + c1 u + c2 u (c + u/2)     u uncached, c cached prompt tokens
    decode   t_s(B, K) = alpha + beta B + gamma K       B sequences, K tokens of KV in the batch

All times in milliseconds. Refinement is recursive least squares with forgetting; until enough was seen a prior serves,
so that routing never stops for lack of a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FORGETTING = 0.98
MIN_SAMPLES = 20
# How little the prior is trusted, in units of its own coefficients: a few samples move it.
PRIOR_VARIANCE = 1.0

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimingPrior:
    """Coefficients from a published sweep of a similar machine."""

    prefill: tuple[float, float, float]  # c0 ms, c1 ms/token, c2 ms/token^2
    decode: tuple[float, float, float]  # alpha ms, beta ms/sequence, gamma ms/token


class LinearTiming:
    """Three non-negative coefficients over three features, fitted online: the prior's until enough was seen."""

    def __init__(self, prior: tuple[float, float, float]) -> None:
        self._prior = np.array(prior, dtype=np.float64)
        # Features differ by many orders of magnitude; each is measured in units of its prior coefficient.
        self._unit = np.maximum(self._prior, 1e-9)
        self._coefficients = self._prior / self._unit
        self._covariance = np.eye(3) * PRIOR_VARIANCE
        self._num_samples = 0
        # As plain floats: they are asked for many times for each decision and change once for each measurement.
        self.coefficients: tuple[float, float, float] = prior

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def predict(self, features: Vector) -> float:
        return float(np.asarray(self.coefficients) @ features)

    def observe(self, features: Vector, measured_ms: float) -> None:
        """One measurement. What is not a positive finite time is not one, and is ignored."""
        if not (np.isfinite(measured_ms) and measured_ms > 0):
            return
        # Relative errors count: a long prompt must not outweigh a hundred short ones.
        scaled = features * self._unit / measured_ms
        gain = self._covariance @ scaled / (FORGETTING + scaled @ self._covariance @ scaled)
        self._coefficients = self._coefficients + gain * (1.0 - scaled @ self._coefficients)
        self._covariance = (self._covariance - np.outer(gain, scaled @ self._covariance)) / FORGETTING
        # Forgetting makes directions that no sample points in grow for ever: each is held at the prior's, by itself.
        sizes, directions = np.linalg.eigh(self._covariance)
        self._covariance = (directions * np.minimum(sizes, PRIOR_VARIANCE)) @ directions.T
        self._num_samples += 1
        if self._num_samples >= MIN_SAMPLES:
            c0, c1, c2 = np.maximum(self._coefficients * self._unit, 0.0).tolist()
            self.coefficients = (c0, c1, c2)


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
        return self._prefill.predict(_prefill_features(uncached, cached))

    def step_ms(self, batch: float, context_tokens: float) -> float:
        return self._decode.predict(_decode_features(batch, context_tokens))

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
    return np.array((1.0, uncached, uncached * (cached + uncached / 2)))


def _decode_features(batch: float, context_tokens: float) -> Vector:
    return np.array((1.0, batch, context_tokens))
