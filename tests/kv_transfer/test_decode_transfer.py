"""Single edges of the decode worker's machine, by hand: the way through, and time."""

from __future__ import annotations

import pytest

from cluster.errors import DeadlineExceeded, KvTransferFailed, ServerOverloaded
from kv_transfer import decode_events as on
from kv_transfer.decode_state import DecodePhase
from kv_transfer.protocol_limits import ProtocolViolation
from tests.kv_transfer.transfer_side import FENCED, GONE, PEERS, Side, blocks, kinds


def test_a_transfer_runs_from_match_to_runnable() -> None:
    side = Side().verify()
    assert kinds(side.tell(on.FenceClosed(side.ref))) == ["AdmitToEngine"]
    side.tell(on.EngineAdmitted())
    assert side.machine.phase is DecodePhase.RUNNABLE
    assert side.machine.is_over
    assert kinds(side.log) == [
        "MatchAndReserve",
        "ConnectPeer",
        "OpenLanding",
        "SendPrefill",
        "CheckArrival",
        "SendCommitAck",
        "Fence",
        "AdmitToEngine",
    ]


def test_blocks_are_offered_to_the_engine_only_behind_the_closed_fence() -> None:
    side = Side().verify()
    with pytest.raises(ProtocolViolation, match="not offered"):
        side.tell(on.EngineAdmitted())


def test_kv2_the_request_names_the_held_prefix_and_only_the_missing_blocks() -> None:
    side = Side().request()
    ask = next(action for action in side.log if isinstance(action, on.SendPrefill))
    landing = next(action for action in side.log if isinstance(action, on.OpenLanding))
    assert (ask.num_have_blocks, ask.destination) == (2, blocks(2, 5))
    assert (landing.first_block, landing.destination) == (2, blocks(2, 5))


def test_kv19_no_peer_hears_of_the_look_ahead_and_decode_blocks() -> None:
    side = Side()
    side.tell(on.TransferWanted(), on.BlocksReserved(blocks(0, 1), blocks(1, 4), blocks(4, 7)))
    opened, asked = side.tell(on.PeerReady(PEERS[0], FENCED))
    assert isinstance(opened, on.OpenLanding)
    assert isinstance(asked, on.SendPrefill)
    assert opened.destination == asked.destination == blocks(1, 4)


def test_kv49_s_b47_events_of_an_older_epoch_change_nothing() -> None:
    side = Side().request()
    old = side.ref
    side.tell(on.Rejected(old, ServerOverloaded("full")), on.FenceClosed(old), on.PeerReady(PEERS[1], FENCED))
    before = side.machine
    stale: list[on.DecodeEvent] = [
        on.Accepted(old),
        on.FramesLanded(old, 9, 0, 99),
        on.RankCommitted(old, 0, 9),
        on.ArrivalChecked(old, (), 0, True, True),
        on.RankDrained(old, 0),
        on.LinkFailed(old, KvTransferFailed("broken")),
        on.PeerGone(PEERS[0], GONE),
    ]
    assert side.tell(*stale) == []
    assert side.machine == before


def test_f06_a_stopped_worker_is_left_after_the_idle_time_and_its_late_bytes_are_stale() -> None:
    side = Side().receive()
    assert side.tick(4.9) == []
    assert kinds(side.tick(5.0)) == ["Fence", "SendCancel"]


def test_no_answer_within_the_accept_time_ends_the_attempt() -> None:
    side = Side().request()
    assert side.tick(0.99) == []
    assert kinds(side.tick(1.0)) == ["Fence", "SendCancel"]


def test_kv37_a_worker_that_does_not_answer_the_handshake_is_passed_over_without_an_epoch() -> None:
    side = Side()
    side.tell(on.TransferWanted())
    side.reserve()
    assert side.tick(5.0) == [on.ConnectPeer(PEERS[1])]
    assert side.tell(on.PeerReady(PEERS[0], FENCED)) == []
    assert side.machine.epoch == 0


def test_f39_the_deadline_ends_every_phase_with_the_blocks_back() -> None:
    for stage in ("request", "receive", "seal"):
        side = Side(deadline_s=0.5, allow_local_prefill=True)
        getattr(side, stage)()
        side.tick(0.5)
        last = side.tell(on.FenceClosed(side.ref))
        assert kinds(last) == ["ReleaseBlocks", "ReportFailure"], stage
        assert isinstance(last[1], on.ReportFailure)
        assert isinstance(last[1].error, DeadlineExceeded)


def test_a_block_held_twice_is_our_own_bug() -> None:
    side = Side()
    side.tell(on.TransferWanted())
    with pytest.raises(ProtocolViolation, match="held twice"):
        side.tell(on.BlocksReserved(blocks(0, 2), blocks(1, 3), ()))
