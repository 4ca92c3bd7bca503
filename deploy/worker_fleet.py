"""A supervisor's workers as the autoscaler's fleet: started under new names, drained in the background, flipped.

A flip frees the place first (its GPU, its memory) and starts the other role there afterwards: it is a drain and a
start, never two workers in one place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.ended_tasks import end_tasks
from deploy.autoscaler.fleet import FleetState, FleetWorker
from deploy.autoscaler.signals import Pool
from deploy.process_spec import ProcessSpec
from deploy.supervised_process import ProcessState, SupervisedProcess
from deploy.supervisor import Supervisor

MakeWorker = Callable[[Pool, str], ProcessSpec]

_STATES = {
    ProcessState.WAITING: FleetState.STARTING,
    ProcessState.STARTING: FleetState.STARTING,
    ProcessState.BACKING_OFF: FleetState.STARTING,
    ProcessState.READY: FleetState.READY,
    ProcessState.FAILED: FleetState.FAILED,
    ProcessState.STOPPING: FleetState.DRAINING,
    ProcessState.STOPPED: FleetState.DRAINING,
}

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    """What the fleet remembers of a worker."""

    pool: Pool
    state: FleetState
    since_s: float


class WorkerFleet:
    """Used on the supervisor's event loop. `close` before the supervisor stops."""

    def __init__(
        self, supervisor: Supervisor, make_worker: MakeWorker, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The workers that the supervisor has by now are named `<pool>-<number>`."""
        self._supervisor = supervisor
        self._make_worker = make_worker
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._next_number = dict.fromkeys(Pool, 0)
        self._start_up_s: dict[Pool, float] = {}
        self._replacing: dict[str, asyncio.Task[None]] = {}  # by the name of the one to come
        self.workers()

    def workers(self) -> Sequence[FleetWorker]:
        seen: set[str] = set(self._replacing)
        for process in self._supervisor.processes:
            if (pool := _pool_of(process.spec.name)) is not None:
                seen.add(process.spec.name)
                self._note(process, pool)
        for name in [name for name in self._entries if name not in seen]:
            del self._entries[name]
        return tuple(FleetWorker(name, entry.pool, entry.state, entry.since_s) for name, entry in self._entries.items())

    def start_up_s(self, pool: Pool) -> float | None:
        return self._start_up_s.get(pool)

    def start(self, pool: Pool) -> str:
        name = self._new_name(pool)
        self._supervisor.add(self._make_worker(pool, name))
        self.workers()
        return name

    def stop(self, worker_id: str) -> None:
        replacing = self._replacing.pop(worker_id, None)
        if replacing is not None:
            replacing.cancel()  # the worker whose place it would have had still drains
            return
        removal = self._supervisor.remove(worker_id)
        removal.add_done_callback(_log_failure)
        entry = self._entries.get(worker_id)
        if entry is not None and entry.state is FleetState.STARTING:
            # Nobody is served by it: it need not be asked twice.
            next(one for one in self._supervisor.processes if one.spec.name == worker_id).kill()
        self.workers()

    def flip(self, worker_id: str, pool: Pool) -> str:
        name = self._new_name(pool)
        self._entries[name] = _Entry(pool, FleetState.STARTING, self._clock())
        self._replacing[name] = asyncio.create_task(self._replace(worker_id, pool, name), name=f"flip-{worker_id}")
        self._replacing[name].add_done_callback(_log_failure)
        return name

    async def close(self) -> None:
        """Nothing is started from now on."""
        await end_tasks(*self._replacing.values())

    async def _replace(self, worker_id: str, pool: Pool, name: str) -> None:
        # A cancelled flip does not stop the drain: the supervisor owns that.
        await asyncio.shield(self._supervisor.remove(worker_id))
        self._supervisor.add(self._make_worker(pool, name))
        self._replacing.pop(name, None)
        self._entries[name].since_s = self._clock()

    def _note(self, process: SupervisedProcess, pool: Pool) -> None:
        name = process.spec.name
        state = FleetState.DRAINING if self._supervisor.is_draining(name) else _STATES[process.state]
        entry = self._entries.setdefault(name, _Entry(pool, state, self._clock()))
        self._next_number[pool] = max(self._next_number[pool], int(name.rpartition("-")[2]) + 1)
        if process.state is ProcessState.READY:
            self._start_up_s[pool] = process.ready_after_s
        if entry.state is not state:
            entry.state, entry.since_s = state, self._clock()

    def _new_name(self, pool: Pool) -> str:
        """Never one that was used before: a late message of an old worker must not be taken for the new one's."""
        number = self._next_number[pool]
        self._next_number[pool] += 1
        return f"{pool.value}-{number}"


def _pool_of(name: str) -> Pool | None:
    role, _, number = name.rpartition("-")
    return next((pool for pool in Pool if pool.value == role and number.isdigit()), None)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a worker could not be drained or replaced", exc_info=error)
