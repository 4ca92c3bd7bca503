"""The share of a step that prompts may take beside decodes, learned from the steps."""

from __future__ import annotations

import random

import pytest

from engine.block_pool import BlockPool
from engine.sequence import Sequence
from engine.step_budget import HEADROOM, LEAST_SHARE, StepBudget
from engine.step_plan import ScheduledChunk
from tests.engine.engine_bench import make_request

BLOCK_TOKENS = 16
SEQUENCE = Sequence(
    make_request("any", range(10)), BlockPool(4, BLOCK_TOKENS, "model").new_chain(b"tenant"), 4096, 0, 0.0
)


def decodes(count: int) -> list[ScheduledChunk]:
    return [ScheduledChunk(SEQUENCE, 100, 1)] * count


def prompt(num_tokens: int, first_token: int = 0) -> list[ScheduledChunk]:
    return [ScheduledChunk(SEQUENCE, first_token, num_tokens)]


def learned(itl_slo_ms: float, decode_ms: float, token_ms: float) -> StepBudget:
    """As on a machine where a token costs the same wherever it stands."""
    budget = StepBudget(itl_slo_ms, BLOCK_TOKENS)
    for _ in range(20):
        budget.saw_step(decodes(8), decode_ms)
        budget.saw_step(decodes(8) + prompt(64), decode_ms + 64 * token_ms)
    return budget


def test_one_block_while_nothing_is_known() -> None:
    budget = StepBudget(100.0, BLOCK_TOKENS)
    assert budget.prefill_tokens(8, 0) == budget.prefill_tokens(8, 4000) == BLOCK_TOKENS


def test_what_the_objective_leaves_beside_the_decodes() -> None:
    assert learned(100.0, decode_ms=25.0, token_ms=1.5).prefill_tokens(8, 0) == int((HEADROOM * 100 - 25) / 1.5)


def test_decodes_that_came_since_are_counted() -> None:
    budget = learned(100.0, decode_ms=25.0, token_ms=1.0)
    assert budget.prefill_tokens(16, 0) == pytest.approx(HEADROOM * 100 - 50, abs=1)
    assert budget.prefill_tokens(2, 0) == budget.prefill_tokens(8, 0)


def test_a_looser_objective_leaves_more() -> None:
    tight, loose = learned(100.0, 25.0, 1.5), learned(200.0, 25.0, 1.5)
    assert loose.prefill_tokens(8, 0) > 2 * tight.prefill_tokens(8, 0)


def test_prompts_go_on_beside_decodes_that_are_late_by_themselves() -> None:
    assert learned(100.0, decode_ms=400.0, token_ms=1.5).prefill_tokens(8, 0) == BLOCK_TOKENS


def test_a_prompt_alone_teaches_the_time_of_a_token() -> None:
    budget = StepBudget(100.0, BLOCK_TOKENS)
    budget.saw_step(prompt(512), 512.0)
    assert budget.prefill_tokens(8, 0) == int(HEADROOM * 100)


def test_a_slower_machine_shrinks_it() -> None:
    budget = learned(100.0, 25.0, 1.0)
    before = budget.prefill_tokens(8, 0)
    for _ in range(30):
        budget.saw_step(decodes(8) + prompt(48), 25.0 + 48 * 2.0)
    assert budget.prefill_tokens(8, 0) < 0.7 * before


def test_a_short_tail_of_a_prompt_teaches_nothing() -> None:
    budget = learned(100.0, 25.0, 1.0)
    before = budget.prefill_tokens(8, 0)
    for _ in range(30):
        budget.saw_step(decodes(8) + prompt(2), 30.0)
    assert budget.prefill_tokens(8, 0) == before


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_every_part_of_a_long_prompt_keeps_the_step_within_the_target(noise: float) -> None:
    """A token at position p costs 1.2 + 0.0004 p ms: at 4,000 more than twice as much as at the start."""
    chance, budget = random.Random(3), StepBudget(100.0, BLOCK_TOKENS)
    for _ in range(10):
        budget.saw_step(decodes(8), 25.0)
    expected_ms = []
    for number in range(6):
        position = 0
        while position < 4000:
            count = min(budget.prefill_tokens(8, position), 4000 - position)
            step_ms = 25.0 + count * (1.2 + 0.0004 * (position + count / 2))
            if number >= 2 and position + count < 4000:
                expected_ms.append(step_ms)
            budget.saw_step(decodes(8) + prompt(count, position), step_ms * (1 + chance.uniform(-noise, noise)))
            position += count
    target_ms = HEADROOM * 100
    assert max(expected_ms) <= target_ms * (1.04 if not noise else 1.15)
    assert min(expected_ms) >= target_ms * (0.9 if not noise else 0.75)


def test_the_share_is_what_a_prompt_gets_of_the_time() -> None:
    budget = learned(100.0, decode_ms=25.0, token_ms=1.5)
    assert budget.prefill_share == pytest.approx(1 - 25 / (HEADROOM * 100))
    late = learned(100.0, decode_ms=400.0, token_ms=1.5)  # a block a step
    assert late.prefill_share == pytest.approx(16 * 1.5 / (16 * 1.5 + 400))


def test_the_share_is_known_before_any_prompt_and_never_zero() -> None:
    budget = StepBudget(100.0, BLOCK_TOKENS)
    assert budget.prefill_share == 1.0
    budget.saw_step(decodes(8), 17.0)
    assert budget.prefill_share == pytest.approx(0.8)
    budget.saw_step(decodes(8), 10_000.0)
    assert budget.prefill_share == LEAST_SHARE
