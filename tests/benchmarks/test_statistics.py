"""Estimators against numbers that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.statistics import (
    in_flight,
    mean_interval,
    mser5,
    paired_interval,
    percentile,
    percentile_interval,
    slope_test,
)


def test_weights_repeat_values() -> None:
    repeated = [1.0] * 2 + [2.0] * 5 + [9.0]
    for share in (0.1, 0.25, 0.5, 0.9, 0.99):
        assert percentile([1.0, 2.0, 9.0], share, [2, 5, 1]) == percentile(repeated, share)
    assert percentile([9.0, 1.0, 2.0], 0.5) == 2.0
    assert math.isnan(percentile([], 0.5))


def test_intervals_cover_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    hits = sum(mean_interval(rng.exponential(10.0, 400), seed).contains(10.0) for seed in range(200))
    assert 0.88 <= hits / 200 <= 0.99


def test_correlation_widens_the_interval() -> None:
    rng = np.random.default_rng(2)
    noise = rng.normal(size=4000)
    correlated = np.convolve(noise, np.ones(40) / math.sqrt(40), mode="valid")
    assert mean_interval(correlated, 0).half_width > 3 * mean_interval(rng.permutation(correlated), 0).half_width


def test_percentile_interval_holds_the_true_percentile_and_resamples_whole_groups() -> None:
    rng = np.random.default_rng(3)
    values = rng.exponential(1.0, 3000)
    assert percentile_interval(values, 0.9, seed=0).contains(-math.log(0.1))
    # 30 requests of 100 equal gaps each are 30 observations, not 3,000.
    grouped = np.repeat(rng.exponential(1.0, 30), 100)
    groups = np.repeat(np.arange(30), 100).tolist()
    by_request = percentile_interval(grouped, 0.5, 0, groups)
    by_value = percentile_interval(rng.permutation(grouped), 0.5, 0)
    assert by_request.half_width > 2 * by_value.half_width


def test_pairs_see_a_difference_that_the_spread_hides() -> None:
    rng = np.random.default_rng(4)
    base = rng.exponential(100.0, 300)
    slower = base + 2.0 + rng.normal(0, 1.0, 300)
    interval = paired_interval(base, slower, seed=0)
    assert interval.low > 1.5
    assert interval.contains(2.0)
    assert mean_interval(base, 0).half_width > 5.0


def test_mser5_cuts_the_warm_up_and_nothing_else() -> None:
    rng = np.random.default_rng(5)
    steady = rng.normal(10.0, 1.0, 900)
    ramp = np.linspace(40.0, 10.0, 100) + rng.normal(0.0, 1.0, 100)
    assert 60 <= mser5(np.concatenate((ramp, steady))) <= 150
    assert mser5(np.full(100, 3.0)) == 0
    assert mser5([1.0, 2.0]) == 0


def test_mser5_never_cuts_more_than_half() -> None:
    assert mser5(np.arange(200.0)[::-1]) <= 100


def test_slope_test_tells_growth_from_noise() -> None:
    rng = np.random.default_rng(6)
    times = np.arange(400.0)
    assert not slope_test(times, rng.normal(20.0, 2.0, 400)).is_growing
    growing = slope_test(times, 5.0 + 0.1 * times + rng.normal(0.0, 2.0, 400))
    assert growing.is_growing
    assert growing.slope_per_s == pytest.approx(0.1, rel=0.1)
    assert not slope_test(times, np.full(400, 7.0)).is_growing


def test_in_flight_counts_started_and_not_ended() -> None:
    assert in_flight([0.0, 1.0, 2.0], [1.5, 4.0, 2.5], [0.0, 1.0, 1.5, 2.2, 3.0, 4.0]).tolist() == [1, 2, 1, 2, 1, 0]
