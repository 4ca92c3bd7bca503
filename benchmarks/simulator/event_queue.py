"""Virtual time: what is due next, in order; nothing sleeps, nothing runs at once, equal runs are equal."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Timer:
    """One thing that is due, until it is cancelled."""

    __slots__ = ("action", "is_cancelled")

    def __init__(self, action: Action) -> None:
        self.action = action
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class EventQueue:
    """The clock and everything that will happen; what is due at one moment happens in the order it was asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._order = 0
        self._due: list[tuple[float, int, Timer]] = []

    def clock(self) -> float:
        return self.now_s

    def at(self, time_s: float, action: Action) -> Timer:
        """`action` at that time, or now where it has passed."""
        timer = Timer(action)
        self._order += 1
        heapq.heappush(self._due, (max(time_s, self.now_s), self._order, timer))
        return timer

    def after(self, delay_s: float, action: Action) -> Timer:
        return self.at(self.now_s + delay_s, action)

    def every(self, interval_s: float, action: Action, until_s: float) -> None:
        """`action` at each multiple of the interval from now on, before `until_s`."""

        def turn() -> None:
            action()
            if self.now_s + interval_s < until_s:
                self.after(interval_s, turn)

        self.after(interval_s, turn)

    def run(self, until_s: float) -> None:
        """Everything that is due up to then."""
        due = self._due
        while due and due[0][0] <= until_s:
            self.now_s, _, timer = heapq.heappop(due)
            if not timer.is_cancelled:
                self.num_events += 1
                timer.action()
        self.now_s = max(self.now_s, until_s)
