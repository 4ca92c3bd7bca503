"""The actor that runs one process of a cluster on a node: a child of the actor, which dies with it.

It outlives the controller that made it: it keeps the cluster's directory, and tells the next controller what runs here.
Only names, flags and paths come in and only numbers and log lines go out: no secret is ever an argument or a result of
an actor's method, so none lies in Ray's object store, its logs or its dashboard.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray

from cluster.errors import StartupError
from cluster.model_files import check_model, resolve_model
from deploy.launcher import LaunchedProcess, LocalLauncher
from deploy.node_addresses import command_on_node, free_target
from deploy.process_spec import ProcessSpec, Stage
from deploy.runtime_dir import RuntimeDirectory, default_base

LAST_LINES = 20
# What the actor's own environment says to Ray is nothing to its child.
RAY_PREFIX = "RAY_"
RAYLET_POLL_S = 0.5
KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class HostState:
    """What a controller that did not start the child needs to know of it."""

    pid: int  # 0: nothing runs here
    target: str  # where it listens when that was found here; empty: the command says it
    is_ending: bool  # somebody has asked it to drain


class ProcessHost:
    """Lives in a Ray worker process; made by `RayLauncher`, one for each process."""

    def __init__(self) -> None:
        for name in [name for name in os.environ if name.startswith(RAY_PREFIX)]:
            del os.environ[name]
        self._process: LaunchedProcess | None = None
        self._directory: RuntimeDirectory | None = None
        self._target = ""
        self._is_ending = False
        self._exit: asyncio.Task[tuple[int, list[str]]] | None = None
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._die_with_raylet, args=(os.getppid(),), name="raylet-watch")
        self._watch.daemon = True  # Ray ends its workers with os._exit, or kills them: nobody calls `close` there
        self._watch.start()

    async def start(self, name: str, command: Sequence[str], environment: str, log_directory: str) -> int:
        """The child's pid. Raises `StartupError` on a node that does not share the cluster's runtime directory."""
        logs = Path(log_directory)
        try:
            self._directory = await asyncio.to_thread(RuntimeDirectory.join, logs.parent)
        except OSError:
            raise StartupError(
                f"{os.uname().nodename} has no {logs}: without ray.secrets_dir the nodes of this cluster must share "
                "one machine (docs/several_hosts.md)"
            ) from None
        return await self._launch(name, command, environment, logs)

    async def start_on_node(self, name: str, command: Sequence[str], environment: str, model: str) -> tuple[int, str]:
        """The child's pid and where it listens: on this node's address, with a directory and a model file of its own.

        Raises `StartupError` when the model is not on this node, or its directory cannot be made.
        """
        file = await asyncio.to_thread(_checked_model, model)
        self._directory = await asyncio.to_thread(RuntimeDirectory.create, default_base())
        self._target = free_target(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        filled = command_on_node(command, self._target, self._directory.path, file)
        return await self._launch(name, filled, environment, self._directory.logs), self._target

    async def state(self) -> HostState:
        is_running = self._process is not None and self._exit is not None and not self._exit.done()
        return HostState(self._process.pid if self._process and is_running else 0, self._target, self._is_ending)

    async def wait(self) -> tuple[int, list[str]]:
        """Exit status and the end of the log, once the child has ended, for one controller after the other."""
        if self._exit is None:
            raise RuntimeError("nothing was started here")
        return await asyncio.shield(self._exit)

    async def terminate(self) -> None:
        """Asks the child to drain and end. Once is enough: a second time would end it at once."""
        if self._process is not None and not self._is_ending:
            self._is_ending = True
            self._process.terminate()

    async def close(self) -> None:
        """Ends the child with its children and the watch over the raylet, and returns when they are gone."""
        if self._process is not None:
            self._process.kill()
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self.wait()
        self._leave_directory()
        self._closed.set()
        await asyncio.to_thread(self._watch.join, KILL_TIMEOUT_S)

    def _die_with_raylet(self, raylet_pid: int) -> None:
        """Ray ends a worker whose parent is pid 1; where somebody else adopts orphans it would live on, unknown."""
        while os.getppid() == raylet_pid:
            if self._closed.wait(RAYLET_POLL_S):
                return
        if self._process is not None:
            self._process.kill()
        self._leave_directory()
        os._exit(1)

    async def _launch(self, name: str, command: Sequence[str], environment: str, logs: Path) -> int:
        spec = ProcessSpec(name, Stage.WORKER, tuple(command), _never_asked, json.loads(environment))
        self._process = await LocalLauncher(logs).launch(spec)
        self._is_ending = False
        self._exit = asyncio.create_task(self._note_exit(self._process), name=f"wait-{name}")
        return self._process.pid

    async def _note_exit(self, process: LaunchedProcess) -> tuple[int, list[str]]:
        status = await process.wait()
        lines = process.last_lines(LAST_LINES)
        self._leave_directory()
        return status, lines

    def _leave_directory(self) -> None:
        """Removed by the last one there; what a killed actor leaves goes with the next start on its node."""
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.leave()


def _checked_model(model: str) -> Path:
    """Reads the whole of a known file: not on the event loop."""
    file = resolve_model(model)
    check_model(file)
    return file


async def _never_asked() -> bool:
    raise RuntimeError("the controller probes, not the host")
