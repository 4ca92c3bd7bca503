"""Workers as Ray actors, each in a place that Ray has reserved; Redis and router stay beside the controller.

    Supervisor ──launch(spec)──> RayLauncher ──actor──> ProcessHost on some node ──child──> python -m decode_worker

The first workers share one placement group, packed or spread; later ones are placed one by one. A node or an actor that
dies looks like a process that was killed: the supervisor starts it again, where Ray still has room.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.errors import StartupError
from deploy.config import RayConfig
from deploy.launcher import LaunchedProcess, LocalLauncher
from deploy.node_addresses import NodeAddresses
from deploy.process_spec import ProcessSpec, Stage
from deploy.ray_nodes import NodeRequests, RequestNodes, request_ray_nodes
from deploy.ray_process_host import ProcessHost

KILLED = -9

_log = logging.getLogger(__name__)


class RayLauncher:
    """Owned by the controller. `close` gives the reserved places back."""

    def __init__(
        self,
        log_directory: Path,
        config: RayConfig,
        workers: Sequence[ProcessSpec],
        model: str = "",
        nodes: NodeAddresses | None = None,
        request_nodes: RequestNodes = request_ray_nodes,
    ) -> None:
        """`workers`: the first ones; their places are reserved together.

        `nodes`: told where each worker listens when the nodes are machines of their own, which find `model` themselves.
        """
        self._logs = log_directory
        self._config = config
        self._model = model
        self._nodes = nodes
        self._node_requests = NodeRequests(request_nodes)
        self._local = LocalLauncher(log_directory)
        self._places = {spec.name: index for index, spec in enumerate(workers)}
        self._group: PlacementGroup | None = None
        bundles = [_bundle(self._resources(spec.name)) for spec in workers]
        if bundles:
            self._group = placement_group(bundles, strategy=config.strategy.upper())

    async def launch(self, spec: ProcessSpec) -> LaunchedProcess:
        """Raises `StartupError` when no node has room in time, or the node cannot run it."""
        if spec.stage is not Stage.WORKER:
            return await self._local.launch(spec)
        self._node_requests.want(spec.name, _bundle(self._resources(spec.name)))
        try:
            process = await self._launch_actor(spec)
        except BaseException:
            self._node_requests.release(spec.name)
            raise
        process.on_exit(lambda: self._node_requests.release(spec.name))
        return process

    async def _launch_actor(self, spec: ProcessSpec) -> _RayProcess:
        host = _actor_class().options(**self._options(spec.name)).remote()
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                pid = await self._start(host, spec)
        except TimeoutError:
            _end(host)
            raise StartupError(
                f"{spec.name}: no node had {self._resources(spec.name) or 'room'} within {spec.start_timeout_s:.0f} s"
            ) from None
        except RayTaskError as error:
            _end(host)
            raise StartupError(f"{spec.name}: {error.cause}") from None
        except RayActorError:
            return _RayProcess(host, 0)  # it died at once: `wait` says so, and the supervisor tries again
        except asyncio.CancelledError:
            _end(host)
            raise
        return _RayProcess(host, pid)

    async def _start(self, host: Any, spec: ProcessSpec) -> int:
        command, environment = list(spec.command), json.dumps(dict(spec.environment))
        if self._nodes is None:
            return int(await host.start.remote(spec.name, command, environment, str(self._logs)))
        pid, target = await host.start_on_node.remote(spec.name, command, environment, self._model)
        self._nodes.assign(spec.name, target)
        return int(pid)

    async def close(self) -> None:
        await self._node_requests.close()
        if self._group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)

    def _options(self, name: str) -> dict[str, Any]:
        """How Ray places the actor: in its bundle of the group, or by the same strategy alone."""
        resources = dict(self._resources(name))
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_restarts": 0,  # the supervisor restarts: it knows about crash loops
            "scheduling_strategy": "SPREAD" if self._config.strategy == "spread" else "DEFAULT",
        }
        index = self._places.get(name)
        if index is not None and self._group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
        return options

    def _resources(self, name: str) -> Mapping[str, float]:
        by_role = {"prefill": self._config.prefill_resources, "decode": self._config.decode_resources}
        return by_role.get(name.rpartition("-")[0], self._config.aggregated_resources)


class _RayProcess:
    """One actor with its child, as the supervisor sees it."""

    def __init__(self, host: Any, pid: int) -> None:
        self.pid = pid
        self._host = host
        self._exited = asyncio.ensure_future(self._wait())
        self._tail: list[str] = []

    def on_exit(self, call: Callable[[], None]) -> None:
        self._exited.add_done_callback(lambda _: call())

    async def wait(self) -> int:
        return await asyncio.shield(self._exited)

    def terminate(self) -> None:
        self._host.terminate.remote()

    def kill(self) -> None:
        """The child dies with the actor, whose process Ray ends."""
        _end(self._host)

    def last_lines(self, count: int) -> list[str]:
        return self._tail[-count:]

    async def _wait(self) -> int:
        try:
            status, self._tail = await self._host.wait.remote()
        except RayError as error:
            _log.warning("an actor is gone", extra={"reason": type(error).__name__})
            return KILLED
        return int(status)


def _actor_class() -> Any:
    return ray.remote(ProcessHost)


def _bundle(resources: Mapping[str, float]) -> dict[str, float]:
    # A bundle must ask for something: a sliver of a CPU is what the actor itself needs.
    return dict(resources) or {"CPU": 0.01}


def _end(host: Any) -> None:
    with contextlib.suppress(RayError):
        ray.kill(host, no_restart=True)
