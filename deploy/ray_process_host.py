"""The actor that runs one worker process on a node: a child of the actor, which dies with it.

Only names, flags and paths come in and only numbers and log lines go out: no secret is ever an argument or a result of
an actor's method, so none lies in Ray's object store, its logs or its dashboard.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Sequence
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


class ProcessHost:
    """Lives in a Ray worker process; made by `RayLauncher`, one for each worker process."""

    def __init__(self) -> None:
        for name in [name for name in os.environ if name.startswith(RAY_PREFIX)]:
            del os.environ[name]
        self._process: LaunchedProcess | None = None
        self._directory: RuntimeDirectory | None = None
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._die_with_raylet, args=(os.getppid(),), name="raylet-watch")
        self._watch.daemon = True  # Ray ends its workers with os._exit, or kills them: nobody calls `close` there
        self._watch.start()

    async def start(self, name: str, command: Sequence[str], environment: str, log_directory: str) -> int:
        """The child's pid. Raises `StartupError` on a node that does not share the cluster's runtime directory."""
        logs = Path(log_directory)
        if not os.access(logs, os.W_OK):
            raise StartupError(
                f"{os.uname().nodename} has no {logs}: without ray.secrets_dir the nodes of this cluster must share "
                "one machine (docs/several_hosts.md)"
            )
        return await self._launch(name, command, environment, logs)

    async def start_on_node(self, name: str, command: Sequence[str], environment: str, model: str) -> tuple[int, str]:
        """The child's pid and where it listens: on this node's address, with a directory and a model file of its own.

        Raises `StartupError` when the model is not on this node, or its directory cannot be made.
        """
        file = await asyncio.to_thread(_checked_model, model)
        self._directory = await asyncio.to_thread(RuntimeDirectory.create, default_base())
        target = free_target(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        filled = command_on_node(command, target, self._directory.path, file)
        return await self._launch(name, filled, environment, self._directory.logs), target

    async def wait(self) -> tuple[int, list[str]]:
        """Exit status and the end of the log, once the child has ended."""
        process = self._started()
        status = await process.wait()
        lines = process.last_lines(LAST_LINES)
        self._remove_directory()
        return status, lines

    async def terminate(self) -> None:
        self._started().terminate()

    async def close(self) -> None:
        """Ends the child with its children and the watch over the raylet, and returns when they are gone."""
        if self._process is not None:
            self._process.kill()
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self._process.wait()
        self._remove_directory()
        self._closed.set()
        await asyncio.to_thread(self._watch.join, KILL_TIMEOUT_S)

    def _die_with_raylet(self, raylet_pid: int) -> None:
        """Ray ends a worker whose parent is pid 1; where somebody else adopts orphans it would live on, unknown."""
        while os.getppid() == raylet_pid:
            if self._closed.wait(RAYLET_POLL_S):
                return
        if self._process is not None:
            self._process.kill()
        self._remove_directory()
        os._exit(1)

    async def _launch(self, name: str, command: Sequence[str], environment: str, logs: Path) -> int:
        spec = ProcessSpec(name, Stage.WORKER, tuple(command), _never_asked, json.loads(environment))
        self._process = await LocalLauncher(logs).launch(spec)
        return self._process.pid

    def _remove_directory(self) -> None:
        """The node's own one, where there is one; what a killed actor leaves goes with the next start on its node."""
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.remove()

    def _started(self) -> LaunchedProcess:
        if self._process is None:
            raise RuntimeError("nothing was started here")
        return self._process


def _checked_model(model: str) -> Path:
    """Reads the whole of a known file: not on the event loop."""
    file = resolve_model(model)
    check_model(file)
    return file


async def _never_asked() -> bool:
    raise RuntimeError("the controller probes, not the host")
