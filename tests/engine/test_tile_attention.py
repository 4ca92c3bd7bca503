"""Attention of bfloat16 KV on AMX tiles: the same bits of few rows, of many and of emulated tiles."""

from __future__ import annotations

import numpy as np
import pytest

from engine.draft import ROOT
from tests.engine.attention_case import CHUNKS, PREFIX, Case, assert_near, assert_tree_sees_its_branches
from tests.engine.native_model import built_isas

TILES = [isa for isa in built_isas() if isa.startswith("amx")]
pytestmark = pytest.mark.parametrize("isa", TILES)

NEAR = 5e-3  # root of mean squares, relative: 3.2e-3 is the largest that was seen


@pytest.mark.parametrize(
    ("head_dim", "group", "window", "block_tokens"),
    [
        (32, 3, 0, 16),
        (64, 3, 0, 16),
        (64, 3, 100, 8),
        (64, 3, 0, 12),
        (64, 1, 0, 128),
        (96, 8, 0, 24),
        (128, 4, 40, 16),
        (160, 2, 0, 64),
        (256, 2, 0, 16),
    ],
)
def test_every_kernel_gives_a_row_the_same_bits(
    isa: str, head_dim: int, group: int, window: int, block_tokens: int
) -> None:
    case = Case(head_dim, group, window)
    whole = case.attended(TILES[-1], CHUNKS[0], block_tokens=block_tokens)
    assert np.isfinite(whole).all()
    for chunks in CHUNKS:
        np.testing.assert_array_equal(case.attended(isa, chunks, block_tokens=block_tokens), whole)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 160, 256])
def test_results_are_near_to_those_of_floats(isa: str, chunks: list[int], head_dim: int) -> None:
    case = Case(head_dim)
    assert_near(case.attended(isa, chunks), case.in_float32(isa), NEAR)


@pytest.mark.parametrize(
    ("group", "parents"), [(2, (ROOT, ROOT, 0)), (3, (ROOT, ROOT, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6))]
)
@pytest.mark.parametrize("window", [0, 100])
def test_rows_of_a_tree_see_their_branches(isa: str, group: int, parents: tuple[int, ...], window: int) -> None:
    """Of few rows and of many; and a tree that is a chain gives the bits of a chunk."""
    assert_tree_sees_its_branches(Case(64, group, window), isa, parents, NEAR)


@pytest.mark.parametrize("chunks", CHUNKS[:2])
@pytest.mark.parametrize("odd", [np.inf, np.nan])
def test_keys_that_a_row_does_not_see_change_none_of_its_bits(isa: str, chunks: list[int], odd: float) -> None:
    """Whatever they hold."""
    case = Case(64, window=100)
    before = case.attended(isa, chunks)
    case.keys[: PREFIX - 100] = odd
    np.testing.assert_array_equal(case.attended(isa, chunks), before)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("shift", [1.0, 8.0, 100.0])
def test_a_later_tile_may_count_for_less_or_more_by_any_power(isa: str, chunks: list[int], shift: float) -> None:
    """Below and above what raises a row's maximum, up to where weights would overflow if it were not."""
    case = Case(64)
    case.keys[128:] += np.float32(shift)
    assert_near(case.attended(isa, chunks), case.in_float32(isa), 2 * NEAR)
