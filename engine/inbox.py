"""What other threads ask of the engine thread: arrivals, cancels, releases, stop. Bounded, never spinning."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.errors import InvalidRequest, ServerOverloaded, WorkerUnavailable, shown
from cluster.identity import RequestId
from engine.sequence import Sequence

OVERLOAD_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class InboxItems:
    """Everything asked for since the last look."""

    arrivals: list[Sequence] = field(default_factory=list)
    cancelled: list[Sequence] = field(default_factory=list)
    released: list[Sequence] = field(default_factory=list)
    is_stopping: bool = False


_NOTHING = InboxItems()  # never filled


class Inbox:
    """Safe from any thread. Cancels and releases of unknown requests change nothing, so neither list can outgrow the
    requests that are alive."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._items = InboxItems()
        self._live: dict[RequestId, Sequence] = {}
        self._next_arrival = 0
        self._closed_because = ""
        self._is_woken = False

    @property
    def num_arrivals(self) -> int:
        """Requests that the engine thread has not taken yet."""
        return len(self._items.arrivals)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def put(self, make_sequence: Callable[[int], Sequence], request_id: RequestId, num_waiting: int) -> None:
        """Adds an arrival: `make_sequence(arrival number)`. `num_waiting` are in the scheduler's queue already."""
        with self._changed:
            if self._closed_because:
                raise WorkerUnavailable(f"the engine does not run: {self._closed_because}")
            if request_id in self._live:
                raise InvalidRequest(f"request id {shown(request_id)} is in use", param="request_id")
            if num_waiting + len(self._items.arrivals) >= self._max_waiting:
                raise ServerOverloaded(
                    f"{self._max_waiting} requests are waiting, which is the limit of this worker",
                    retry_after_s=OVERLOAD_RETRY_AFTER_S,
                )
            sequence = make_sequence(self._next_arrival)
            self._next_arrival += 1
            self._live[request_id] = sequence
            self._items.arrivals.append(sequence)
            self._changed.notify()

    def cancel(self, request_id: RequestId) -> None:
        with self._changed:
            sequence = self._live.get(request_id)
            if sequence is not None and sequence not in self._items.cancelled:
                self._items.cancelled.append(sequence)
                self._changed.notify()

    def release(self, request_id: RequestId) -> None:
        with self._changed:
            sequence = self._live.get(request_id)
            if sequence is not None and sequence not in self._items.released:
                self._items.released.append(sequence)
                self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._items.is_stopping = True
            self._changed.notify()

    def wake(self) -> None:
        """Something outside changed: blocks came back."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def take(self, timeout_s: float | None) -> InboxItems:
        """All items, at once when there are any or someone called `wake`; else waits that long (None: for ever)."""
        if timeout_s == 0 and not self._has_news():  # between two steps nearly always: whoever comes now is next
            return _NOTHING
        with self._changed:
            if timeout_s != 0:
                self._changed.wait_for(self._has_news, timeout_s)
            self._is_woken = False
            items, self._items = self._items, InboxItems()
            return items

    def forget(self, sequence: Sequence) -> None:
        """The request has ended: its id is unknown from now on."""
        with self._changed:
            self._live.pop(sequence.request.request_id, None)

    def close(self, reason: str) -> list[Sequence]:
        """Refuses everything from now on. Gives every request that has not ended."""
        with self._changed:
            self._closed_because = reason
            self._items = InboxItems()
        return self.live()

    def live(self) -> list[Sequence]:
        """Every request that has not ended, held ones included."""
        with self._changed:
            return list(self._live.values())

    def _has_news(self) -> bool:
        items = self._items
        return bool(self._is_woken or items.is_stopping or items.arrivals or items.cancelled or items.released)
