"""Ways out of a transfer: rejects, deaths and cancels, and what is given back or kept then."""

from __future__ import annotations

import pytest

from cluster.errors import KvLinkBroken, ServerOverloaded
from kv_transfer import decode_events as on
from kv_transfer.decode_state import DecodePhase
from tests.kv_transfer.transfer_side import FENCED, GONE, PEERS, Side, blocks, kinds


def test_a_reject_asks_the_next_worker_with_the_same_blocks_and_a_new_epoch() -> None:
    side = Side().request()
    first = side.ref
    side.tell(on.Rejected(first, ServerOverloaded("full")))
    assert kinds(side.tell(on.FenceClosed(first))) == ["ConnectPeer"]
    asked = side.tell(on.PeerReady(PEERS[1], FENCED))
    assert isinstance(asked[1], on.SendPrefill)
    assert asked[1].destination == blocks(2, 5)
    assert side.ref.epoch == 2


def test_a_worker_whose_link_broke_is_asked_once_more_after_all_others() -> None:
    side, asked = Side(allow_local_prefill=True).request(), [PEERS[0]]
    for peer in (PEERS[1], PEERS[0], PEERS[1]):
        side.tell(on.LinkFailed(side.ref, KvLinkBroken("reset")), on.FenceClosed(side.ref, 1))
        side.reserve()
        asked.append(side.machine.candidate)
        side.tell(on.PeerReady(peer, FENCED))
    assert asked == [PEERS[0], PEERS[1], PEERS[0], PEERS[1]]
    side.tell(on.LinkFailed(side.ref, KvLinkBroken("reset")))
    assert kinds(side.tell(on.FenceClosed(side.ref)))[-1] == "PrefillLocally"


@pytest.mark.parametrize("is_local", [True, False])
def test_when_no_worker_is_left_the_prompt_is_computed_here_or_fails_with_the_last_reason(is_local: bool) -> None:
    side = Side(allow_local_prefill=is_local, candidates=PEERS[:1]).request()
    side.tell(on.Rejected(side.ref, ServerOverloaded("full")))
    last = side.tell(on.FenceClosed(side.ref))
    assert kinds(last) == ["ReleaseBlocks", "PrefillLocally" if is_local else "ReportFailure"]
    error = last[1].failure if isinstance(last[1], on.PrefillLocally) else last[1].error  # type: ignore[union-attr]
    assert error.message == "full"
    assert side.machine.is_over


def test_kv4_s_b47_a_silent_worker_after_reserve_costs_no_block() -> None:
    side = Side().receive()
    side.tell(on.RequestCancelled())
    assert kinds(side.tell(on.FenceClosed(side.ref))) == ["ReleaseBlocks"]
    assert side.machine.is_over


def test_kv11_cancelling_again_or_after_the_end_changes_nothing() -> None:
    side = Side().receive()
    ref = side.ref
    side.tell(on.RequestCancelled(), on.RequestCancelled())
    side.tell(on.FenceClosed(ref))
    ended = side.machine
    assert side.tell(on.RequestCancelled(), on.RankCommitted(ref, 0, 3), on.FenceClosed(ref), on.Tick()) == []
    assert side.machine == ended


def test_kv14_kv44_s_b49_an_abort_between_verified_and_scheduled_gives_every_block_back() -> None:
    side = Side().verify()
    assert kinds(side.tell(on.RequestCancelled())) == ["ReleaseBlocks"]
    assert side.machine.is_over


def test_kv44_an_abort_while_the_engine_decides_leaves_the_blocks_to_its_answer() -> None:
    side = Side().verify()
    side.tell(on.FenceClosed(side.ref))
    assert side.tell(on.RequestCancelled()) == []
    assert kinds(side.tell(on.EngineRefused(ServerOverloaded("full")))) == ["ReleaseBlocks", "ReportFailure"]


def test_kv35_an_abort_before_any_block_was_taken_only_leaves_the_queue() -> None:
    side = Side()
    side.tell(on.TransferWanted())
    assert kinds(side.tell(on.RequestCancelled())) == ["CancelReservation"]
    late = side.tell(on.BlocksReserved((), blocks(0, 3), ()))
    assert late == [on.ReleaseBlocks(blocks(0, 3))]


def test_f01_what_verified_before_the_worker_died_is_kept_and_the_rest_is_asked_of_another() -> None:
    side = Side().receive()
    side.tell(on.FramesLanded(side.ref, 2, 0, 20), on.PeerGone(PEERS[0], GONE))
    actions = side.tell(on.FenceClosed(side.ref, num_complete_blocks=2))
    assert kinds(actions) == ["PublishPrefix", "ReleaseBlocks", "MatchAndReserve"]
    assert actions[0] == on.PublishPrefix(blocks(0, 4))
    side.tell(on.BlocksReserved(blocks(0, 4), blocks(4, 5, 2), blocks(5, 6, 2)))
    asked = side.tell(on.PeerReady(PEERS[1], FENCED))
    assert isinstance(asked[1], on.SendPrefill)
    assert (asked[1].num_have_blocks, asked[1].destination) == (4, blocks(4, 5, 2))


def test_f01_a_worker_that_dies_between_its_last_byte_and_our_check_is_not_needed_any_more() -> None:
    side = Side().seal()
    assert side.tell(on.PeerGone(PEERS[0], GONE)) == []
    side.tell(on.ArrivalChecked(side.ref, (), 0, True, True))
    assert side.machine.phase is DecodePhase.VERIFIED
