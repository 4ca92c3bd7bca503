"""Keeps an index true to a worker's KV events: order, gaps, restarts. Pure: it says what to do, the caller does it.

Events of one incarnation are numbered from 1. A gap asks for the missing range, then for a snapshot, and what is known
keeps serving meanwhile. A new incarnation, or numbers that start over, drop what was known of the worker.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.identity import BlockHash, Incarnation

MAX_HELD_EVENTS = 1024
RANGE_TIMEOUT_S = 1.0
SNAPSHOT_TIMEOUT_S = 5.0


class EventOp(enum.Enum):
    STORED = "stored"
    DEMOTED = "demoted"  # into a lower tier
    REMOVED = "removed"
    CLEARED = "cleared"
    SNAPSHOT = "snapshot"  # replaces all that is known; `seq` is the last event it contains


@dataclass(frozen=True, slots=True)
class KvEvent:
    incarnation: Incarnation
    seq: int
    op: EventOp
    hashes: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class DropWorker:
    """Forget all of this worker."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Enter or remove these blocks."""

    op: EventOp  # STORED, DEMOTED or REMOVED
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AskRange:
    """Ask the worker's stream for events first_seq to last_seq again."""

    first_seq: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Ask the worker for all that it holds."""


Step = DropWorker | Apply | AskRange | AskSnapshot


@dataclass(frozen=True, slots=True)
class LogState:
    """What is known of one worker's events."""

    incarnation: Incarnation | None = None
    last_seq: int = 0
    held: tuple[KvEvent, ...] = ()  # beyond the gap, ascending
    asked_range_s: float | None = None
    asked_snapshot_s: float | None = None

    @property
    def has_gap(self) -> bool:
        return self.asked_range_s is not None or self.asked_snapshot_s is not None


def on_event(state: LogState, event: KvEvent, now_s: float) -> tuple[LogState, list[Step]]:
    """The new state, and what to do in order."""
    if event.incarnation != state.incarnation:
        return _restarted(event, now_s, had_blocks=state.incarnation is not None)
    if event.op is EventOp.SNAPSHOT:
        return _snapshot(state, event)
    if event.seq <= state.last_seq:
        return state, []  # seen before: a repeated range, or a stream read twice
    if event.seq == state.last_seq + 1:
        return _in_order(state, event)
    held = tuple(sorted({known.seq: known for known in (*state.held, event)}.values(), key=lambda known: known.seq))
    if len(held) > MAX_HELD_EVENTS:
        # Holding more would grow without a bound: a snapshot replaces them all.
        return LogState(state.incarnation, state.last_seq, (), None, now_s), [AskSnapshot()]
    if state.has_gap:
        return LogState(state.incarnation, state.last_seq, held, state.asked_range_s, state.asked_snapshot_s), []
    asked = AskRange(state.last_seq + 1, event.seq - 1)
    return LogState(state.incarnation, state.last_seq, held, now_s, None), [asked]


def on_tick(state: LogState, now_s: float) -> tuple[LogState, list[Step]]:
    """Asks for a snapshot when the range did not come, and again when the snapshot did not."""
    if state.asked_range_s is not None and now_s - state.asked_range_s >= RANGE_TIMEOUT_S:
        return LogState(state.incarnation, state.last_seq, state.held, None, now_s), [AskSnapshot()]
    if state.asked_snapshot_s is not None and now_s - state.asked_snapshot_s >= SNAPSHOT_TIMEOUT_S:
        return LogState(state.incarnation, state.last_seq, state.held, None, now_s), [AskSnapshot()]
    return state, []


def _restarted(event: KvEvent, now_s: float, *, had_blocks: bool) -> tuple[LogState, list[Step]]:
    """Another incarnation: what the old one held is gone."""
    steps: list[Step] = [DropWorker()] if had_blocks else []
    state, more = on_event(LogState(event.incarnation), event, now_s)
    return state, [*steps, *more]


def _snapshot(state: LogState, event: KvEvent) -> tuple[LogState, list[Step]]:
    if event.seq < state.last_seq:
        return state, []  # older than what is known
    steps: list[Step] = [DropWorker(), Apply(EventOp.STORED, event.hashes)]
    later = [held for held in state.held if held.seq > event.seq]
    return _drain(LogState(state.incarnation, event.seq), later, steps)


def _in_order(state: LogState, event: KvEvent) -> tuple[LogState, list[Step]]:
    return _drain(state, [event, *state.held], [])


def _drain(state: LogState, events: Sequence[KvEvent], steps: list[Step]) -> tuple[LogState, list[Step]]:
    """Applies what follows without a gap; the rest stays held, and the gap stays asked for."""
    last_seq = state.last_seq
    for index, event in enumerate(events):
        if event.seq != last_seq + 1:
            held = tuple(events[index:])
            return LogState(state.incarnation, last_seq, held, state.asked_range_s, state.asked_snapshot_s), steps
        last_seq = event.seq
        steps.append(DropWorker() if event.op is EventOp.CLEARED else Apply(event.op, event.hashes))
    return LogState(state.incarnation, last_seq), steps
