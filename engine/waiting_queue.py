"""The sequences that wait for the engine, best first, under one of three policies.

Each policy is a key that never changes while a sequence waits, so the queue is a heap and a step's cost does not grow
with its length:

    fcfs       arrival
    priority   priority + arrival time / AGEING_S_PER_LEVEL: all age alike, so waiting 10 s makes up for one level
    shortest   arrival number + min(MAX_SKIPS, uncached tokens / SKIP_TOKENS): a long prompt lets at most MAX_SKIPS
               later arrivals pass
"""

from __future__ import annotations

import enum
import heapq

from engine.sequence import OrderKey, Sequence

AGEING_S_PER_LEVEL = 10.0
MAX_SKIPS = 64
SKIP_TOKENS = 64


class SchedulingPolicy(enum.Enum):
    FCFS = "fcfs"
    PRIORITY = "priority"
    SHORTEST = "shortest"


def order_key(policy: SchedulingPolicy, sequence: Sequence, num_uncached_tokens: int) -> OrderKey:
    """The place of a sequence among all others, waiting or running."""
    if policy is SchedulingPolicy.PRIORITY:
        return sequence.request.priority + sequence.arrival_s / AGEING_S_PER_LEVEL, sequence.arrival_index
    if policy is SchedulingPolicy.SHORTEST:
        return sequence.arrival_index + min(MAX_SKIPS, num_uncached_tokens // SKIP_TOKENS), sequence.arrival_index
    return sequence.arrival_index, sequence.arrival_index


class WaitingQueue:
    """A heap with removal: what was removed is skipped when it comes up, and swept when it is the greater part."""

    def __init__(self) -> None:
        self._heap: list[tuple[OrderKey, Sequence]] = []
        self._members: set[Sequence] = set()
        self.num_tokens = 0  # uncomputed tokens of all members

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def push(self, sequence: Sequence) -> None:
        self._members.add(sequence)
        self.num_tokens += sequence.num_uncomputed
        heapq.heappush(self._heap, (sequence.order_key, sequence))

    def peek(self) -> Sequence | None:
        """The best member."""
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence | None:
        sequence = self.peek()
        if sequence is not None:
            heapq.heappop(self._heap)
            self._leave(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Takes a member out. It must not come back: a cancelled request never does."""
        self._leave(sequence)
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)

    def _leave(self, sequence: Sequence) -> None:
        self._members.remove(sequence)
        self.num_tokens -= sequence.num_uncomputed
