"""Brings a cluster up in order of readiness, keeps it up, and takes it down in reverse so that nothing is left.

    Redis ready -> workers and router start together -> all ready: serving
    a crash: the process starts again (deploy/restart_policy.py); a crash loop: an error, and the end of the cluster
    when nobody else can do that process's part
    while it serves: workers are added, and removed once they have drained
    stop: router first (its streams end), then workers, then Redis

What runs a cluster only sees `Supervisor`; whether processes are local is the launcher's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from cluster.errors import StartupError
from deploy.launcher import Launcher
from deploy.process_spec import ProcessSpec, Stage
from deploy.restart_policy import RestartLimits
from deploy.supervised_process import ProcessState, SupervisedProcess

_log = logging.getLogger(__name__)

ChangeListener = Callable[[SupervisedProcess], None]


class Supervisor:
    """Owns all processes of one cluster: `start` or `resume`, `wait_for_failure` while it serves, `stop` at the end."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        launcher: Launcher,
        on_change: ChangeListener,
        limits: RestartLimits | None = None,
    ) -> None:
        self._launcher = launcher
        self._limits = limits
        self._on_change = on_change
        self._processes = [self._new(spec) for spec in specs]
        self._removals: dict[str, asyncio.Task[None]] = {}
        self._state_changed = asyncio.Event()

    @property
    def processes(self) -> Sequence[SupervisedProcess]:
        """Those that shall run, and those that still drain."""
        return tuple(self._processes)

    def is_draining(self, name: str) -> bool:
        return name in self._removals

    def add(self, spec: ProcessSpec) -> SupervisedProcess:
        """Starts one more process while the cluster serves. Its failure alone does not end the cluster."""
        process = self._new(spec)
        self._processes.append(process)
        process.start()
        return process

    def remove(self, name: str) -> asyncio.Task[None]:
        """Begins to drain and end a process; the task ends when it is gone. `stop` waits for it too."""
        if name not in self._removals:
            process = next(process for process in self._processes if process.spec.name == name)
            self._removals[name] = asyncio.create_task(self._remove(process), name=f"remove-{name}")
        return self._removals[name]

    async def start(self) -> None:
        """Returns when every process is ready. Raises `StartupError` with the first reason why one cannot be."""
        for stages in ((Stage.REDIS,), (Stage.WORKER, Stage.ROUTER)):
            starting = [process for process in self._processes if process.spec.stage in stages]
            for process in starting:
                process.start()
            while not _all_ready(starting):
                await self._next_change()

    def resume(self) -> None:
        """In place of `start` for a cluster that serves already: what runs is taken over, what is missing is started.

        Nobody waits, and nothing that cannot be started ends the cluster but what `wait_for_failure` tells.
        """
        for process in self._processes:
            process.start()

    async def wait_for_failure(self) -> str:
        """Returns the reason once the cluster can serve no longer."""
        while (reason := self._fatal_failure()) is None:
            await self._next_change()
        return reason

    async def stop(self) -> None:
        """Stops all that was started, router first. Returns when every process is gone."""
        for stage in sorted(Stage, reverse=True):
            at_stage = [process for process in self._processes if process.spec.stage is stage]
            stopping = [self._removals.get(process.spec.name) or process.stop() for process in at_stage]
            for result in await asyncio.gather(*stopping, return_exceptions=True):
                if isinstance(result, BaseException):
                    _log.error("a process could not be stopped", exc_info=result)

    def kill(self) -> None:
        """Ends all processes now: a second Ctrl-C."""
        for process in self._processes:
            process.kill()

    def _new(self, spec: ProcessSpec) -> SupervisedProcess:
        return SupervisedProcess(spec, self._launcher, self._changed, self._limits)

    async def _remove(self, process: SupervisedProcess) -> None:
        try:
            await process.stop()
        finally:
            self._processes.remove(process)
            del self._removals[process.spec.name]

    async def _next_change(self) -> None:
        await self._state_changed.wait()
        self._state_changed.clear()

    def _changed(self, process: SupervisedProcess) -> None:
        self._state_changed.set()
        self._on_change(process)

    def _fatal_failure(self) -> str | None:
        """The failure of a process whose part nobody else can do."""
        for process in self._processes:
            if process.state is ProcessState.FAILED and process.spec.needed_as:
                part = process.spec.needed_as
                others = [other for other in self._processes if other.spec.needed_as == part]
                if all(other.state is ProcessState.FAILED for other in others):
                    return process.failure
        return None


def _all_ready(processes: Sequence[SupervisedProcess]) -> bool:
    """Raises `StartupError` when one has given up."""
    for process in processes:
        if process.state is ProcessState.FAILED:
            raise StartupError(process.failure)
    return all(process.state is ProcessState.READY for process in processes)
