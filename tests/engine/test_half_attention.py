"""Attention of bfloat16 KV in half precision: near to that of float32, the same bits in every kernel, and nothing that
a float16 does not hold is lost silently."""

from __future__ import annotations

import numpy as np
import pytest

from engine.draft import ROOT
from tests.engine.attention_case import (
    CHUNKS,
    NUM_ROWS,
    PREFIX,
    Case,
    assert_near,
    assert_tree_sees_its_branches,
    root_mean_square,
)
from tests.engine.native_model import built_isas

HALF = [isa for isa in built_isas() if isa == "avx512_fp16"]
pytestmark = pytest.mark.parametrize("isa", HALF)

NEAR = 1.6e-3  # root of mean squares, relative: 1.3e-3 is the largest that was seen


@pytest.mark.parametrize("head_dim", [32, 64, 96, 160, 256])
def test_results_are_nearer_than_with_queries_and_weights_rounded_to_bfloat16(isa: str, head_dim: int) -> None:
    case = Case(head_dim)
    found, expected = case.attended(isa, [NUM_ROWS]), case.in_float32(isa)
    rounded = case.attended("avx512_bf16", [NUM_ROWS])
    assert not np.array_equal(found, case.attended("avx512_bf16_fma", [NUM_ROWS]))
    assert_near(found, expected, NEAR)
    assert root_mean_square(found - expected) < 0.6 * root_mean_square(rounded - expected)


@pytest.mark.parametrize(
    ("head_dim", "group", "window", "block_tokens"),
    [
        (32, 3, 0, 16),
        (64, 3, 0, 16),
        (64, 3, 100, 8),
        (64, 1, 0, 128),
        (96, 8, 0, 24),
        (128, 4, 40, 16),
        (256, 2, 0, 16),
    ],
)
@pytest.mark.parametrize("has_odd", [False, True])
def test_every_kernel_gives_a_row_the_same_bits(
    isa: str, head_dim: int, group: int, window: int, block_tokens: int, has_odd: bool
) -> None:
    case = Case(head_dim, group, window)
    if has_odd:
        case.values[[3, 130, 131, 240]] *= 1e4
        case.values[200, 1, head_dim - 1] = 128.0
        case.keys[[5, 220]] *= 1e3
        case.keys[[6, 221]] *= 1e-30
    whole = case.attended(isa, CHUNKS[0], block_tokens=block_tokens)
    assert np.isfinite(whole).all()
    for chunks in CHUNKS[1:]:
        np.testing.assert_array_equal(case.attended(isa, chunks, block_tokens=block_tokens), whole)


@pytest.mark.parametrize(
    ("group", "parents"), [(2, (ROOT, ROOT)), (3, (ROOT, ROOT, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6))]
)
@pytest.mark.parametrize("window", [0, 100])
def test_rows_of_a_tree_see_their_branches(isa: str, group: int, parents: tuple[int, ...], window: int) -> None:
    """Of few rows and of many; and a tree that is a chain gives the bits of a chunk."""
    assert_tree_sees_its_branches(Case(64, group, window), isa, parents, NEAR)


@pytest.mark.parametrize("chunks", CHUNKS[:2])
@pytest.mark.parametrize("scale", [2.0**-10, 20.0, 1e3, 1e6, 1e15])
def test_values_of_any_size(isa: str, chunks: list[int], scale: float) -> None:
    case = Case(64)
    case.values *= np.float32(scale)
    assert_near(case.attended(isa, chunks), case.in_float32(isa), NEAR)


@pytest.mark.parametrize("chunks", CHUNKS[:2])
@pytest.mark.parametrize("scale", [2.0**-14, 2.0**-17, 1e-20])
def test_of_tiny_values_no_more_is_lost_than_is_said(isa: str, chunks: list[int], scale: float) -> None:
    case = Case(64)
    case.values *= np.float32(scale)
    assert np.abs(case.attended(isa, chunks) - case.in_float32(isa)).max() < 2.0**-17


@pytest.mark.parametrize("chunks", CHUNKS[:2])
def test_single_large_values_leave_the_others_as_they_were(isa: str, chunks: list[int]) -> None:
    case = Case(64)
    case.values[[17, 140], 1, 9] = 3e4, -5e8
    found, expected = case.attended(isa, chunks), case.in_float32(isa)
    for dim in range(expected.shape[1]):
        assert_near(found[:, dim], expected[:, dim], 2 * NEAR)


@pytest.mark.parametrize("chunks", CHUNKS[:2])
def test_the_largest_sums_do_not_overflow(isa: str, chunks: list[int]) -> None:
    """All keys weigh the same, and each value is the largest that is not odd: equal roundings add up."""
    case = Case(64)
    case.keys[:] = 0
    case.values[:] = 127.5
    assert_near(case.attended(isa, chunks), case.in_float32(isa), 2.0**-8)


@pytest.mark.parametrize("chunks", CHUNKS[:2])
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_values_that_are_no_numbers_are_not_made_such(isa: str, chunks: list[int], odd: float) -> None:
    case = Case(64)
    case.values[200, 1, 3] = odd
    assert not np.isfinite(case.attended(isa, chunks)).any()  # the layer's output matrix mixes dims and heads


@pytest.mark.parametrize("chunks", CHUNKS[:2])
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dim", [2, 3])
def test_keys_that_are_no_numbers_are_not_made_such(isa: str, chunks: list[int], odd: float, dim: int) -> None:
    case = Case(64)
    case.keys[200, 1, dim] = odd
    assert not np.isfinite(case.attended(isa, chunks)).any()


@pytest.mark.parametrize("chunks", CHUNKS[:2])
@pytest.mark.parametrize("odd", [np.inf, np.nan])
def test_queries_that_are_no_numbers_are_not_made_such(isa: str, chunks: list[int], odd: float) -> None:
    case = Case(64)
    case.weights.tensors["model.layers.0.self_attn.q_proj.weight"][70, 0] = odd
    assert not np.isfinite(case.attended(isa, chunks)).any()


@pytest.mark.parametrize("chunks", CHUNKS[:2])
@pytest.mark.parametrize("head_dim", [64, 160])
def test_powers_of_two_of_keys_and_queries_change_no_bit(isa: str, chunks: list[int], head_dim: int) -> None:
    """As far as floats go: both are brought to the middle of what a float16 holds."""
    expected = Case(head_dim).attended(isa, chunks)
    for power in (-60, -16, 16, 60):
        case = Case(head_dim)
        case.keys = np.ldexp(case.keys, power)
        case.weights.tensors["model.layers.0.self_attn.q_proj.weight"] *= 2.0**-power
        np.testing.assert_array_equal(case.attended(isa, chunks), expected)


@pytest.mark.parametrize("chunks", CHUNKS[:2])
def test_keys_that_a_row_does_not_see_change_none_of_its_bits(isa: str, chunks: list[int]) -> None:
    """However large they are: a power of two is a key's or a row's own."""
    case = Case(64, window=100)
    before = case.attended(isa, chunks)
    case.keys[: PREFIX - 100] *= 1e4
    case.values[: PREFIX - 100] *= 1e4
    np.testing.assert_array_equal(case.attended(isa, chunks), before)
