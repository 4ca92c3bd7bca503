"""Deadlines are told once, in order, of those who still wait or run."""

from __future__ import annotations

from engine.block_pool import BlockPool
from engine.deadlines import Deadlines
from engine.sequence import Sequence, SequenceState
from tests.engine.engine_bench import make_request

POOL = BlockPool(4, 4, "model")


def sequence(name: str, deadline_s: float) -> Sequence:
    request = make_request(name, [1, 2, 3], deadline_s=deadline_s)
    return Sequence(request, POOL.new_chain(b""), 64, int(name), 0.0)


def test_the_earliest_deadline_is_told_first_and_once() -> None:
    deadlines = Deadlines()
    late, early, never = sequence("1", 30.0), sequence("2", 10.0), sequence("3", 0.0)
    for each in (late, early, never):
        deadlines.watch(each, 3)
    assert deadlines.next_s == 10.0
    assert list(deadlines.take_expired(9.9)) == []
    assert list(deadlines.take_expired(10.0)) == [early]
    assert deadlines.next_s == 30.0
    assert list(deadlines.take_expired(99.0)) == [late]
    assert deadlines.next_s is None


def test_who_has_ended_or_is_held_has_no_deadline_any_more() -> None:
    deadlines = Deadlines()
    ended, held, running = sequence("1", 1.0), sequence("2", 2.0), sequence("3", 3.0)
    for each, state in (
        (ended, SequenceState.FINISHED),
        (held, SequenceState.HELD),
        (running, SequenceState.RUNNING),
    ):
        deadlines.watch(each, 3)
        each.state = state
    assert list(deadlines.take_expired(5.0)) == [running]


def test_those_who_ended_early_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for index in range(500):
        each = sequence(str(index), 1000.0 + index)
        deadlines.watch(each, 1)
        each.state = SequenceState.FINISHED
    assert len(deadlines._entries) <= 2 * 1 + 17
