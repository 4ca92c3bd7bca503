"""Workers whose KV cannot be moved between them refuse each other by the field's name."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from tandem.v1 import common_pb2

from cluster.identity import Incarnation, WorkerId
from cluster.kv_layout import FP8_KV, ORDER_WITH_SCALES, KvLayout
from kv_transfer.hello import HandoffIdentity, compare, is_refused, make_hello

WIDE = KvLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16", element_bytes=2, block_tokens=16)
FP8 = replace(WIDE, dtype=FP8_KV, element_bytes=1, order=ORDER_WITH_SCALES)


def identity(layout: KvLayout) -> HandoffIdentity:
    return HandoffIdentity(
        worker_id=WorkerId("w"),
        incarnation=Incarnation("1"),
        role=common_pb2.WORKER_ROLE_DECODE,
        model_fingerprint="m",
        layout=layout,
        hash_test_vector=b"v",
        host_id="h",
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "fatal"),
    [
        (FP8, FP8, set()),
        (FP8, WIDE, {"layout.dtype", "layout.order"}),
        (WIDE, FP8, {"layout.dtype", "layout.order"}),
        (FP8, replace(FP8, block_tokens=32), {"layout.block_tokens"}),
        (WIDE, replace(WIDE, block_tokens=32), set()),
    ],
)
def test_fp8_kv_meets_only_its_own_kind(mine: KvLayout, theirs: KvLayout, fatal: set[str]) -> None:
    mismatches = compare(identity(mine), make_hello(identity(theirs), (), b"n", 2**20))
    assert {mismatch.field for mismatch in mismatches if mismatch.fatal} == fatal
    assert is_refused(mismatches) == bool(fatal)


@pytest.mark.parametrize(("mine", "theirs"), list(itertools.product((1, 2, 4), repeat=2)))
@pytest.mark.parametrize(("my_block", "their_block"), list(itertools.product((16, 24, 32, 64), repeat=2)))
@pytest.mark.parametrize("num_kv_heads", [4, 8])
def test_kv17_kv18_a_shape_that_no_engine_serves_is_refused_by_its_name(
    mine: int, theirs: int, my_block: int, their_block: int, num_kv_heads: int
) -> None:
    """Block sizes of which one divides the other are served; pools of a rank's heads are not, and say so at once."""
    here, there = (
        replace(
            identity(replace(WIDE, num_kv_heads=num_kv_heads // tp_size, block_tokens=block)),
            tp_size=tp_size,
            hash_test_vector=bytes([block]),
        )
        for tp_size, block in ((mine, my_block), (theirs, their_block))
    )
    mismatches = compare(here, make_hello(there, (), b"n", 2**20))
    fatal = {mismatch.field for mismatch in mismatches if mismatch.fatal}
    expected = set() if mine == theirs else {"layout.num_kv_heads"}
    if max(my_block, their_block) % min(my_block, their_block):
        expected.add("layout.block_tokens")
    assert fatal == expected


@pytest.mark.parametrize(("mine", "theirs"), list(itertools.product((1, 2, 4), repeat=2)))
def test_workers_with_pools_of_all_heads_meet_whatever_their_numbers_of_ranks(mine: int, theirs: int) -> None:
    here, there = (replace(identity(WIDE), tp_size=tp_size) for tp_size in (mine, theirs))
    mismatches = compare(here, make_hello(there, (), b"n", 2**20))
    assert not is_refused(mismatches)
    assert {mismatch.field for mismatch in mismatches} == (set() if mine == theirs else {"tp_size"})


@pytest.mark.parametrize(("max_credit_bytes", "is_enough"), [(0, False), (-1, False), (0, True)])
def test_a_credit_that_no_frame_fits_into_is_refused_by_its_name(max_credit_bytes: int, is_enough: bool) -> None:
    """A cell of the decode worker's pool is the least that can be sent."""
    theirs = replace(identity(WIDE), layout=replace(WIDE, block_tokens=2 * WIDE.block_tokens))
    limit = 2 * WIDE.cell_bytes + max_credit_bytes if is_enough or max_credit_bytes else 0
    mismatches = compare(identity(WIDE), make_hello(theirs, (), b"n", limit))
    assert [bad.field for bad in mismatches if bad.fatal] == ([] if is_enough else ["max_credit_bytes"])


def test_pools_of_two_ranks_heads_do_not_meet() -> None:
    """As many heads in both, and not the same ones."""
    first, second = (replace(identity(WIDE), tp_rank=rank, tp_size=2) for rank in (0, 1))
    mismatches = compare(first, make_hello(second, (), b"n", 2**20))
    assert [mismatch.field for mismatch in mismatches if mismatch.fatal] == ["heads.first"]
