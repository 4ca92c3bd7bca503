"""Single edges of the prefill worker's machine, by hand."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from cluster.errors import DeadlineExceeded, KvTransferFailed, ServerOverloaded
from cluster.identity import TransferId
from kv_transfer import prefill_events as on
from kv_transfer.coverage import CellRange
from kv_transfer.prefill_transfer import PrefillPhase, PrefillTransfer, apply, next_tick_s
from kv_transfer.protocol_limits import ProtocolViolation
from kv_transfer.transfer_ref import TransferRef

REF = TransferRef(TransferId(bytes(16)), 1)
RANGES = (CellRange(0, 1, 0, 1),)


@dataclass
class Side:
    """One attempt on a manual clock."""

    now: float = 0.0
    log: list[on.PrefillAction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = PrefillTransfer(REF, deadline_s=10.0, credit_bytes=100, max_credit_bytes=100)

    def tell(self, *events: on.PrefillEvent) -> list[on.PrefillAction]:
        actions: list[on.PrefillAction] = []
        for event in events:
            self.machine, more = apply(self.machine, event, self.now)
            actions += more
        self.log += actions
        return actions

    def tick(self, now: float) -> list[on.PrefillAction]:
        self.now = now
        return self.tell(on.Tick())

    def queue(self) -> Side:
        self.tell(on.PrefillAsked(), on.EngineQueued())
        return self

    def compute(self) -> Side:
        self.queue().tell(on.ComputeStarted())
        return self

    def commit(self) -> Side:
        self.compute().tell(on.PushSealed(3, 30), on.EngineLetGo(), on.ComputeEnded())
        return self


def kinds(actions: list[on.PrefillAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_an_attempt_runs_from_asked_to_free() -> None:
    side = Side().commit()
    side.tell(on.Acknowledged(is_ok=True), on.PushDrained(3))
    assert side.machine.phase is PrefillPhase.FREE
    assert kinds(side.log) == [
        "SubmitToEngine",
        "SendAccept",
        "SendCommit",
        "CancelPush",
        "CancelCompute",
        "ReleaseBlocks",
    ]


def test_what_the_engine_refuses_is_rejected_and_never_began() -> None:
    side = Side()
    side.tell(on.PrefillAsked())
    assert kinds(side.tell(on.EngineRefused(ServerOverloaded("full")))) == ["SendReject"]
    assert side.machine.is_over


@pytest.mark.parametrize("order", list(itertools.permutations(range(2))))
def test_the_commit_waits_for_the_first_token_and_for_the_last_frame(order: tuple[int, ...]) -> None:
    side = Side().compute()
    events: list[on.PrefillEvent] = [on.PushSealed(3, 30), on.ComputeEnded()]
    assert side.tell(events[order[0]]) == []
    assert side.tell(events[order[1]]) == [on.SendCommit(3, 30, 0)]


def test_kv7_blocks_come_back_with_the_acknowledgement_and_not_with_a_lease() -> None:
    side = Side().commit()
    side.tell(on.PushDrained(3))
    side.tell(on.Acknowledged(is_ok=True))
    assert kinds(side.tell(on.PushDrained(3))) == ["ReleaseBlocks"]


def test_kv8_a_decode_worker_that_queues_for_long_costs_nothing_until_the_deadline() -> None:
    side = Side().commit()
    assert side.tick(9.9) == []
    assert side.machine.phase is PrefillPhase.COMMITTED
    actions = side.tick(10.0)
    assert kinds(actions) == ["SendFailedCommit", "CancelPush", "CancelCompute"]
    assert isinstance(actions[0], on.SendFailedCommit)
    assert isinstance(actions[0].error, DeadlineExceeded)


def test_kv9_a_cancel_before_anything_was_posted_drains_with_no_frame() -> None:
    side = Side().queue()
    assert kinds(side.tell(on.CancelAsked("gone"))) == ["CancelPush", "CancelCompute"]
    actions = side.tell(on.EngineLetGo(), on.PushDrained(0))
    assert actions == [on.ReleaseBlocks(), on.SendDrained(0)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_kv10_blocks_come_back_once_in_every_order_of_completions(order: tuple[int, ...]) -> None:
    side = Side().compute()
    side.tell(on.CancelAsked("gone"))
    events: list[on.PrefillEvent] = [on.PushDrained(2), on.EngineLetGo(), on.ComputeEnded()]
    actions = side.tell(*(events[index] for index in order))
    assert kinds(actions).count("ReleaseBlocks") == 1
    assert side.machine.phase is PrefillPhase.DRAINED


def test_kv11_a_repeated_cancel_gets_the_same_answer_and_changes_nothing() -> None:
    side = Side().compute()
    side.tell(on.CancelAsked("gone"), on.CancelAsked("gone"), on.EngineLetGo(), on.PushDrained(2))
    ended = side.machine
    assert side.tell(on.CancelAsked("gone")) == [on.SendDrained(2)]
    assert side.machine == ended


def test_kv60_a_posted_operation_that_never_ends_keeps_its_source_until_the_endpoint_is_gone() -> None:
    side = Side().compute()
    side.tell(on.CancelAsked("gone"), on.EngineLetGo())
    assert side.tick(4.9) == []
    assert kinds(side.tick(5.0)) == ["DestroyEndpoint"]
    assert side.tick(60.0) == []
    assert next_tick_s(side.machine) is None
    assert kinds(side.tell(on.PushDrained(2))) == ["ReleaseBlocks", "SendDrained"]


def test_a_resend_commits_again_and_a_repeated_request_for_it_does_not_send_twice() -> None:
    side = Side().commit()
    again = on.ResendAsked(RANGES, tries_left=1, num_bytes=10)
    assert side.tell(again) == [on.ResendCells(RANGES)]
    assert side.tell(again) == []
    assert side.tell(on.PushSealed(3, 30)) == [on.SendCommit(3, 30, 1)]
    assert side.tell(again) == []


def test_credit_beyond_what_the_decode_worker_allows_itself_is_not_used() -> None:
    side = Side().compute()
    assert side.tell(on.CreditGranted(60, posted_bytes=60)) == [on.AddPushCredit(60)]
    actions = side.tell(on.CreditGranted(1, posted_bytes=60))
    assert kinds(actions) == ["SendFailedCommit", "CancelPush", "CancelCompute"]
    assert "own limit" in actions[0].error.message  # type: ignore[union-attr]


def test_what_is_asked_for_again_may_have_come_late_and_pay_twice() -> None:
    side = Side().commit()
    side.tell(on.ResendAsked(RANGES, tries_left=1, num_bytes=10))
    assert side.tell(on.CreditGranted(40, posted_bytes=30)) == [on.AddPushCredit(40)]
    assert kinds(side.tell(on.CreditGranted(1, posted_bytes=30)))[0] == "SendFailedCommit"


def test_a_peer_that_is_gone_is_told_nothing() -> None:
    side = Side().compute()
    side.tell(on.DecodeWorkerGone())
    assert side.tell(on.EngineLetGo(), on.PushDrained(1)) == [on.ReleaseBlocks()]


def test_a_decode_worker_that_gave_up_hears_that_nothing_can_be_written_any_more() -> None:
    side = Side().commit()
    side.tell(on.Acknowledged(is_ok=False))
    assert side.tell(on.PushDrained(3)) == [on.ReleaseBlocks(), on.SendDrained(3)]


@pytest.mark.parametrize("failed", [on.ComputeFailed(KvTransferFailed("x")), on.PushFailed(KvTransferFailed("x"))])
def test_a_failure_is_said_at_once_and_drained_afterwards(failed: on.PrefillEvent) -> None:
    side = Side().compute()
    assert kinds(side.tell(failed)) == ["SendFailedCommit", "CancelPush", "CancelCompute"]
    assert kinds(side.tell(on.EngineLetGo(), on.PushDrained(1))) == ["ReleaseBlocks", "SendDrained"]


def test_progress_is_told_every_second_of_a_long_compute() -> None:
    side = Side().compute()
    assert [kinds(side.tick(now)) for now in (0.9, 1.0, 1.5, 2.0)] == [[], ["SendProgress"], [], ["SendProgress"]]


def test_an_attempt_that_the_decode_worker_does_not_list_twice_is_given_up() -> None:
    side = Side().compute()
    assert side.tell(on.DecodeWorkerListed(False), on.DecodeWorkerListed(True), on.DecodeWorkerListed(False)) == []
    assert kinds(side.tell(on.DecodeWorkerListed(False))) == ["CancelPush", "CancelCompute"]


def test_sending_beyond_the_credit_is_our_own_bug() -> None:
    side = Side().compute()
    with pytest.raises(ProtocolViolation, match="credit"):
        side.tell(on.PushSealed(11, 101))


def test_an_engine_that_refuses_after_the_cancel_has_let_go() -> None:
    side = Side()
    side.tell(on.PrefillAsked(), on.CancelAsked("gone"))
    assert kinds(side.tell(on.EngineRefused(ServerOverloaded("full")), on.PushDrained(0))) == [
        "ReleaseBlocks",
        "SendDrained",
    ]
