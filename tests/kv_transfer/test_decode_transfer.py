"""Single edges of the decode worker's machine, by hand: what each case of the wild must lead to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from cluster.errors import DeadlineExceeded, KvTransferFailed, ServerOverloaded, WorkerUnavailable
from cluster.identity import BlockId, BlockRef, Incarnation, TransferId, WorkerId
from kv_transfer import decode_events as on
from kv_transfer.coverage import CellRange
from kv_transfer.decode_state import DecodePhase, DecodeTransfer, TransferRequest
from kv_transfer.decode_transfer import apply, next_tick_s
from kv_transfer.protocol_limits import ProtocolViolation
from kv_transfer.transfer_ref import TransferRef
from kv_transfer.transport import CancelGuarantee

FENCED, MUST_DRAIN = CancelGuarantee.FENCED, CancelGuarantee.MUST_DRAIN
TRANSFER = TransferId(bytes(range(16)))
PEERS = tuple(on.PeerRef(WorkerId(f"p{index}"), Incarnation("1")) for index in range(2))
GONE = WorkerUnavailable("connection reset")
MISSING = (CellRange(0, 1, 2, 1),)


def blocks(first: int, end: int, generation: int = 1) -> tuple[BlockRef, ...]:
    return tuple(BlockRef(BlockId(block), generation) for block in range(first, end))


@dataclass
class Side:
    """One transfer on a manual clock, with everything that it asked for."""

    guarantee: CancelGuarantee = FENCED
    allow_local_prefill: bool = False
    num_ranks: int = 1
    deadline_s: float = 100.0
    candidates: tuple[on.PeerRef, ...] = PEERS
    now: float = 0.0
    log: list[on.DecodeAction] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = TransferRequest(TRANSFER, self.candidates, self.allow_local_prefill, self.deadline_s, 100)
        self.machine = DecodeTransfer(request)

    def tell(self, *events: on.DecodeEvent) -> list[on.DecodeAction]:
        actions: list[on.DecodeAction] = []
        for event in events:
            self.machine, more = apply(self.machine, event, self.now)
            actions += more
        self.log += actions
        return actions

    def tick(self, now: float) -> list[on.DecodeAction]:
        self.now = now
        return self.tell(on.Tick())

    @property
    def ref(self) -> TransferRef:
        return TransferRef(TRANSFER, self.machine.epoch)

    def reserve(self, generation: int = 1) -> None:
        self.tell(on.BlocksReserved(blocks(0, 2), blocks(2, 5, generation), blocks(5, 6)))

    def request(self) -> Side:
        self.tell(on.TransferWanted())
        self.reserve()
        self.tell(on.PeerReady(PEERS[0], self.guarantee, self.num_ranks))
        return self

    def receive(self) -> Side:
        self.request().tell(on.Accepted(self.ref))
        return self

    def seal(self) -> Side:
        self.receive().tell(on.FramesLanded(self.ref, 3, 0, 30), on.RankCommitted(self.ref, 0, 3))
        return self

    def verify(self) -> Side:
        self.seal().tell(on.ArrivalChecked(self.ref, (), 0, True, True))
        return self


def kinds(actions: list[on.DecodeAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


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


def test_a_reject_asks_the_next_worker_with_the_same_blocks_and_a_new_epoch() -> None:
    side = Side().request()
    first = side.ref
    side.tell(on.Rejected(first, ServerOverloaded("full")))
    assert kinds(side.tell(on.FenceClosed(first))) == ["ConnectPeer"]
    asked = side.tell(on.PeerReady(PEERS[1], FENCED))
    assert isinstance(asked[1], on.SendPrefill)
    assert asked[1].destination == blocks(2, 5)
    assert side.ref.epoch == 2


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


def test_all_ranks_must_commit() -> None:
    side = Side(num_ranks=2).receive()
    side.tell(on.FramesLanded(side.ref, 4, 0, 40))
    assert side.tell(on.RankCommitted(side.ref, 1, 2), on.RankCommitted(side.ref, 1, 2)) == []
    assert kinds(side.tell(on.RankCommitted(side.ref, 0, 2))) == ["CheckArrival"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_kv10_a_cancel_survives_every_order_of_the_three_completions(order: tuple[int, ...]) -> None:
    side = Side(MUST_DRAIN).receive()
    ref = side.ref
    side.tell(on.RequestCancelled())
    events: list[on.DecodeEvent] = [on.RankCommitted(ref, 0, 3), on.RankDrained(ref, 0), on.FenceClosed(ref)]
    actions = side.tell(*(events[index] for index in order))
    assert kinds(actions) == ["FreeQuarantined"]
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


def test_missing_cells_are_asked_for_twice_and_their_credit_is_granted_again() -> None:
    side = Side().seal()
    for round_number in (1, 2):
        actions = side.tell(on.ArrivalChecked(side.ref, MISSING, 10, True, True))
        assert kinds(actions) == ["SendCredit", "SendResend"]
        old_commit = side.tell(on.RankCommitted(side.ref, 0, 3, num_resends=round_number - 1))
        assert old_commit == []
        assert kinds(side.tell(on.RankCommitted(side.ref, 0, 3, num_resends=round_number))) == ["CheckArrival"]
    actions = side.tell(on.ArrivalChecked(side.ref, MISSING, 10, True, True))
    assert kinds(actions) == ["SendCommitAck", "Fence"]
    assert actions[0] == on.SendCommitAck(side.ref, False, MISSING)


def test_a_wrong_root_digest_is_never_used_and_never_salvaged() -> None:
    side = Side().seal()
    side.tell(on.ArrivalChecked(side.ref, (), 0, False, True))
    assert kinds(side.tell(on.FenceClosed(side.ref, 3))) == ["ReleaseBlocks", "MatchAndReserve"]


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


def test_a_failed_commit_means_that_no_byte_of_the_attempt_is_kept() -> None:
    side = Side().receive()
    side.tell(on.RankCommitted(side.ref, 0, 0, failure=KvTransferFailed("the engine failed")))
    assert "PublishPrefix" not in kinds(side.tell(on.FenceClosed(side.ref, 3)))


def test_f06_a_stopped_worker_is_left_after_the_idle_time_and_its_late_bytes_are_stale() -> None:
    side = Side().receive()
    assert side.tick(4.9) == []
    assert kinds(side.tick(5.0)) == ["Fence", "SendCancel"]


def test_progress_keeps_the_idle_timer_alive_through_a_long_compute() -> None:
    side = Side().receive()
    for second in range(1, 20):
        side.now = float(second)
        side.tell(on.ProgressMade(side.ref))
        assert side.tell(on.Tick()) == []
    assert side.machine.phase is DecodePhase.RECEIVING


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


def test_a_fence_that_does_not_close_in_time_means_quarantine_and_other_blocks() -> None:
    side = Side().receive()
    side.tell(on.LinkFailed(side.ref, KvTransferFailed("broken")))
    old = side.ref
    assert kinds(side.tick(5.0)) == ["QuarantineBlocks", "ReleaseBlocks", "MatchAndReserve"]
    assert side.tell(on.FenceClosed(old, 3)) == [on.FreeQuarantined(old, blocks(2, 5))]


def test_credit_is_topped_up_when_half_of_the_window_is_used() -> None:
    side = Side().receive()
    assert side.tell(on.FramesLanded(side.ref, 1, 0, 49)) == []
    assert side.tell(on.FramesLanded(side.ref, 2, 0, 60)) == [on.SendCredit(side.ref, 60)]
    assert side.tell(on.FramesLanded(side.ref, 2, 0, 60)) == []


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


def test_a_block_held_twice_is_our_own_bug() -> None:
    side = Side()
    side.tell(on.TransferWanted())
    with pytest.raises(ProtocolViolation, match="held twice"):
        side.tell(on.BlocksReserved(blocks(0, 2), blocks(1, 3), ()))
