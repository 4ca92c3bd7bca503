"""Coefficients come back from what they made, also through noise."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.timing_fit import PrefillSample, StepSample, fit_decode, fit_prefill


def _prefill(c0: float, c1: float, c2: float, noise: float) -> list[PrefillSample]:
    rng = np.random.default_rng(1)
    return [
        PrefillSample(u, c, (c0 + c1 * u + c2 * u * (c + u / 2)) * (1 + noise * rng.normal()))
        for u in (16, 64, 256, 1024, 2048)
        for c in (0, 1024, 4096)
    ]


def test_prefill_coefficients_come_back() -> None:
    assert fit_prefill(_prefill(4.0, 0.3, 2e-4, 0.0)).coefficients == pytest.approx((4.0, 0.3, 2e-4))
    noisy = fit_prefill(_prefill(4.0, 0.3, 2e-4, 0.03))
    assert noisy.coefficients == pytest.approx((4.0, 0.3, 2e-4), rel=0.25)
    assert noisy.median_relative_error < 0.05


def test_a_coefficient_that_would_be_negative_is_zero() -> None:
    fitted = fit_decode([StepSample(batch, 100 * batch, 10.0 - 0.01 * batch) for batch in (1, 2, 4, 8, 16)])
    assert min(fitted.coefficients) >= 0.0
    assert fitted.coefficients[0] == pytest.approx(10.0, rel=0.02)


def test_decode_coefficients_come_back() -> None:
    samples = [StepSample(b, b * c, 8.0 + 0.5 * b + 1e-3 * b * c) for b in (1, 4, 16, 32) for c in (64, 512, 2048)]
    assert fit_decode(samples).coefficients == pytest.approx((8.0, 0.5, 1e-3))


def test_too_few_measurements_are_named() -> None:
    with pytest.raises(ValueError, match="decode: 2 measurements"):
        fit_decode([StepSample(1, 1, 1.0)] * 2)
