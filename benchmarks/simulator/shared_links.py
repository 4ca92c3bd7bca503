"""Links that several transfers share: each port gives its flows equal shares, and what one cannot use to the others.

    port    one worker's network card, or a fabric that all of them cross; so many bytes a millisecond
    flow    one prompt's KV from a prefill to a decode worker; as fast as the slowest of its ports lets it

Layers are sent while later ones are computed, so a flow is also held back by its supply: `bytes / compute time` from
the end of the first layer on, the last layer only after the compute. A flow alone takes what
`router.timing_model.exposed_transfer_ms` says. What a port keeps free because a flow is slower elsewhere is not given
away: a rate is at most too low.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.simulator.event_queue import EventQueue, Timer

# Bytes are floats here: less than this is nothing.
NO_BYTES = 0.5


class LinkPort:
    """Owned by whoever has the link. Knows the flows that are on it now."""

    __slots__ = ("bytes_per_ms", "flows")

    def __init__(self, bytes_per_ms: float) -> None:
        if not bytes_per_ms > 0:
            raise ValueError(f"bytes_per_ms of a link is {bytes_per_ms}, must be above 0")
        self.bytes_per_ms = bytes_per_ms
        self.flows: dict[Flow, None] = {}  # in order of their start: equal runs are equal

    def shares(self) -> dict[Flow, float]:
        """Bytes a millisecond of each flow: equal, but none more than its supply, and all of them while one waits."""
        left, shares = self.bytes_per_ms, {}
        by_supply = sorted(self.flows, key=lambda flow: flow.supply_per_ms)
        for place, flow in enumerate(by_supply):
            shares[flow] = min(flow.supply_per_ms, left / (len(by_supply) - place))
            left -= shares[flow]
        return shares


class Flow:
    """One transfer. `landed` is called when its last byte has arrived, after `compute_ended`."""

    __slots__ = (
        "_at_s", "_bytes_per_ms", "_events", "_landed", "_left_bytes", "_num_layers", "_ports", "_timer",
        "_unsent_bytes", "supply_per_ms",
    )  # fmt: skip

    def __init__(
        self,
        events: EventQueue,
        ports: Sequence[LinkPort],
        num_bytes: float,
        num_layers: int,
        landed: Callable[[], None],
    ) -> None:
        self._events = events
        self._ports = tuple(dict.fromkeys(ports))  # two workers may be on the same link
        self._num_layers = num_layers
        self._landed = landed
        self._left_bytes = num_bytes  # of the whole transfer
        self._unsent_bytes = 0.0  # of what is computed already
        self.supply_per_ms = 0.0
        self._bytes_per_ms = 0.0
        self._at_s = events.now_s
        self._timer: Timer | None = None

    def compute_started(self, compute_ms: float) -> None:
        """Layers follow each other evenly for about that long; the last one waits for `compute_ended`."""
        self._unsent_bytes = self._left_bytes * (self._num_layers - 1) / self._num_layers
        if self._unsent_bytes < NO_BYTES:
            return
        first_layer_s = compute_ms / self._num_layers / 1e3
        supply_per_ms = self._left_bytes / compute_ms if compute_ms > 0 else float("inf")
        self._timer = self._events.after(first_layer_s, lambda: self._enter(supply_per_ms))

    def compute_ended(self) -> None:
        """All of it is there to be sent."""
        self._advance()
        self._unsent_bytes = self._left_bytes
        self._enter(float("inf"))

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._leave()

    def _enter(self, supply_per_ms: float) -> None:
        self.supply_per_ms = supply_per_ms
        for port in self._ports:
            port.flows[self] = None
        self._share_anew()

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for port in self._ports:
            port.flows.pop(self, None)
        self._bytes_per_ms = 0.0
        self._share_anew()

    def _share_anew(self) -> None:
        """Somebody came to this flow's ports, or went: all who share one of them have another rate."""
        for flow in dict.fromkeys(flow for port in self._ports for flow in port.flows):
            flow._set_rate(min(port.shares()[flow] for port in flow._ports))

    def _set_rate(self, bytes_per_ms: float) -> None:
        self._advance()
        self._bytes_per_ms = bytes_per_ms
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._events.after(self._unsent_bytes / bytes_per_ms / 1e3, self._sent)

    def _advance(self) -> None:
        """Counts what was sent since the last look."""
        sent = min(self._unsent_bytes, self._bytes_per_ms * (self._events.now_s - self._at_s) * 1e3)
        self._left_bytes -= sent
        self._unsent_bytes -= sent
        self._at_s = self._events.now_s

    def _sent(self) -> None:
        """What was computed is over there: all of it, or all but what is still being computed."""
        self._left_bytes -= self._unsent_bytes
        self._unsent_bytes = 0.0
        self._at_s = self._events.now_s
        self._leave()
        if self._left_bytes < NO_BYTES:
            self._landed()
