"""Timing models start from a prior, learn the machine, and are not led astray by one bad clock."""

from __future__ import annotations

import math
import random

import pytest

from router.timing_model import MIN_SAMPLES, TimingModel, TimingPrior, exposed_transfer_ms

PRIOR = TimingPrior(prefill=(5.0, 0.5, 0.0001), decode=(15.0, 0.5, 0.001))


def test_the_prior_serves_until_something_was_seen() -> None:
    assert TimingModel(PRIOR).prefill_ms(100, 0) == pytest.approx(5 + 50 + 0.0001 * 100 * 50)


@pytest.mark.parametrize("speed", [0.02, 1.0, 3.0])
def test_until_enough_was_seen_the_prior_is_stretched_by_what_was(speed: float) -> None:
    model, truth = TimingModel(PRIOR), TimingModel(PRIOR)
    errors = []
    for index in range(MIN_SAMPLES - 1):
        uncached = 100 + 400 * (index % 5)
        model.observe_prefill(uncached, 0, speed * truth.prefill_ms(uncached, 0))
        errors.append(abs(model.prefill_ms(2000, 0) / (speed * truth.prefill_ms(2000, 0)) - 1))
    # Of one sample's word and the prior's, the mean; then the samples'.
    assert errors[0] == pytest.approx(abs((speed + 1) / 2 / speed - 1))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == pytest.approx(errors[0] / 10)


def test_a_short_prompt_that_waited_for_others_says_little_beside_long_ones() -> None:
    model, truth = TimingModel(PRIOR), TimingModel(PRIOR)
    model.observe_prefill(10, 0, 50 * truth.prefill_ms(10, 0))
    for _ in range(4):
        model.observe_prefill(2000, 0, truth.prefill_ms(2000, 0))
    assert model.prefill_ms(2000, 0) == pytest.approx(truth.prefill_ms(2000, 0), rel=0.15)


def test_the_model_learns_another_machine_through_noise() -> None:
    chance, model = random.Random(1), TimingModel(PRIOR)
    for _ in range(2000):
        uncached, cached = chance.uniform(16, 4000), chance.choice((0.0, 1000.0))
        true_ms = 2 + 0.1 * uncached + 0.00002 * uncached * (cached + uncached / 2)
        model.observe_prefill(uncached, cached, true_ms * chance.uniform(0.95, 1.05))
        batch = chance.randrange(1, 64)
        model.observe_step(batch, 500 * batch, (4 + 0.2 * batch + 0.0005 * 500 * batch) * chance.uniform(0.95, 1.05))
    assert model.prefill_ms(2000, 500) == pytest.approx(2 + 200 + 0.00002 * 2000 * 1500, rel=0.05)
    assert model.step_ms(16, 8000) == pytest.approx(4 + 3.2 + 4.0, rel=0.05)


def test_a_changed_machine_is_followed() -> None:
    model = TimingModel(PRIOR)
    for speed in (1.0, 3.0):
        for index in range(500):
            uncached = 100 + index % 1000
            model.observe_prefill(uncached, 0, speed * (5 + 0.5 * uncached))
    assert model.prefill_ms(600, 0) == pytest.approx(3 * 305, rel=0.05)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_what_is_no_time_changes_nothing(bad: float) -> None:
    model = TimingModel(PRIOR)
    for _ in range(2 * MIN_SAMPLES):
        model.observe_step(4, 100, bad)
    assert model.step_ms(4, 100) == pytest.approx(15 + 2 + 0.1)


def test_predictions_are_never_negative() -> None:
    model = TimingModel(PRIOR)
    for _ in range(100):
        model.observe_prefill(1000, 0, 0.001)
    assert model.prefill_ms(10, 0) >= 0


def test_only_the_tail_of_a_transfer_is_exposed() -> None:
    # 300 bytes at 1 byte/ms over 30 layers, hidden behind 1,000 ms of compute: one layer and a round trip.
    assert exposed_transfer_ms(300, 1.0, 1000.0, 30, 0.5) == pytest.approx(10.5)
    # A link slower than the compute lags behind.
    assert exposed_transfer_ms(300, 1.0, 100.0, 30, 0.0) == pytest.approx(10 + 200 * 29 / 30)
