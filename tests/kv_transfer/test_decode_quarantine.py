"""Blocks that somebody may still write into come back only when nobody can."""

from __future__ import annotations

import itertools

import pytest

from cluster.errors import KvTransferFailed
from kv_transfer import decode_events as on
from kv_transfer.decode_state import DecodePhase
from kv_transfer.decode_transfer import next_tick_s
from tests.kv_transfer.transfer_side import MUST_DRAIN, Side, blocks, kinds


def test_kv4_a_silent_one_sided_writer_loses_its_endpoint_before_its_blocks_come_back() -> None:
    side = Side(MUST_DRAIN).receive()
    side.tell(on.RequestCancelled())
    assert side.machine.phase is DecodePhase.CANCELLED
    assert not side.machine.is_over
    assert next_tick_s(side.machine) == 5.0
    assert kinds(side.tick(5.0)) == ["DestroyEndpoint"]
    assert side.tick(50.0) == []
    assert kinds(side.tell(on.EndpointDestroyed(side.ref))) == ["FreeQuarantined"]
    assert side.machine.is_over


def test_kv6_kv41_one_rank_drained_frees_nothing_while_its_sibling_may_write() -> None:
    side = Side(MUST_DRAIN, num_ranks=2).receive()
    ref = side.ref
    side.tell(on.RankCommitted(ref, 0, 0, failure=KvTransferFailed("rank 0 broke")))
    assert side.machine.quarantined[0].blocks == blocks(2, 5)
    assert side.tell(on.RankDrained(ref, 0), on.RankDrained(ref, 0), on.FenceClosed(ref)) == []
    assert kinds(side.tell(on.RankDrained(ref, 1))) == ["FreeQuarantined"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_kv10_a_cancel_survives_every_order_of_the_three_completions(order: tuple[int, ...]) -> None:
    side = Side(MUST_DRAIN).receive()
    ref = side.ref
    side.tell(on.RequestCancelled())
    events: list[on.DecodeEvent] = [on.RankCommitted(ref, 0, 3), on.RankDrained(ref, 0), on.FenceClosed(ref)]
    actions = side.tell(*(events[index] for index in order))
    assert kinds(actions) == ["FreeQuarantined"]
    assert side.machine.is_over


def test_a_fence_that_does_not_close_in_time_means_quarantine_and_other_blocks() -> None:
    side = Side().receive()
    side.tell(on.LinkFailed(side.ref, KvTransferFailed("broken")))
    old = side.ref
    assert kinds(side.tick(5.0)) == ["QuarantineBlocks", "ReleaseBlocks", "MatchAndReserve"]
    assert side.tell(on.FenceClosed(old, 3)) == [on.FreeQuarantined(old, blocks(2, 5))]
