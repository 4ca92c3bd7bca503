"""Arrivals: their statistics, and that nothing ever moves them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.arrivals import ArrivalProcess, arrival_times, fano_factor, stretched


def test_b13_poisson_counts_keep_their_variance() -> None:
    times = arrival_times(ArrivalProcess("poisson", 50.0), 2000.0, seed=7)
    assert fano_factor(times, 2000.0, 2000) == pytest.approx(1.0, abs=0.1)


def test_b13_number_of_arrivals_differs_between_seeds() -> None:
    counts = np.array([len(arrival_times(ArrivalProcess("poisson", 20.0), 10.0, seed)) for seed in range(400)])
    assert counts.mean() == pytest.approx(200.0, rel=0.02)
    assert counts.var(ddof=1) / counts.mean() == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("cv", [0.5, 2.0])
def test_gamma_gaps_have_the_rate_and_the_variation_asked_for(cv: float) -> None:
    times = arrival_times(ArrivalProcess("gamma", 20.0, cv=cv), 3000.0, seed=3)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 20.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_bursts_arrive_together_at_the_mean_rate() -> None:
    times = arrival_times(ArrivalProcess("bursts", 40.0, burst_size=8), 1000.0, seed=1)
    assert len(times) / 1000.0 == pytest.approx(40.0, rel=0.1)
    _, sizes = np.unique(times, return_counts=True)
    assert set(sizes.tolist()) == {8}


def test_times_ascend_inside_the_window_and_repeat_with_the_seed() -> None:
    process = ArrivalProcess("gamma", 30.0, cv=1.7)
    first, second = (arrival_times(process, 20.0, seed=5) for _ in range(2))
    assert (first == second).all()
    assert (np.diff(first) >= 0).all()
    assert first[0] >= 0.0
    assert first[-1] < 20.0
    assert not np.array_equal(first, arrival_times(process, 20.0, seed=6))


def test_a_longer_window_begins_with_the_shorter_one() -> None:
    process = ArrivalProcess("constant", 10.0)
    assert arrival_times(process, 1.0, seed=0).tolist() == pytest.approx([place / 10 for place in range(10)])
    assert stretched(np.array([1.0, 2.0]), 3.0).tolist() == [3.0, 6.0]


@pytest.mark.parametrize(("field", "value"), [("rate_per_s", 0.0), ("cv", 0.0), ("burst_size", 0)])
def test_impossible_processes_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        ArrivalProcess(**{"kind": "gamma", "rate_per_s": 1.0, field: value})  # type: ignore[arg-type]
