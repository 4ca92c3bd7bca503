"""Prompts share exactly what the plan says, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.traces import TraceRequest
from benchmarks.workload import (
    LengthLaw,
    Workload,
    block_token_ids,
    plan_synthetic,
    plan_trace,
    shareable_fraction,
)

TIMES = np.arange(40.0)


def _num_shared(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    pairs = list(zip(first, second, strict=False))
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))


def test_trace_prompts_share_their_blocks_and_part_after_them() -> None:
    trace = [
        TraceRequest(0.0, 1300, 5, (46, 47, 90)),
        TraceRequest(1.0, 1200, 5, (46, 47, 91)),
        TraceRequest(2.0, 700, 5, (92, 47)),
    ]
    first, second, third = plan_trace(trace, time_factor=2.0, seed=1)
    assert [len(one.token_ids) for one in (first, second, third)] == [1300, 1200, 700]
    assert _num_shared(first.token_ids, second.token_ids) == 1024
    # The same block id behind another block is another prefix.
    assert _num_shared(first.token_ids, third.token_ids) == 0
    assert [one.shareable_tokens for one in (first, second, third)] == [0, 1024, 0]
    assert [one.intended_s for one in (first, second, third)] == [0.0, 2.0, 4.0]


def test_traces_without_blocks_share_nothing() -> None:
    first, second = plan_trace([TraceRequest(0.0, 64, 1), TraceRequest(0.0, 64, 1)], 1.0, seed=1)
    assert _num_shared(first.token_ids, second.token_ids) == 0


def test_another_seed_shares_nothing() -> None:
    workload = Workload(LengthLaw(64, 64), LengthLaw(4, 4), hit_rate=0.5)
    one, other = (plan_synthetic(workload, TIMES, seed) for seed in (1, 2))
    assert max(_num_shared(a.token_ids, b.token_ids) for a in one for b in other) < 4


@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 0.9])
def test_hit_rate_is_what_a_cache_could_serve(hit_rate: float) -> None:
    workload = Workload(LengthLaw(200, 200), LengthLaw(1, 8), hit_rate=hit_rate, num_prefixes=2)
    plan = plan_synthetic(workload, np.arange(400.0), seed=3)
    assert shareable_fraction(plan) == pytest.approx(hit_rate, abs=0.01)
    assert all(len(one.token_ids) == 200 and 1 <= one.output_tokens <= 8 for one in plan)


def test_a_longer_cut_of_a_block_begins_with_a_shorter_one() -> None:
    short, long = (block_token_ids(5, 9, num_tokens, (100, 900)) for num_tokens in (10, 50))
    assert long[:10] == short
    assert all(100 <= token < 900 for token in long)


def test_impossible_workloads_are_refused() -> None:
    with pytest.raises(ValueError, match="hit_rate"):
        Workload(LengthLaw(1, 1), LengthLaw(1, 1), hit_rate=1.0)
    with pytest.raises(ValueError, match="lengths"):
        LengthLaw(5, 4)
