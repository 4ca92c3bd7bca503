"""Three estimators of one knee, on curves whose knee is known."""

from __future__ import annotations

import math

import pytest

from benchmarks.knee import RatePoint, capacity_at_slo, first_violation, saturation
from benchmarks.run_summary import Flag
from benchmarks.statistics import Interval


def _point(offered: float, achieved: float, attainment: float, *flags: Flag) -> RatePoint:
    return RatePoint(
        offered, achieved, Interval(attainment - 0.02, attainment, min(1.0, attainment + 0.02)), frozenset(flags)
    )


CURVE = (
    _point(2.0, 2.0, 1.0),
    _point(4.0, 4.02, 0.99),
    _point(6.0, 5.95, 0.95),
    _point(8.0, 7.0, 0.55, Flag.SATURATED),
    _point(10.0, 7.1, 0.1, Flag.SATURATED, Flag.UNSTEADY),
)


def test_capacity_lies_where_attainment_crosses_ninety_percent() -> None:
    capacity = capacity_at_slo(CURVE)
    assert capacity.value == pytest.approx(6.25)
    assert 6.0 <= capacity.low < capacity.value < capacity.high <= 8.0


def test_plateau_is_what_is_achieved_beyond_saturation() -> None:
    plateau = saturation(CURVE)
    assert plateau.value == pytest.approx(7.05, abs=0.05)
    assert plateau.contains(7.05)
    assert saturation(CURVE[:3]).high == math.inf


def test_first_violation_is_the_lowest_bad_run() -> None:
    assert first_violation(CURVE) == 8.0
    assert first_violation(CURVE[:3]) == math.inf


def test_a_growing_queue_is_a_violation_even_with_good_attainment() -> None:
    assert first_violation((_point(2.0, 2.0, 1.0), _point(3.0, 3.0, 0.97, Flag.UNSTEADY))) == 3.0


def test_a_late_client_does_not_take_a_pass_away() -> None:
    assert first_violation((_point(2.0, 2.0, 1.0, Flag.CLIENT_LIMITED),)) == math.inf
    assert first_violation((_point(2.0, 2.0, 1.0, Flag.CACHE_WARM),)) == 2.0


def test_ends_of_the_range_are_said_as_such() -> None:
    assert capacity_at_slo(CURVE[:2]) == Interval(4.0, 4.0, math.inf)
    assert capacity_at_slo(CURVE[3:]) == Interval(0.0, 0.0, 8.0)
