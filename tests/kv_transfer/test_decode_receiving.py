"""Frames, credit, commits and the check of what arrived, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.errors import KvTransferFailed
from kv_transfer import decode_events as on
from kv_transfer.decode_state import DecodePhase, check_invariants
from kv_transfer.protocol_limits import ProtocolViolation
from tests.kv_transfer.transfer_side import MISSING, Side, kinds


def test_all_ranks_must_commit() -> None:
    side = Side(num_ranks=2).receive()
    side.tell(on.FramesLanded(side.ref, 4, 0, 40))
    assert side.tell(on.RankCommitted(side.ref, 1, 2), on.RankCommitted(side.ref, 1, 2)) == []
    assert kinds(side.tell(on.RankCommitted(side.ref, 0, 2))) == ["CheckArrival"]


def test_missing_cells_are_asked_for_twice_and_their_credit_is_granted_again() -> None:
    side = Side().receive()
    side.tell(on.FramesLanded(side.ref, 3, 0, 30), on.RankCommitted(side.ref, 0, 3, num_bytes=40))
    for round_number in (1, 2):
        actions = side.tell(on.ArrivalChecked(side.ref, MISSING, 10, True, True))
        # Of a window of 100 bytes, what was sent is either here or lost: a whole window may be on its way again.
        assert actions[0] == on.SendCredit(side.ref, 40 if round_number == 1 else 10)
        assert kinds(actions) == ["SendCredit", "SendResend"]
        old_commit = side.tell(on.RankCommitted(side.ref, 0, 3, num_resends=round_number - 1))
        assert old_commit == []
        again = on.RankCommitted(side.ref, 0, 3, num_resends=round_number, num_bytes=40)
        assert kinds(side.tell(again)) == ["CheckArrival"]
    actions = side.tell(on.ArrivalChecked(side.ref, MISSING, 10, True, True))
    assert kinds(actions) == ["SendCommitAck", "Fence"]
    assert actions[0] == on.SendCommitAck(side.ref, False, MISSING)


def test_a_wrong_root_digest_is_never_used_and_never_salvaged() -> None:
    side = Side().seal()
    side.tell(on.ArrivalChecked(side.ref, (), 0, False, True))
    assert kinds(side.tell(on.FenceClosed(side.ref, 3))) == ["ReleaseBlocks", "MatchAndReserve"]


def test_a_failed_commit_means_that_no_byte_of_the_attempt_is_kept() -> None:
    side = Side().receive()
    side.tell(on.RankCommitted(side.ref, 0, 0, failure=KvTransferFailed("the engine failed")))
    assert "PublishPrefix" not in kinds(side.tell(on.FenceClosed(side.ref, 3)))


def test_progress_keeps_the_idle_timer_alive_through_a_long_compute() -> None:
    side = Side().receive()
    for second in range(1, 20):
        side.now = float(second)
        side.tell(on.ProgressMade(side.ref))
        assert side.tell(on.Tick()) == []
    assert side.machine.phase is DecodePhase.RECEIVING


def test_credit_is_topped_up_when_half_of_the_window_is_used() -> None:
    side = Side().receive()
    assert side.tell(on.FramesLanded(side.ref, 1, 0, 49)) == []
    assert side.tell(on.FramesLanded(side.ref, 2, 0, 60)) == [on.SendCredit(side.ref, 60)]
    assert side.tell(on.FramesLanded(side.ref, 2, 0, 60)) == []


def test_a_commit_of_more_than_was_granted_buys_no_more_than_a_window() -> None:
    side = Side().receive()
    side.tell(on.FramesLanded(side.ref, 3, 0, 30), on.RankCommitted(side.ref, 0, 3, num_bytes=2**63))
    actions = side.tell(on.ArrivalChecked(side.ref, MISSING, 10, True, True))
    assert actions[0] == on.SendCredit(side.ref, 100)


def test_more_than_a_window_on_its_way_is_a_bug_that_is_said() -> None:
    side = Side().receive()
    attempt = replace(side.machine.live_attempt, granted_bytes=131)
    with pytest.raises(ProtocolViolation, match="101 bytes may be on their way, 100 may be"):
        check_invariants(side.machine, replace(side.machine, attempt=replace(attempt, landed_bytes=30)))


def test_a_worker_that_sends_more_than_its_credit_is_left() -> None:
    side = Side().receive()
    assert kinds(side.tell(on.FramesLanded(side.ref, 1, 0, 101))) == ["Fence", "SendCancel"]


def test_frames_behind_the_commit_are_waited_for_but_not_for_ever() -> None:
    side = Side().receive()
    side.tell(on.FramesLanded(side.ref, 2, 0, 20))
    assert side.tell(on.RankCommitted(side.ref, 0, 3)) == []
    assert side.tick(0.4) == []
    assert kinds(side.tick(0.5)) == ["CheckArrival"]


def test_a_worker_that_forgot_the_transfer_is_left_after_two_lists() -> None:
    side = Side().receive()
    assert side.tell(on.PeerListed(side.ref, False), on.PeerListed(side.ref, True)) == []
    assert side.tell(on.PeerListed(side.ref, False)) == []
    assert kinds(side.tell(on.PeerListed(side.ref, False))) == ["Fence", "SendCancel"]


def test_sb46_a_destination_that_changed_hands_is_never_used() -> None:
    side = Side().seal()
    actions = side.tell(on.ArrivalChecked(side.ref, (), 0, True, generations_match=False))
    assert kinds(actions) == ["SendCommitAck", "Fence"]
    assert side.machine.phase is DecodePhase.CANCELLING
