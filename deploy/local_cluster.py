"""A whole cluster on this machine from start to end: model, runtime directory, processes, signals, clean-up.

`run_cluster` is what `tandem serve` and `tandem generate --start` do; they differ in what they do while it serves.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from cluster.errors import StartupError
from cluster.model_files import resolve_model, tandem_home
from cluster.process_guard import StopSignals
from deploy.cluster_plan import ClusterPlan, plan_cluster
from deploy.config import ClusterConfig
from deploy.launcher import LocalLauncher
from deploy.runtime_dir import RuntimeDirectory, default_base
from deploy.supervised_process import SupervisedProcess
from deploy.supervisor import Supervisor

# Logs of failed runs that are kept for a look.
MAX_KEPT_LOGS = 10


class ClusterFailed(Exception):
    """The cluster served and then could not go on. The message is one line."""


class ClusterDisplay(Protocol):
    """Who is told how it goes."""

    def planned(self, plan: ClusterPlan) -> None: ...

    def changed(self, process: SupervisedProcess) -> None: ...

    def ready(self, plan: ClusterPlan) -> None: ...

    def stopping(self) -> None: ...


async def run_cluster(
    config: ClusterConfig, display: ClusterDisplay, while_serving: Callable[[ClusterPlan], Awaitable[None]]
) -> None:
    """Starts the cluster, runs `while_serving` to its end or until a signal, stops everything, removes every trace.

    Raises `StartupError` when it cannot start, `ClusterFailed` when it cannot go on; the logs are kept for both.
    """
    model = resolve_model(config.model)
    signals = StopSignals()
    signals.install()
    directory = RuntimeDirectory.create(default_base())
    try:
        plan = plan_cluster(config, model, directory.path)
        display.planned(plan)
        supervisor = Supervisor(plan.processes, LocalLauncher(directory.logs), display.changed)
        try:
            await _serve(supervisor, plan, signals, display, while_serving)
        finally:
            display.stopping()
            await _stop(supervisor, signals)
    except StartupError as error:
        raise StartupError(_with_logs(error.message, directory)) from None
    except ClusterFailed as error:
        raise ClusterFailed(_with_logs(str(error), directory)) from None
    finally:
        directory.remove()
        signals.remove()


async def _serve(
    supervisor: Supervisor,
    plan: ClusterPlan,
    signals: StopSignals,
    display: ClusterDisplay,
    while_serving: Callable[[ClusterPlan], Awaitable[None]],
) -> None:
    stop_asked = asyncio.create_task(_quietly(signals.drain.wait()), name="stop-asked")
    try:
        await _first_of(supervisor.start(), stop_asked)
        if stop_asked.done():
            return
        display.ready(plan)
        await _first_of(_serve_until_failure(supervisor, plan, while_serving), stop_asked)
    finally:
        stop_asked.cancel()


async def _serve_until_failure(
    supervisor: Supervisor, plan: ClusterPlan, while_serving: Callable[[ClusterPlan], Awaitable[None]]
) -> None:
    failure = asyncio.create_task(_raise_failure(supervisor), name="cluster-failure")
    try:
        await _first_of(_quietly(while_serving(plan)), failure)
    finally:
        failure.cancel()


async def _raise_failure(supervisor: Supervisor) -> None:
    raise ClusterFailed(await supervisor.wait_for_failure())


async def _first_of(work: Coroutine[Any, Any, None], other: asyncio.Task[None]) -> None:
    """Runs `work` until it or `other` ends, and raises what the ended one raised. `work` never outlives this call."""
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait((task, other), return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        await asyncio.wait((task,))
    for ended in done:
        ended.result()


async def _quietly(awaitable: Awaitable[Any]) -> None:
    await awaitable


async def _stop(supervisor: Supervisor, signals: StopSignals) -> None:
    """Drains; a second signal kills."""
    stop = asyncio.create_task(supervisor.stop(), name="stop-cluster")
    impatient = asyncio.create_task(_quietly(signals.stop_now.wait()), name="stop-now-asked")
    try:
        await asyncio.wait((stop, impatient), return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            supervisor.kill()
        await stop
    finally:
        impatient.cancel()


def _with_logs(message: str, directory: RuntimeDirectory) -> str:
    """Saves the processes' logs from the runtime directory's removal and says where they are."""
    if not any(directory.logs.iterdir()):
        return message
    kept_in = tandem_home() / "logs"
    kept_in.mkdir(parents=True, exist_ok=True)
    older = sorted(kept_in.iterdir(), key=lambda path: path.stat().st_mtime)
    for path in older[: max(0, len(older) - MAX_KEPT_LOGS + 1)]:
        shutil.rmtree(path, ignore_errors=True)
    kept = Path(shutil.copytree(directory.logs, kept_in / directory.path.name))
    return f"{message} (logs: {kept})"
