"""Stop tokens first, then the length, token by token."""

from __future__ import annotations

import pytest

from cluster.sampling_params import SamplingParams
from engine.request import FinishReason
from engine.stop_rules import StopDecision, apply_stop_rules

STOP = 99
PARAMS = SamplingParams(max_tokens=5, stop_token_ids=(STOP,))


def test_s11_a_stop_inside_the_budget_is_not_masked_by_the_cap() -> None:
    decision = apply_stop_rules([10, 11, STOP, 20, 21, 22], PARAMS, 0, 5)
    assert decision == StopDecision(3, FinishReason.STOP, STOP)


def test_s12_each_token_of_a_run_is_checked() -> None:
    assert apply_stop_rules([1, 2, STOP, 3], PARAMS, 0, 100).num_kept == 3
    assert apply_stop_rules([STOP, STOP], PARAMS, 0, 100).num_kept == 1


def test_the_cap_ends_a_run_in_its_middle() -> None:
    assert apply_stop_rules([1, 2, 3], PARAMS, 3, 5) == StopDecision(2, FinishReason.LENGTH)


def test_a_stop_at_the_cap_says_stop() -> None:
    assert apply_stop_rules([1, STOP], PARAMS, 3, 5) == StopDecision(2, FinishReason.STOP, STOP)


def test_without_an_end_every_token_is_kept() -> None:
    assert apply_stop_rules([1, 2], PARAMS, 0, 5) == StopDecision(2)


@pytest.mark.parametrize(("num_generated", "ends"), [(0, False), (1, False), (2, True), (3, True)])
def test_before_min_tokens_a_stop_token_does_not_stop(num_generated: int, ends: bool) -> None:
    params = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(STOP,))
    decision = apply_stop_rules([STOP], params, num_generated, 9)
    assert (decision.finish_reason is FinishReason.STOP) is ends
