"""When requests are no longer worth an answer: the earliest deadline first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.sequence import Sequence, SequenceState


class Deadlines:
    """Of live sequences that have one. Used by the engine's thread."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Sequence]] = []

    def watch(self, sequence: Sequence, num_live: int) -> None:
        """`num_live`: how many sequences live: those that ended before their deadline are dropped now and then."""
        if not sequence.request.deadline_s:
            return
        if len(self._entries) > 2 * num_live + 16:
            self._entries = [entry for entry in self._entries if entry[2].state is not SequenceState.FINISHED]
            heapq.heapify(self._entries)
        heapq.heappush(self._entries, (sequence.request.deadline_s, sequence.arrival_index, sequence))

    @property
    def next_s(self) -> float | None:
        return self._entries[0][0] if self._entries else None

    def take_expired(self, now_s: float) -> Iterator[Sequence]:
        """Those whose time is over and who still wait or run; each is told once."""
        while self._entries and self._entries[0][0] <= now_s:
            sequence = heapq.heappop(self._entries)[2]
            if sequence.state in (SequenceState.WAITING, SequenceState.RUNNING):
                yield sequence
