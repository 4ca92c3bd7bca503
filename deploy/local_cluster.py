"""A whole cluster on this machine from start to end: model, runtime directory, processes, signals, clean-up.

`run_cluster` is what `tandem serve` and `tandem generate --start` do; they differ in what they do while it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from cluster.ended_tasks import end_tasks
from cluster.errors import StartupError
from cluster.model_files import check_model, resolve_model, tandem_home
from cluster.process_guard import StopSignals
from cluster.racing_tasks import first_of
from deploy.autoscaled_pools import AutoscaledPools
from deploy.cluster_plan import ClusterPlan, plan_cluster, role_of
from deploy.config import ClusterConfig
from deploy.launcher import Launcher, LocalLauncher
from deploy.node_addresses import NodeAddresses
from deploy.process_spec import ProcessSpec, Stage
from deploy.runtime_dir import RuntimeDirectory, default_base
from deploy.supervised_process import SupervisedProcess
from deploy.supervisor import Supervisor

# Logs of failed runs that are kept for a look.
MAX_KEPT_LOGS = 10
# The router reads membership twice a second and then connects: a second, or many of them on a machine that is busy.
COMPLETE_TIMEOUT_S = 60.0
COMPLETE_POLL_S = 0.05


class ClusterFailed(Exception):
    """The cluster served and then could not go on. The message is one line."""


class ClusterDisplay(Protocol):
    """Who is told how it goes."""

    def planned(self, plan: ClusterPlan) -> None: ...

    def changed(self, process: SupervisedProcess) -> None: ...

    def ready(self, plan: ClusterPlan, logs: Path) -> None:
        """It serves; `logs`: where its processes on this machine write theirs."""
        ...

    def stopping(self) -> None: ...


MakeLauncher = Callable[[Path, ClusterPlan], Launcher]


def _on_this_machine(logs: Path, _: ClusterPlan) -> Launcher:
    return LocalLauncher(logs)


async def run_cluster(
    config: ClusterConfig,
    display: ClusterDisplay,
    while_serving: Callable[[ClusterPlan], Awaitable[None]],
    make_launcher: MakeLauncher = _on_this_machine,
    signals: StopSignals | None = None,
    nodes: NodeAddresses | None = None,
    run: str = "",
) -> None:
    """Starts the cluster, runs `while_serving` to its end or until a signal, stops everything, removes every trace.

    What an earlier supervisor of the same `run` left running, where the launcher finds any, is taken over as it is.

    `signals`: what stops it; None: this process's SIGTERM and SIGINT, which takes the main thread.
    `nodes`: the launcher puts workers on machines of their own; None: all of it is on this one.
    `run`: one life of the cluster, over several supervisors of it; empty: this one's alone.
    Raises `StartupError` when it cannot start, `ClusterFailed` when it cannot go on; the logs are kept for both.
    """
    model = resolve_model(config.model)
    check_model(model)
    is_ours = signals is None
    signals = signals or StopSignals()
    if is_ours:
        signals.install()
    directory = RuntimeDirectory.create(default_base(), run)
    try:
        plan = plan_cluster(config, model, directory.path, nodes)
        pools = AutoscaledPools.of(config, plan, directory.path.name)
        display.planned(plan)
        launcher = make_launcher(directory.logs, plan)
        running = await launcher.find_running()
        supervisor = Supervisor(processes_of(config, plan, running), launcher, display.changed)
        try:
            if running:
                supervisor.resume()
            else:
                await _start(supervisor, plan, signals)
            if not signals.drain.is_set():
                display.ready(plan, directory.logs)
                await _serve(supervisor, plan, pools, signals, while_serving)
        finally:
            display.stopping()
            await _stop(supervisor, signals)
    except StartupError as error:
        raise StartupError(_with_logs(error.message, directory)) from None
    except ClusterFailed as error:
        raise ClusterFailed(_with_logs(str(error), directory)) from None
    finally:
        directory.remove()
        if is_ours:
            signals.remove()


def processes_of(config: ClusterConfig, plan: ClusterPlan, running: frozenset[str]) -> tuple[ProcessSpec, ...]:
    """The plan's; of pools that follow the traffic those workers that there are, and the plan's where there is none."""
    if config.autoscale is None or not running:
        return plan.processes
    planned = {spec.name for spec in plan.processes}
    alive = {role_of(name) for name in running}
    kept = (
        spec
        for spec in plan.processes
        if spec.stage is not Stage.WORKER or spec.name in running or role_of(spec.name) not in alive
    )
    more = (plan.make_worker(role, name) for name in sorted(running - planned) if (role := role_of(name)) is not None)
    return (*kept, *more)


async def _start(supervisor: Supervisor, plan: ClusterPlan, signals: StopSignals) -> None:
    async def start() -> None:
        await supervisor.start()
        await first_of(_wait_until_complete(plan), _raise_failure(supervisor))

    await first_of(start(), _asked_to_stop(signals))


async def _serve(
    supervisor: Supervisor,
    plan: ClusterPlan,
    pools: AutoscaledPools | None,
    signals: StopSignals,
    while_serving: Callable[[ClusterPlan], Awaitable[None]],
) -> None:
    async def serve() -> None:
        await while_serving(plan)

    steps = [serve(), _raise_failure(supervisor), _asked_to_stop(signals)]
    if pools is not None:
        steps.append(pools.run(supervisor))
    await first_of(*steps)


async def _wait_until_complete(plan: ClusterPlan) -> None:
    """A worker that dies just now does not hold the start up for ever: the router serves without it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(COMPLETE_TIMEOUT_S):
            while not await plan.is_complete():  # noqa: ASYNC110  another process has no event to set
                await asyncio.sleep(COMPLETE_POLL_S)


async def _raise_failure(supervisor: Supervisor) -> None:
    raise ClusterFailed(await supervisor.wait_for_failure())


async def _asked_to_stop(signals: StopSignals) -> None:
    await signals.drain.wait()


async def _stop(supervisor: Supervisor, signals: StopSignals) -> None:
    """Drains; a second signal kills."""
    stop = asyncio.create_task(supervisor.stop(), name="stop-cluster")
    impatient = asyncio.create_task(signals.stop_now.wait(), name="stop-now-asked")
    try:
        await asyncio.wait((stop, impatient), return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            supervisor.kill()
        await stop
    finally:
        await end_tasks(impatient)


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
