"""The workers of a simulation over time: started with a delay, drained, failed and replaced."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulator.event_queue import EventQueue, Timer
from benchmarks.simulator.front import Front
from benchmarks.simulator.simulated_worker import SimulatedWorker
from benchmarks.simulator.simulation_settings import SimulationSettings
from cluster.identity import WorkerId
from router.worker_state import Role

DRAIN_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class FleetSample:
    """The fleet at one moment."""

    time_s: float
    prefill: int
    decode: int
    aggregated: int
    starting: int
    open_requests: int


@dataclass(slots=True)
class StartingWorker:
    """Asked for and not ready yet."""

    worker_id: WorkerId
    role: Role
    deadline_s: float
    timer: Timer


class Fleet:
    """Owned by the simulation."""

    def __init__(self, settings: SimulationSettings, events: EventQueue, front: Front, chance: random.Random) -> None:
        self.num_failures = 0
        self.starting: list[StartingWorker] = []
        self.worker_s = 0.0
        self._settings = settings
        self._shape = settings.shape
        self._events = events
        self._front = front
        self._chance = chance
        self._numbers = itertools.count()
        self._ready: dict[WorkerId, tuple[SimulatedWorker, float]] = {}
        self._is_stopped = False

    def workers(self, role: Role) -> list[SimulatedWorker]:
        """Ready and not draining."""
        return [worker for worker, _ in self._ready.values() if worker.state.role is role and worker.state.is_routable]

    def num_draining(self, role: Role) -> int:
        return sum(worker.state.role is role and worker.state.load.draining for worker, _ in self._ready.values())

    def start(self, role: Role, delay_s: float, timeout_s: float = 0.0) -> None:
        """A worker that is ready after the delay."""
        worker_id = WorkerId(f"{role.value}-{next(self._numbers)}")
        timer = self._events.after(delay_s, lambda: self._become_ready(starting))
        starting = StartingWorker(worker_id, role, self._events.now_s + timeout_s, timer)
        self.starting.append(starting)

    def cancel_starting(self, role: Role) -> None:
        """The one that was asked for last serves nobody yet."""
        for starting in reversed(self.starting):
            if starting.role is role:
                starting.timer.cancel()
                self.starting.remove(starting)
                return

    def drain(self, role: Role, then: Callable[[], None] | None = None) -> None:
        """The one with the fewest requests takes no more, and leaves when it has none."""
        candidates = self.workers(role)
        if not candidates:
            return
        worker = min(candidates, key=lambda one: len(one.live))
        worker.state.load.draining = True
        self._front.changed()
        self._leave_when_empty(worker, then)

    def sample(self, open_requests: int) -> FleetSample:
        return FleetSample(
            time_s=self._events.now_s,
            prefill=len(self.workers(Role.PREFILL)),
            decode=len(self.workers(Role.DECODE)),
            aggregated=len(self.workers(Role.AGGREGATED)),
            starting=len(self.starting),
            open_requests=open_requests,
        )

    def stop(self) -> None:
        """Closes the books."""
        self._is_stopped = True
        for worker, since_s in self._ready.values():
            worker.engine.tell()
            self.worker_s += self._events.now_s - since_s

    def _become_ready(self, starting: StartingWorker) -> None:
        self.starting.remove(starting)
        faults = self._settings.faults
        worker = SimulatedWorker(
            self._events,
            starting.worker_id,
            starting.role,
            self._shape,
            self._front.read,
            faults.event_loss,
            self._chance,
        )
        self._ready[starting.worker_id] = (worker, self._events.now_s)
        self._front.joined(worker)
        if faults.worker_mtbf_s:
            self._events.after(self._chance.expovariate(1 / faults.worker_mtbf_s), lambda: self._fail(worker))

    def _fail(self, worker: SimulatedWorker) -> None:
        """It dies where it stands; its supervisor starts another one."""
        if self._is_stopped or worker.state.worker_id not in self._ready:
            return
        self.num_failures += 1
        self._remove(worker)
        worker.fail()
        self.start(worker.state.role, self._settings.start_delay_s, self._settings.start_delay_s)

    def _leave_when_empty(self, worker: SimulatedWorker, then: Callable[[], None] | None) -> None:
        if worker.state.worker_id not in self._ready:
            return
        if worker.live:
            self._events.after(DRAIN_POLL_S, lambda: self._leave_when_empty(worker, then))
            return
        self._remove(worker)
        worker.fail()
        if then is not None:
            then()

    def _remove(self, worker: SimulatedWorker) -> None:
        _, since_s = self._ready.pop(worker.state.worker_id)
        self.worker_s += self._events.now_s - since_s
        self._front.left(worker)
