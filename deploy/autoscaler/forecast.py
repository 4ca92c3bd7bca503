"""The demand when a replica that is started now would be ready: four forecasters, chosen by how wrong each was lately.

    last value   what came now comes then
    Holt         level and damped trend, exponentially smoothed         (Holt 1957; damping: Gardner and McKenzie 1985)
    Kalman       level and trend as a hidden state, noise estimated     (local linear trend; Harvey 1989)
    seasonal     now, times what this time of the season had to the time ahead of it

Every forecast is scored when its time has come. Another than the last value must have been clearly better: after a step
all of them are equally wrong, and a trend made of a step would overshoot. Pure: the state goes in and comes out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal


class Forecaster(Enum):
    LAST_VALUE = "last_value"
    HOLT = "holt"
    KALMAN = "kalman"
    SEASONAL = "seasonal"


Method = Literal["off", "auto", "last_value", "holt", "kalman", "seasonal"]

HOLT_LEVEL, HOLT_TREND, HOLT_DAMPING = 0.5, 0.2, 0.9
# Noise of level and trend a tick, as shares of the measurement's variance.
KALMAN_LEVEL_NOISE, KALMAN_TREND_NOISE = 0.1, 0.01
SEASON_BUCKETS = 96  # quarters of an hour of a day
SEASON_MEMORY = 0.5  # of a season before
ERROR_MEMORY = 0.95
MIN_SCORED = 12
MIN_GAIN = 0.2  # of the last value's error, to be preferred to it
MAX_GROWTH = 2.0  # a forecast is at most this many times what comes now
MAX_PENDING = 720


@dataclass(frozen=True, slots=True)
class Forecast:
    """Requests a second expected at the horizon, and whose word it is."""

    requests_per_s: float
    forecaster: Forecaster


@dataclass(frozen=True, slots=True)
class Kalman:
    level: float
    trend: float = 0.0  # a second
    level_variance: float = 1.0
    covariance: float = 0.0
    trend_variance: float = 1.0
    noise: float = 1.0  # variance of a measurement


@dataclass(frozen=True, slots=True)
class ForecastState:
    """Everything that one tick hands to the next. Bounded: a season's buckets and one horizon of pending forecasts."""

    at_s: float = -math.inf
    rate: float = 0.0
    holt_level: float = 0.0
    holt_trend: float = 0.0  # a tick
    tick_s: float = 1.0
    kalman: Kalman = Kalman(0.0)
    season: Mapping[int, float] = field(default_factory=dict)
    season_s: float = 86_400.0
    pending: tuple[tuple[float, Mapping[Forecaster, float]], ...] = ()  # (due, what each said)
    errors: Mapping[Forecaster, float] = field(default_factory=dict)
    num_scored: Mapping[Forecaster, int] = field(default_factory=dict)


def observe(state: ForecastState, now_s: float, rate: float, horizon_s: float, season_s: float) -> ForecastState:
    """The state after a tick at which `rate` requests a second came in."""
    if state.at_s == -math.inf:
        state = replace(state, holt_level=rate, kalman=Kalman(rate), rate=rate, at_s=now_s)
    tick_s = max(now_s - state.at_s, 1e-3)
    state = _score(state, now_s, rate)
    level = HOLT_LEVEL * rate + (1 - HOLT_LEVEL) * (state.holt_level + HOLT_DAMPING * state.holt_trend)
    trend = HOLT_TREND * (level - state.holt_level) + (1 - HOLT_TREND) * HOLT_DAMPING * state.holt_trend
    bucket = _bucket(now_s, season_s)
    before = state.season.get(bucket, rate)
    state = replace(
        state,
        at_s=now_s,
        rate=rate,
        holt_level=level,
        holt_trend=trend,
        tick_s=tick_s,
        kalman=_filtered(state.kalman, rate, tick_s),
        season={**state.season, bucket: before + (rate - before) * _share(tick_s, season_s)},
        season_s=season_s,
    )
    said = {method: value for method in Forecaster if (value := _predict(state, method, horizon_s)) is not None}
    return replace(state, pending=(*state.pending, (now_s + horizon_s, said))[-MAX_PENDING:])


def forecast(state: ForecastState, method: Method, horizon_s: float) -> Forecast:
    """What is expected in `horizon_s`, by the named forecaster or by the one that was least wrong."""
    forecaster = _best(state) if method in ("auto", "off") else Forecaster(method)
    value = None if method == "off" else _predict(state, forecaster, horizon_s)
    if value is None:
        return Forecast(state.rate, Forecaster.LAST_VALUE)
    return Forecast(value, forecaster)


def _best(state: ForecastState) -> Forecaster:
    """The last value, unless another one's rolling error is clearly smaller."""
    limit = state.errors.get(Forecaster.LAST_VALUE, 0.0) * (1 - MIN_GAIN)
    scored = [
        (error, method.value, method)
        for method, error in state.errors.items()
        if state.num_scored.get(method, 0) >= MIN_SCORED and error < limit
    ]
    return min(scored)[2] if scored else Forecaster.LAST_VALUE


def _score(state: ForecastState, now_s: float, rate: float) -> ForecastState:
    """Compares the forecasts that were made for about now with what came."""
    due = [said for due_s, said in state.pending if due_s <= now_s]
    if not due:
        return state
    errors, num_scored = dict(state.errors), dict(state.num_scored)
    for method, value in due[-1].items():
        error = abs(value - rate)
        errors[method] = error if method not in errors else ERROR_MEMORY * errors[method] + (1 - ERROR_MEMORY) * error
        num_scored[method] = num_scored.get(method, 0) + 1
    pending = tuple(entry for entry in state.pending if entry[0] > now_s)
    return replace(state, pending=pending, errors=errors, num_scored=num_scored)


def _predict(state: ForecastState, method: Forecaster, horizon_s: float) -> float | None:
    """None while the forecaster knows too little."""
    match method:
        case Forecaster.LAST_VALUE:
            value: float | None = state.rate
        case Forecaster.HOLT:
            ticks = horizon_s / state.tick_s
            damped = HOLT_DAMPING * (1 - HOLT_DAMPING**ticks) / (1 - HOLT_DAMPING)
            value = state.holt_level + state.holt_trend * damped
        case Forecaster.KALMAN:
            value = state.kalman.level + state.kalman.trend * horizon_s
        case Forecaster.SEASONAL:
            here = state.season.get(_bucket(state.at_s, state.season_s))
            ahead = state.season.get(_bucket(state.at_s + horizon_s, state.season_s))
            value = state.rate * ahead / here if here and ahead is not None else None
    return None if value is None else min(max(value, 0.0), MAX_GROWTH * state.rate)


def _filtered(before: Kalman, rate: float, tick_s: float) -> Kalman:
    """One prediction and one correction of the local linear trend."""
    level = before.level + before.trend * tick_s
    level_variance = (
        before.level_variance
        + 2 * tick_s * before.covariance
        + tick_s**2 * before.trend_variance
        + KALMAN_LEVEL_NOISE * before.noise
    )
    covariance = before.covariance + tick_s * before.trend_variance
    trend_variance = before.trend_variance + KALMAN_TREND_NOISE * before.noise / tick_s**2
    surprise = rate - level
    total = level_variance + before.noise
    level_gain, trend_gain = level_variance / total, covariance / total
    return Kalman(
        level=level + level_gain * surprise,
        trend=before.trend + trend_gain * surprise,
        level_variance=(1 - level_gain) * level_variance,
        covariance=(1 - level_gain) * covariance,
        trend_variance=trend_variance - trend_gain * covariance,
        noise=max(1e-6, ERROR_MEMORY * before.noise + (1 - ERROR_MEMORY) * surprise**2),
    )


def _bucket(at_s: float, season_s: float) -> int:
    return int(at_s % season_s / season_s * SEASON_BUCKETS)


def _share(tick_s: float, season_s: float) -> float:
    """A whole bucket's worth of ticks moves its mean by `SEASON_MEMORY`."""
    ticks = max(1.0, season_s / SEASON_BUCKETS / tick_s)
    return float(1 - (1 - SEASON_MEMORY) ** (1 / ticks))
