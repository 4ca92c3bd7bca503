"""Which forecaster is believed on which traffic, and that none of them runs away."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from deploy.autoscaler.forecast import (
    MAX_GROWTH,
    SEASON_BUCKETS,
    Forecaster,
    ForecastState,
    forecast,
    observe,
)

TICK_S, HORIZON_S = 5.0, 60.0


def after(
    rate_at: Callable[[float], float], ticks: int, season_s: float = 86_400.0, horizon_s: float = HORIZON_S
) -> ForecastState:
    state = ForecastState()
    for tick in range(ticks):
        state = observe(state, TICK_S * tick, rate_at(TICK_S * tick), horizon_s, season_s)
    return state


def test_a_ramp_is_seen_coming_by_a_trend_and_not_by_the_last_value() -> None:
    state = after(lambda at_s: 10 + 0.05 * at_s, 120)
    seen = forecast(state, "auto", HORIZON_S)
    assert seen.forecaster in (Forecaster.HOLT, Forecaster.KALMAN)
    due = 10 + 0.05 * (119 * TICK_S + HORIZON_S)
    assert abs(seen.requests_per_s - due) < abs(state.rate - due) / 2


def test_steady_noise_is_left_to_what_smooths_it_and_stays_near_the_mean() -> None:
    noise = random.Random(3)
    state = after(lambda _: 20 * noise.uniform(0.9, 1.1), 300)
    assert forecast(state, "auto", HORIZON_S).requests_per_s == pytest.approx(20, rel=0.12)


def test_a_step_is_never_extrapolated() -> None:
    for ticks_after in range(1, 60):
        state = after(lambda at_s: 10.0 if at_s < 500 else 40.0, 100 + ticks_after)
        assert forecast(state, "auto", HORIZON_S).requests_per_s <= 40 * 1.1, ticks_after


def test_a_season_is_known_the_second_time_round() -> None:
    season_s = SEASON_BUCKETS * TICK_S * 2

    def rate_at(at_s: float) -> float:
        return 20 + 15 * math.sin(2 * math.pi * at_s / season_s)

    ticks = int(3.25 * season_s / TICK_S)  # at the top: it goes down from here
    state = after(rate_at, ticks, season_s, horizon_s=season_s / 4)
    seen = forecast(state, "auto", season_s / 4)
    assert seen.forecaster is Forecaster.SEASONAL
    assert seen.requests_per_s == pytest.approx(rate_at(TICK_S * (ticks - 1) + season_s / 4), rel=0.25)


def test_no_forecast_is_negative_or_more_than_twice_what_comes() -> None:
    chance = random.Random(11)
    state = ForecastState()
    for tick in range(500):
        rate = chance.choice((0.0, 1.0, 50.0, 400.0))
        state = observe(state, TICK_S * tick, rate, HORIZON_S, 86_400.0)
        for method in ("auto", "holt", "kalman", "seasonal", "last_value"):
            value = forecast(state, method, HORIZON_S).requests_per_s
            assert 0 <= value <= MAX_GROWTH * rate
    assert len(state.pending) <= HORIZON_S / TICK_S + 1
    assert len(state.season) <= SEASON_BUCKETS


def test_off_and_a_named_forecaster_are_obeyed() -> None:
    state = after(lambda at_s: 10 + 0.05 * at_s, 120)
    assert forecast(state, "off", HORIZON_S).requests_per_s == state.rate
    assert forecast(state, "holt", HORIZON_S).forecaster is Forecaster.HOLT
