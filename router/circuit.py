"""Whether a worker is asked at all: a circuit for each, closed while it answers. Pure: (state, outcome, now) -> state.

    CLOSED ──`FAILURES_TO_OPEN` in a row──> OPEN ──back-off over──> HALF_OPEN ──one success──> CLOSED
                                              ^                         │
                                              └──── failure, twice the back-off

Only what the worker did counts: a refused client, a full pool or a drain never opens a circuit. Where every circuit of
a pool is open they are ignored: a router that asks nobody is worse than one that asks a doubtful worker.
Source: Nygard, Release It!, 2007; panic routing as in Envoy.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

FAILURES_TO_OPEN = 3
FIRST_OPEN_S, MAX_OPEN_S = 1.0, 30.0
# A probe that never came back must not keep the circuit half open for ever.
PROBE_TIMEOUT_S = 10.0


class Position(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"  # one request is trying


@dataclass(frozen=True, slots=True)
class Circuit:
    """One worker's."""

    position: Position = Position.CLOSED
    num_failures: int = 0  # in a row
    until_s: float = 0.0  # OPEN: no request before; HALF_OPEN: the probe counts as lost after
    open_s: float = FIRST_OPEN_S  # the next back-off


CLOSED = Circuit()


def admits(circuit: Circuit, now_s: float) -> bool:
    """Whether a request may be sent now: always when closed, one of them when the back-off is over."""
    return circuit.position is Position.CLOSED or now_s >= circuit.until_s


def on_sent(circuit: Circuit, now_s: float) -> Circuit:
    """A request goes to the worker: with an open circuit it is the probe."""
    if circuit.position is Position.CLOSED:
        return circuit
    return Circuit(Position.HALF_OPEN, circuit.num_failures, now_s + PROBE_TIMEOUT_S, circuit.open_s)


def on_success(circuit: Circuit) -> Circuit:
    return circuit if circuit == CLOSED else CLOSED


def on_failure(circuit: Circuit, now_s: float) -> Circuit:
    """The worker failed a request that another one might have served."""
    failures = circuit.num_failures + 1
    if circuit.position is Position.CLOSED and failures < FAILURES_TO_OPEN:
        return Circuit(Position.CLOSED, failures)
    if circuit.position is Position.OPEN:  # it was sent before the circuit opened, and says nothing new
        return circuit
    return Circuit(Position.OPEN, failures, now_s + circuit.open_s, min(2 * circuit.open_s, MAX_OPEN_S))
