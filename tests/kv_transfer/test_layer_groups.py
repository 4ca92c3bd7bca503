"""How many layers go at once follows from what a link costs, not from a number of tokens."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.layer_groups import MIN_COST_RATIO, LinkCosts, layer_groups

FAST = LinkCosts(bytes_per_s=10e9, operation_s=50e-6)
LAYER_BYTES_OF_A_TOKEN = 768  # the default model's


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (16, (30,)),  # 37 us in all: less than four operations
        (64, (30,)),
        (128, (21, 8, 1)),
        (512, (6, 6, 6, 6, 5, 1)),
        (4096, (1,) * 30),
    ],
)
def test_short_prompts_go_at_once_and_long_ones_layer_by_layer(num_tokens: int, expected: tuple[int, ...]) -> None:
    assert layer_groups(30, num_tokens * LAYER_BYTES_OF_A_TOKEN, FAST) == expected


def test_a_dear_operation_or_a_fast_link_makes_larger_groups() -> None:
    layer_bytes = 512 * LAYER_BYTES_OF_A_TOKEN
    assert layer_groups(30, layer_bytes, LinkCosts(10e9, 500e-6)) == (30,)
    assert layer_groups(30, layer_bytes, LinkCosts(100e6, 500e-6)) == (1,) * 30
    assert layer_groups(30, layer_bytes, LinkCosts(100e6, math.inf)) == (30,)


@given(
    num_layers=st.integers(1, 130),
    layer_bytes=st.integers(0, 2**32),
    bytes_per_s=st.floats(1e6, 1e12),
    operation_s=st.floats(1e-7, 1) | st.just(math.inf),
)
def test_groups_cover_all_layers_and_pay_for_their_operation(
    num_layers: int, layer_bytes: int, bytes_per_s: float, operation_s: float
) -> None:
    groups = layer_groups(num_layers, layer_bytes, LinkCosts(bytes_per_s, operation_s))
    assert sum(groups) == num_layers
    assert min(groups) >= 1
    if len(groups) == 1:
        return
    assert groups[-1] == 1
    for group in groups[:-2]:  # the one before the last is what is left
        assert group * layer_bytes / bytes_per_s >= MIN_COST_RATIO * operation_s * 0.999
        assert group == 1 or (group - 1) * layer_bytes / bytes_per_s < MIN_COST_RATIO * operation_s * 1.001
