"""The cluster's controller on Ray: a detached actor that supervises, scales, and outlives the command that made it.

It runs the same `run_cluster` as `tandem serve`, with another launcher, on a thread of its own, on the head's node like
router and Redis. When it dies they serve on; Ray makes it anew (`max_restarts`) with the same arguments, and so with
the same runtime directory: it takes over what runs, and starts what has died meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from cluster.errors import StartupError
from cluster.process_guard import StopSignals
from deploy.cluster_plan import ClusterPlan
from deploy.config import ClusterConfig, ray_of_workers
from deploy.launcher import Launcher
from deploy.local_cluster import run_cluster
from deploy.node_addresses import NodeAddresses
from deploy.process_spec import Stage
from deploy.ray_hosts import end_all
from deploy.ray_launcher import RayLauncher
from deploy.supervised_process import SupervisedProcess

STOP_TIMEOUT_S = 180.0


class ClusterController:
    """Lives in a Ray worker process. Its methods are called from other threads than the one that runs the cluster."""

    def __init__(self, config_json: str, run: str) -> None:
        """`run`: names this life of the cluster, in its actors and its directory."""
        self._run_name = run
        self._config = ClusterConfig.model_validate_json(config_json)
        self._hosts_run = f"{self._config.ray.name}/{run}"
        self._nodes = None if self._config.ray.secrets_dir is None else NodeAddresses()
        self._loop = asyncio.new_event_loop()
        self._signals: StopSignals | None = None
        self._ready: Future[ClusterPlan] = Future()
        self._states: dict[str, str] = {}
        self._failure = ""
        self._launcher: RayLauncher | None = None
        self._thread = threading.Thread(target=self._run, name="tandem-cluster", daemon=True)
        self._thread.start()

    def wait_until_ready(self, timeout_s: float) -> dict[str, Any]:
        """Its URL and names. Raises what kept it from starting."""
        plan = self._ready.result(timeout_s)
        return {
            "url": plan.url,
            "grpc_address": plan.grpc_address,
            "model": plan.model_name,
            "summary": plan.summary,
        }

    def status(self) -> dict[str, Any]:
        """Its processes with their states, also while it starts."""
        plan = self._ready.result() if self._ready.done() and self._ready.exception() is None else None
        return {"url": "" if plan is None else plan.url, "failure": self._failure, "processes": dict(self._states)}

    def stop(self) -> str:
        """Drains and ends everything; an empty string, or why the cluster had ended before."""
        signals = self._signals
        if signals is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(signals.signalled)
        self._thread.join(STOP_TIMEOUT_S)
        return self._failure

    # --- on the cluster's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:  # told to whoever asks: there is nobody to raise to on this thread
            self._failure = str(error) or type(error).__name__
        finally:
            end_all(self._hosts_run)  # what could not be taken over, or stopped, shall not stay either
            if not self._ready.done():
                self._ready.set_exception(StartupError(self._failure or "the cluster was stopped while it started"))

    async def _serve(self) -> None:
        self._signals = StopSignals()
        try:
            await run_cluster(
                self._config, self, _for_ever, self._new_launcher, self._signals, self._nodes, self._run_name
            )
        finally:
            if self._launcher is not None:
                await self._launcher.close()

    def _new_launcher(self, logs: Path, plan: ClusterPlan) -> Launcher:
        workers = [spec for spec in plan.processes if spec.stage is Stage.WORKER]
        resources = ray_of_workers(self._config)
        self._launcher = RayLauncher(self._hosts_run, logs, resources, workers, self._config.model, self._nodes)
        return self._launcher

    # --- `ClusterDisplay` ---------------------------------------------------------------------------------------------

    def planned(self, plan: ClusterPlan) -> None:
        self._states = dict.fromkeys((spec.name for spec in plan.processes), "waiting")

    def changed(self, process: SupervisedProcess) -> None:
        self._states[process.spec.name] = process.state.value

    def ready(self, plan: ClusterPlan, logs: Path) -> None:
        self._ready.set_result(plan)

    def stopping(self) -> None:
        """Nobody looks: `stop` returns when it is over."""


async def _for_ever(_: ClusterPlan) -> None:
    await asyncio.Event().wait()
