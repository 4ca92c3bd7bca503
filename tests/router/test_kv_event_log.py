"""Events out of order, missing, repeated, of another life: the index ends up right, and serves meanwhile."""

from __future__ import annotations

import random

import pytest

from cluster.identity import BlockHash, Incarnation, WorkerId
from router.kv_event_log import (
    MAX_HELD_EVENTS,
    RANGE_TIMEOUT_S,
    SNAPSHOT_TIMEOUT_S,
    Apply,
    AskRange,
    AskSnapshot,
    DropWorker,
    EventOp,
    KvEvent,
    LogState,
    Step,
    on_event,
    on_tick,
)
from router.prefix_index import PrefixIndex

FIRST, SECOND = Incarnation("first"), Incarnation("second")
WORKER = WorkerId("w")


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def stored(seq: int, *numbers: int, incarnation: Incarnation = FIRST) -> KvEvent:
    return KvEvent(incarnation, seq, EventOp.STORED, tuple(map(block, numbers)))


class Replica:
    """A state with its index."""

    def __init__(self) -> None:
        self.state, self.index = LogState(), PrefixIndex()
        self.asked: list[Step] = []

    def feed(self, event: KvEvent, now_s: float = 0.0) -> None:
        self.state, steps = on_event(self.state, event, now_s)
        self._do(steps)

    def tick(self, now_s: float) -> None:
        self.state, steps = on_tick(self.state, now_s)
        self._do(steps)

    def holds(self, number: int) -> bool:
        return bool(self.index.match([block(number)], 0.0))

    def _do(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, DropWorker):
                self.index.drop_worker(WORKER)
            elif isinstance(step, Apply):
                change = self.index.stored if step.op is EventOp.STORED else self.index.removed
                change(WORKER, step.hashes)
            else:
                self.asked.append(step)


def test_events_in_order_are_applied() -> None:
    replica = Replica()
    replica.feed(stored(1, 1, 2))
    replica.feed(KvEvent(FIRST, 2, EventOp.REMOVED, (block(1),)))
    assert (replica.holds(1), replica.holds(2)) == (False, True)
    assert replica.asked == []


def test_f40_a_gap_asks_for_its_range_and_keeps_serving() -> None:
    replica = Replica()
    replica.feed(stored(1, 1))
    replica.feed(stored(4, 4))
    replica.feed(stored(5, 5))
    assert replica.asked == [AskRange(2, 3)]
    assert (replica.holds(1), replica.holds(4)) == (True, False)
    replica.feed(stored(2, 2))
    replica.feed(stored(3, 3))
    assert all(replica.holds(number) for number in range(1, 6))
    assert not replica.state.has_gap


def test_rt12_a_range_that_does_not_come_asks_for_one_snapshot() -> None:
    replica = Replica()
    replica.feed(stored(1, 1))
    replica.feed(stored(500, 500))
    replica.tick(RANGE_TIMEOUT_S)
    replica.tick(RANGE_TIMEOUT_S + 0.1)
    assert replica.asked == [AskRange(2, 499), AskSnapshot()]
    replica.feed(KvEvent(FIRST, 499, EventOp.SNAPSHOT, (block(7),)))
    assert (replica.holds(1), replica.holds(7), replica.holds(500)) == (False, True, True)
    replica.feed(stored(501, 501))
    replica.tick(100.0)
    assert len(replica.asked) == 2


def test_a_snapshot_that_does_not_come_is_asked_for_again() -> None:
    replica = Replica()
    replica.feed(stored(3, 3))
    replica.tick(RANGE_TIMEOUT_S)
    replica.tick(RANGE_TIMEOUT_S + SNAPSHOT_TIMEOUT_S)
    assert replica.asked == [AskRange(1, 2), AskSnapshot(), AskSnapshot()]


def test_rt14_a_first_event_beyond_one_is_a_gap() -> None:
    replica = Replica()
    replica.feed(stored(17, 17))
    assert replica.asked == [AskRange(1, 16)]


def test_rt18_a_new_incarnation_at_seq_one_drops_what_the_old_one_held() -> None:
    replica = Replica()
    for seq in range(1, 6):
        replica.feed(stored(seq, seq))
    replica.feed(stored(1, 99, incarnation=SECOND))
    assert not any(replica.holds(number) for number in range(1, 6))
    assert replica.holds(99)


def test_rt19_all_cleared_clears() -> None:
    replica = Replica()
    replica.feed(stored(1, *range(100)))
    replica.feed(KvEvent(FIRST, 2, EventOp.CLEARED))
    assert not any(replica.holds(number) for number in range(100))


def test_held_events_are_bounded() -> None:
    replica = Replica()
    for seq in range(10, 12 + MAX_HELD_EVENTS):
        replica.feed(stored(seq, seq))
    assert replica.asked == [AskRange(1, 9), AskSnapshot()]
    assert len(replica.state.held) <= MAX_HELD_EVENTS


@pytest.mark.parametrize("seed", range(20))
def test_f40_loss_repetition_and_reordering_end_in_the_truth(seed: int) -> None:
    chance = random.Random(seed)
    truth: set[int] = set()
    events, snapshots = [], {}
    for seq in range(1, 200):
        number = chance.randrange(40)
        if chance.random() < 0.3 and number in truth:
            truth.discard(number)
            events.append(KvEvent(FIRST, seq, EventOp.REMOVED, (block(number),)))
        else:
            truth.add(number)
            events.append(stored(seq, number))
        snapshots[seq] = KvEvent(FIRST, seq, EventOp.SNAPSHOT, tuple(map(block, sorted(truth))))
    replica, now_s = Replica(), 0.0
    for index, event in enumerate(events):
        now_s += 0.1
        if chance.random() < 0.8:
            replica.feed(event, now_s)
        if chance.random() < 0.2:
            replica.feed(events[chance.randrange(index + 1)], now_s)
        asked_before = len(replica.asked)
        replica.tick(now_s)
        if len(replica.asked) > asked_before and isinstance(replica.asked[-1], AskSnapshot):
            replica.feed(snapshots[event.seq], now_s)
    replica.feed(snapshots[199], now_s)
    assert {number for number in range(40) if replica.holds(number)} == truth
