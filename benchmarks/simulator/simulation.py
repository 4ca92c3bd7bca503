"""One simulated cluster under one load: workers, front, scaling and faults around one virtual clock.

`simulate` gives a `LoadRun` as the load generator does, so summaries, reports and comparisons read both alike.
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.load_run import LoadRun
from benchmarks.simulator.event_queue import EventQueue
from benchmarks.simulator.fleet import Fleet, FleetSample
from benchmarks.simulator.front import Front
from benchmarks.simulator.request_life import RequestLife
from benchmarks.simulator.scaling import Scaling
from benchmarks.simulator.simulated_traffic import SimulatedArrival
from benchmarks.simulator.simulation_settings import SimulationSettings
from cluster.garbage import MIDDLE_LOOKS, YOUNG_LOOKS, YOUNG_OBJECTS
from router.worker_state import Role

# The index clears what failed workers left, and asks again for lost events.
INDEX_TICK_S = 1.0
SAMPLE_INTERVAL_S = 60.0
DEFAULT_DRAIN_S = 600.0


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """A run's records, what the fleet was over time, and what the simulation itself cost."""

    run: LoadRun
    fleet: tuple[FleetSample, ...]
    num_failures: int
    num_moved: int  # requests that went on at another worker
    num_events: int
    virtual_s: float
    wall_s: float
    worker_s: float  # ready workers, summed over time: what a bill counts


def simulate(
    settings: SimulationSettings,
    arrivals: Sequence[SimulatedArrival],
    duration_s: float,
    drain_s: float = DEFAULT_DRAIN_S,
) -> SimulationResult:
    """Sends every arrival at its time and goes on until all have ended, or `drain_s` after the last."""
    began_s = time.perf_counter()
    with _rare_collections():
        return _Simulation(settings, duration_s).run(arrivals, drain_s, began_s)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """As often as in a router, whose decisions make as many short-lived objects."""
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_LOOKS, MIDDLE_LOOKS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Simulation:
    def __init__(self, settings: SimulationSettings, duration_s: float) -> None:
        self._settings = settings
        self._duration_s = duration_s
        self._events = EventQueue()
        chance = random.Random(settings.seed)
        self._front = Front(self._events, settings)
        self._fleet = Fleet(settings, self._events, self._front, chance)
        self._scaling = Scaling(settings, self._events, self._fleet) if settings.policy is not None else None
        self._lives: list[RequestLife] = []
        self._num_open = 0
        self._peak_open = 0
        self._samples: list[FleetSample] = []

    def run(self, arrivals: Sequence[SimulatedArrival], drain_s: float, began_s: float) -> SimulationResult:
        events, end_s = self._events, self._duration_s
        for role, count in (
            (Role.PREFILL, self._settings.num_prefill),
            (Role.DECODE, self._settings.num_decode),
            (Role.AGGREGATED, self._settings.num_aggregated),
        ):
            for _ in range(count):
                self._fleet.start(role, delay_s=0.0)
        events.run(0.0)
        waiting = iter(sorted(arrivals, key=lambda arrival: arrival.time_s))
        self._arrive(next(waiting, None), waiting)
        if self._settings.faults.event_loss or self._settings.faults.worker_mtbf_s:
            events.every(INDEX_TICK_S, self._front.view.tick, end_s)
        if self._scaling is not None:
            events.every(self._scaling.tick_s, self._scaling.tick, end_s)
        events.every(SAMPLE_INTERVAL_S, self._sample, end_s)
        events.run(end_s)
        while self._num_open and events.now_s < end_s + drain_s:
            events.run(min(events.now_s + 1.0, end_s + drain_s))
        self._fleet.stop()
        records = [life.record(events.now_s) for life in self._lives]
        return SimulationResult(
            run=LoadRun(records, 0.0, self._duration_s, self._peak_open, hit_in_flight_limit=False),
            fleet=tuple(self._samples),
            num_failures=self._fleet.num_failures,
            num_moved=sum(life.fence > 1 for life in self._lives),
            num_events=events.num_events,
            virtual_s=events.now_s,
            wall_s=time.perf_counter() - began_s,
            worker_s=self._fleet.worker_s,
        )

    def _arrive(self, arrival: SimulatedArrival | None, waiting: Iterator[SimulatedArrival]) -> None:
        """One arrival is in the queue at a time: a day of them would make every other event dear."""
        if arrival is None:
            return

        def arrived() -> None:
            self._num_open += 1
            self._peak_open = max(self._peak_open, self._num_open)
            life = RequestLife(arrival, self._events, self._front, self._settings, self._ended)
            self._lives.append(life)
            if self._scaling is not None:
                self._scaling.arrived(life)
            self._arrive(next(waiting, None), waiting)

        self._events.at(arrival.time_s, arrived)

    def _ended(self, life: RequestLife) -> None:
        self._num_open -= 1
        if self._scaling is not None:
            self._scaling.ended(life)

    def _sample(self) -> None:
        self._samples.append(self._fleet.sample(self._num_open))
