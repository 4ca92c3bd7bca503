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

from cluster.errors import StartupError
from deploy.launcher import LaunchedProcess, LocalLauncher
from deploy.process_spec import ProcessSpec, Stage

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
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._die_with_raylet, args=(os.getppid(),), name="raylet-watch")
        self._watch.daemon = True  # Ray ends its workers with os._exit, or kills them: nobody calls `close` there
        self._watch.start()

    async def start(self, name: str, command: Sequence[str], environment: str, log_directory: str) -> int:
        """The child's pid. Raises `StartupError` on a node that does not share the cluster's runtime directory."""
        logs = Path(log_directory)
        if not os.access(logs, os.W_OK):
            raise StartupError(
                f"{os.uname().nodename} has no {logs}: the nodes of this cluster must share one machine; on "
                "several, start the workers by hand (docs/several_hosts.md)"
            )
        spec = ProcessSpec(name, Stage.WORKER, tuple(command), _never_asked, json.loads(environment))
        self._process = await LocalLauncher(logs).launch(spec)
        return self._process.pid

    async def wait(self) -> tuple[int, list[str]]:
        """Exit status and the end of the log, once the child has ended."""
        process = self._started()
        status = await process.wait()
        return status, process.last_lines(LAST_LINES)

    async def terminate(self) -> None:
        self._started().terminate()

    async def close(self) -> None:
        """Ends the child with its children and the watch over the raylet, and returns when they are gone."""
        if self._process is not None:
            self._process.kill()
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self._process.wait()
        self._closed.set()
        await asyncio.to_thread(self._watch.join, KILL_TIMEOUT_S)

    def _die_with_raylet(self, raylet_pid: int) -> None:
        """Ray ends a worker whose parent is pid 1; where somebody else adopts orphans it would live on, unknown."""
        while os.getppid() == raylet_pid:
            if self._closed.wait(RAYLET_POLL_S):
                return
        if self._process is not None:
            self._process.kill()
        os._exit(1)

    def _started(self) -> LaunchedProcess:
        if self._process is None:
            raise RuntimeError("nothing was started here")
        return self._process


async def _never_asked() -> bool:
    raise RuntimeError("the controller probes, not the host")
