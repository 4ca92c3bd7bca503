"""The workers that an autoscaler may start and stop, as it sees them. It does not know what runs them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from deploy.autoscaler.signals import Pool


class FleetState(enum.Enum):
    STARTING = "starting"  # also one that crashed and starts again
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"  # given up: it never comes


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """One worker of the fleet."""

    worker_id: str
    pool: Pool
    state: FleetState
    since_s: float  # when it entered this state, on the autoscaler's clock


class Fleet(Protocol):
    """Implementation: `deploy/worker_fleet.py`, over a supervisor whose launcher is local or Ray's."""

    def workers(self) -> Sequence[FleetWorker]: ...

    def start_up_s(self, pool: Pool) -> float | None:
        """How long the last worker of this pool took to become ready; None: none has."""
        ...

    def start(self, pool: Pool) -> str:
        """Begins to start a worker; its name."""
        ...

    def stop(self, worker_id: str) -> None:
        """Begins to drain a worker, or gives up one that is starting."""
        ...

    def flip(self, worker_id: str, pool: Pool) -> str:
        """Drains a worker and starts one of the other pool in its place; that one's name. It counts as starting."""
        ...
