"""The share of a step that prompts may take beside decodes, learned from the steps."""

from __future__ import annotations

from engine.step_budget import HEADROOM, StepBudget

BLOCK_TOKENS = 16


def learned(itl_slo_ms: float, decode_ms: float, token_ms: float) -> StepBudget:
    budget = StepBudget(itl_slo_ms, BLOCK_TOKENS)
    for _ in range(20):
        budget.saw_step(8, 0, decode_ms)
        budget.saw_step(8, 64, decode_ms + 64 * token_ms)
    return budget


def test_one_block_while_nothing_is_known() -> None:
    assert StepBudget(100.0, BLOCK_TOKENS).prefill_tokens == BLOCK_TOKENS


def test_what_the_objective_leaves_beside_the_decodes() -> None:
    assert learned(100.0, decode_ms=25.0, token_ms=1.5).prefill_tokens == int((HEADROOM * 100 - 25) / 1.5)


def test_a_looser_objective_leaves_more() -> None:
    tight, loose = learned(100.0, 25.0, 1.5), learned(200.0, 25.0, 1.5)
    assert loose.prefill_tokens > 2 * tight.prefill_tokens


def test_prompts_go_on_beside_decodes_that_are_late_by_themselves() -> None:
    assert learned(100.0, decode_ms=400.0, token_ms=1.5).prefill_tokens == BLOCK_TOKENS


def test_a_prompt_alone_teaches_the_time_of_a_token() -> None:
    budget = StepBudget(100.0, BLOCK_TOKENS)
    budget.saw_step(0, 512, 512.0)
    assert budget.prefill_tokens == int(HEADROOM * 100)


def test_growing_contexts_shrink_it() -> None:
    budget = learned(100.0, 25.0, 1.0)
    before = budget.prefill_tokens
    for _ in range(30):
        budget.saw_step(8, 48, 25.0 + 48 * 2.0)
    assert budget.prefill_tokens < 0.7 * before


def test_a_short_tail_of_a_prompt_teaches_nothing() -> None:
    budget = learned(100.0, 25.0, 1.0)
    before = budget.prefill_tokens
    for _ in range(30):
        budget.saw_step(8, 1, 30.0)
    assert budget.prefill_tokens == before
