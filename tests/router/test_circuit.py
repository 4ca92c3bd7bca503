"""Circuits, slow start and the retry budget: pure policies on a virtual clock."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from router.circuit import (
    CLOSED,
    FAILURES_TO_OPEN,
    MAX_OPEN_S,
    PROBE_TIMEOUT_S,
    Circuit,
    Position,
    admits,
    on_failure,
    on_sent,
    on_success,
)
from router.retry_budget import MAX_SAVED, RetryBudget
from router.slow_start import RAMP_S, share_of, warmed
from tests.router.placement_simulation import worker


def opened(now_s: float = 0.0) -> Circuit:
    circuit = CLOSED
    for _ in range(FAILURES_TO_OPEN):
        circuit = on_failure(circuit, now_s)
    return circuit


def test_a_few_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    circuit = CLOSED
    for _ in range(10):
        circuit = on_success(on_failure(on_failure(circuit, 0.0), 0.0))
    assert circuit == CLOSED
    assert opened().position is Position.OPEN
    assert not admits(opened(), 0.5)


def test_after_the_back_off_one_probe_goes_and_decides() -> None:
    circuit = on_sent(opened(), 1.0)
    assert circuit.position is Position.HALF_OPEN
    assert not admits(circuit, 1.5), "one probe at a time"
    assert on_success(circuit) == CLOSED
    again = on_failure(circuit, 1.5)
    assert again.position is Position.OPEN
    assert not admits(again, 3.0), "the back-off has doubled"
    assert admits(again, 3.5)


def test_a_probe_that_never_comes_back_does_not_hold_it_for_ever() -> None:
    circuit = on_sent(opened(), 1.0)
    assert admits(circuit, 1.0 + PROBE_TIMEOUT_S)


def test_the_back_off_is_bounded_and_old_failures_do_not_lengthen_it() -> None:
    circuit, now_s = opened(), 0.0
    assert on_failure(circuit, 0.1) is circuit
    for _ in range(20):
        now_s += 2 * MAX_OPEN_S
        circuit = on_failure(on_sent(circuit, now_s), now_s)
    assert circuit.until_s - now_s == MAX_OPEN_S


def test_f21_a_new_workers_share_grows_from_a_tenth_to_the_whole() -> None:
    old, new = worker("old"), worker("new")
    new.joined_s = 100.0
    chance = random.Random(1)
    for passed_s, low, high in ((0.0, 70, 130), (7.5, 500, 600), (RAMP_S, 1000, 1000)):
        found = Counter(state.worker_id for _ in range(1000) for state in warmed([old, new], 100.0 + passed_s, chance))
        assert found[old.worker_id] == 1000
        assert low <= found[new.worker_id] <= high
    assert share_of(100.0, 50.0) == pytest.approx(0.1), "a clock that steps back"


def test_f21_a_cluster_that_just_started_has_no_warm_workers_and_uses_all() -> None:
    states = [worker("a"), worker("b")]
    for state in states:
        state.joined_s = 10.0
    assert warmed(states, 11.0, random.Random(1)) == states
    assert warmed([], 11.0, random.Random(1)) == []


def test_f02_the_first_move_is_free_and_more_come_from_a_share_of_the_traffic() -> None:
    budget = RetryBudget(0.0)
    assert all(budget.may_move(0, 0.0) for _ in range(1000))
    granted = sum(budget.may_move(1, 0.0) for _ in range(1000))
    assert granted == MAX_SAVED
    assert budget.num_refused == 1000 - MAX_SAVED
    for _ in range(51):
        budget.request_came()
    assert sum(budget.may_move(1, 0.0) for _ in range(100)) == 10
    assert budget.may_move(2, 5.0), "time alone gives a few"
