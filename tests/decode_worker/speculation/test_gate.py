"""Guessing is switched on where it pays and off where it costs."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from decode_worker.speculation.gate import (
    COOL_DOWN_STEPS,
    GateState,
    StepCosts,
    after_step,
    best_cut,
    best_num_drafts,
    expected_tokens,
    is_worth_asking,
    least_that_pays,
    may_pay,
    num_drafts_now,
)

# 16 rows cost little more than one, as on a machine that streams its weights once a step.
FLAT = StepCosts((1, 16, 64), (17.0, 19.0, 60.0), draft_ms=0.01)
STEEP = StepCosts((1, 16), (10.0, 160.0), draft_ms=0.0)


def test_expected_tokens_is_the_textbook_sum() -> None:
    assert expected_tokens(0.8, 4) == pytest.approx(sum(0.8**power for power in range(5)))
    assert round(expected_tokens(0.8, 4), 1) == 3.4
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.0, 4) == 1


def test_costs_between_the_measured_sizes() -> None:
    assert FLAT.verification_ms(1) == 17
    assert FLAT.verification_ms(16) == 19
    assert FLAT.verification_ms(40) == pytest.approx(39.5)
    assert FLAT.verification_ms(128) == pytest.approx(120)


def test_cheap_verification_takes_many_drafts_and_dear_verification_none() -> None:
    assert best_num_drafts(0.8, 1, FLAT, 8) == 8
    assert best_num_drafts(0.8, 1, STEEP, 8) == 0
    assert best_num_drafts(0.05, 1, FLAT, 8) in (0, 1)


def test_a_large_batch_turns_speculation_off() -> None:
    assert best_num_drafts(0.7, 64, FLAT, 8) == 0


def test_a_drafter_that_never_hits_is_tried_less_and_less_often() -> None:
    state, tries = GateState(), []
    for step in range(2000):
        num_drafts, state = num_drafts_now(state, 1, FLAT, 4)
        if num_drafts:
            tries.append(step)
            state = after_step(state, num_drafts, 0)
    assert 0 < len(tries) < 300
    first, last = sum(step < 500 for step in tries), sum(step >= 1500 for step in tries)
    assert last < first / 2


def test_acceptance_counts_trials_up_to_the_first_rejection() -> None:
    state = GateState(acceptance=0.5)
    assert after_step(state, 4, 0).acceptance == pytest.approx(0.45)
    assert after_step(state, 1, 1).acceptance == pytest.approx(0.55)
    assert math.isclose(after_step(state, 2, 1).acceptance, 0.9 * 0.55)


def test_hits_as_of_a_new_one_end_the_long_cool_downs_and_a_lucky_one_does_not() -> None:
    assert after_step(GateState(next_cool_down=256), 4, 4).next_cool_down == COOL_DOWN_STEPS
    assert after_step(GateState(0.4, next_cool_down=256), 1, 1).next_cool_down == 256


# A guess of four streams at once must hold nearly every second time.
DEAR = StepCosts((1, 4, 8, 16), (8.0, 9.6, 13.1, 23.2), draft_ms=0.13)


def test_one_that_hits_too_rarely_is_hardly_asked() -> None:
    """Two thirds of its guesses are wrong where every second one must be right."""
    assert 0.4 < least_that_pays(4, DEAR, 8) < 0.5
    assert least_that_pays(1, STEEP, 8) == 1.0
    draw, state, asked = random.Random(4), GateState(), 0
    for _ in range(1000):
        num_drafts, state = num_drafts_now(state, 4, DEAR, 8)
        if num_drafts:
            asked += 1
            state = after_step(state, 1, int(draw.random() < 1 / 3))
    assert 5 < asked < 60


def test_a_trial_ends_with_its_first_miss_and_goes_on_while_guesses_hold() -> None:
    state = GateState(acceptance=0.01)
    _, state = num_drafts_now(state, 4, DEAR, 8)
    assert state.cool_down == COOL_DOWN_STEPS
    state = replace(state, cool_down=0)
    assert num_drafts_now(state, 4, DEAR, 8)[0] > 0
    assert num_drafts_now(after_step(state, 1, 1), 4, DEAR, 8)[0] > 0
    assert num_drafts_now(after_step(state, 1, 0), 4, DEAR, 8)[0] == 0


def test_a_batch_that_is_too_large_for_anyone_starts_no_cool_down() -> None:
    state = GateState()
    for _ in range(100):
        num_drafts, state = num_drafts_now(state, 64, FLAT, 8)
        assert num_drafts == 0
    assert num_drafts_now(state, 1, FLAT, 8)[0] > 0, "the others have ended: it guesses at once"


# Rows up to the fourth are hidden behind the weights' reading, those behind it compute.
KINKED = StepCosts((1, 2, 3, 4, 5, 6, 8, 16), (10.0, 10.0, 10.1, 10.2, 11.4, 12.5, 14.5, 24.0), draft_ms=0.2)


@pytest.mark.parametrize(
    ("confidences", "batch_size", "num_kept"),
    [
        ((0.6, 0.4, 0.3, 0.3), 1, 4),  # four rows are free, the fifth is worth a third of a token
        ((0.6, 0.4, 0.3, 0.15), 1, 3),  # not this little
        ((0.04, 0.03, 0.02), 1, 3),
        ((0.001,), 1, 1),  # a second row costs nothing
        ((0.6, 0.4, 0.3), 8, 0),  # every row computes: 24 ms for 1.6 tokens where 14.5 give one
        ((0.9, 0.4), 4, 1),  # 8 rows give 1.9 tokens, 12 rows 2.3
        ((), 1, 0),
    ],
)
def test_a_draft_loses_the_rows_that_cost_more_than_they_bring(
    confidences: tuple[float, ...], batch_size: int, num_kept: int
) -> None:
    assert best_cut(confidences, batch_size, KINKED) == num_kept


def test_where_even_right_guesses_do_not_pay_nobody_is_asked() -> None:
    assert may_pay(1, KINKED, 4)
    assert may_pay(4, KINKED, 4)
    assert not may_pay(16, KINKED, 4)
    assert not may_pay(1, STEEP, 8)


def test_another_drafter_is_asked_where_the_guesses_in_hand_may_be_wrong() -> None:
    sure, unsure = (0.95, 0.9, 0.86, 0.8), (0.2, 0.1)
    assert is_worth_asking(unsure, 0.5, 1, KINKED, 4)
    assert not is_worth_asking(sure, 0.5, 1, KINKED, 4), "a guess costs, and the copy goes on without it"
    assert not is_worth_asking(unsure, 0.05, 1, KINKED, 4), "it is not expected to hit"
    assert not is_worth_asking(unsure, 0.9, 16, KINKED, 4), "every row computes"
    assert is_worth_asking((), 0.5, 1, KINKED, 4)
