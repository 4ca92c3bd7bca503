"""The pure state behind a router's view of the workers."""

from __future__ import annotations

import pytest
from tandem.v1 import common_pb2, membership_pb2

from cluster.identity import Incarnation, WorkerId
from cluster.membership_state import ChangeKind, MembershipChange, MembershipState

A = WorkerId("a")
GRACE_S = 3.0


def record(worker_id: str, incarnation: str = "1", seq: int = 1) -> membership_pb2.WorkerRecord:
    identity = common_pb2.WorkerIdentity(worker_id=worker_id, incarnation=incarnation)
    return membership_pb2.WorkerRecord(identity=identity, heartbeat_seq=seq)


def kinds(changes: list[MembershipChange]) -> list[tuple[str, ChangeKind]]:
    return [(change.record.identity.worker_id, change.kind) for change in changes]


def test_workers_join_update_and_restart() -> None:
    state = MembershipState(GRACE_S)
    assert kinds(state.listed([record("a"), record("b")], 0)) == [("a", ChangeKind.JOINED), ("b", ChangeKind.JOINED)]
    assert kinds(state.listed([record("a", seq=2), record("b")], 1)) == [("a", ChangeKind.UPDATED)]
    assert kinds(state.listed([record("a", "2"), record("b")], 2)) == [("a", ChangeKind.RESTARTED)]
    assert state.workers[A].identity.incarnation == "2"


def test_missing_worker_leaves_only_after_the_grace() -> None:
    state = MembershipState(GRACE_S)
    state.listed([record("a")], 0)
    assert state.listed([], 10) == []
    assert state.listed([], 10 + GRACE_S - 0.1) == []
    assert kinds(state.listed([], 10 + GRACE_S)) == [("a", ChangeKind.LEFT)]
    assert not state.workers


def test_f11_worker_that_is_listed_again_within_the_grace_never_left() -> None:
    state = MembershipState(GRACE_S)
    state.listed([record("a")], 0)
    assert state.listed([], 1) == []
    assert kinds(state.listed([record("a", seq=2)], 2)) == [("a", ChangeKind.UPDATED)]
    assert state.listed([], 4) == []


def test_f10_absence_is_not_counted_while_redis_is_lost() -> None:
    state = MembershipState(GRACE_S)
    state.listed([record("a")], 0)
    state.listed([], 1)
    state.redis_lost()
    assert state.listed([], 60) == []
    assert A in state.workers


def test_dead_peer_leaves_at_once_and_its_lingering_record_does_not_bring_it_back() -> None:
    state = MembershipState(GRACE_S)
    state.listed([record("a")], 0)
    assert kinds(state.peer_gone(A, Incarnation("1"))) == [("a", ChangeKind.LEFT)]
    assert state.listed([record("a", seq=9)], 1) == []
    assert kinds(state.listed([record("a", "2")], 2)) == [("a", ChangeKind.JOINED)]


def test_death_of_an_older_incarnation_does_not_touch_the_new_one() -> None:
    state = MembershipState(GRACE_S)
    state.listed([record("a", "2")], 0)
    assert state.peer_gone(A, Incarnation("1")) == []
    assert A in state.workers


@pytest.mark.parametrize("skew_s", [0.0, 3600.0, -3600.0, 86_400.0])
def test_f28_a_clock_that_is_off_changes_no_decision(skew_s: float) -> None:
    state = MembershipState(GRACE_S)
    polls = [([record("a")], 0.0), ([], 1.0), ([], 3.5), ([], 4.0)]
    seen = [kinds(state.listed(records, now + skew_s)) for records, now in polls]
    assert seen == [[("a", ChangeKind.JOINED)], [], [], [("a", ChangeKind.LEFT)]]


def test_f28_records_carry_no_point_in_time() -> None:
    names = {field.name for field in membership_pb2.WorkerRecord.DESCRIPTOR.fields}
    assert not {name for name in names if "time" in name or name.endswith(("_at", "_s", "_ms"))}
