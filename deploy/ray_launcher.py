"""Every process of a cluster as the child of a Ray actor: workers where Ray has reserved places, the rest on the head.

    Supervisor ──launch(spec)──> RayLauncher ──actor──> ProcessHost on some node ──child──> python -m decode_worker

The actors outlive the controller. The next one finds them by name (`find_running`) and takes them over: a running child
is given back by `launch` as if it had just been started, one that drains goes on draining, the rest is ended.

The first workers share one placement group, packed or spread; later ones are placed one by one. A node or an actor that
dies looks like a process that was killed: the supervisor starts it again, where Ray still has room.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.ended_tasks import end_tasks
from cluster.errors import StartupError
from deploy.config import RayConfig
from deploy.launcher import LaunchedProcess
from deploy.node_addresses import NodeAddresses
from deploy.process_spec import ProcessSpec, Stage
from deploy.ray_hosts import HostName, end, find_hosts, reserve_places
from deploy.ray_nodes import NodeRequests, RequestNodes, request_ray_nodes
from deploy.ray_process_host import HostState, ProcessHost

KILLED = -9
FIND_TIMEOUT_S = 10.0
# Where clients look for the router, and Redis' socket is.
ON_HEAD = {"node:__internal_head__": 0.001}

_log = logging.getLogger(__name__)


class RayLauncher:
    """Owned by the controller. What it launched outlives it; `close` takes back only what it asked of Ray."""

    def __init__(
        self,
        run: str,
        log_directory: Path,
        config: RayConfig,
        workers: Sequence[ProcessSpec],
        model: str = "",
        nodes: NodeAddresses | None = None,
        request_nodes: RequestNodes = request_ray_nodes,
    ) -> None:
        """`run` is in every actor's name. `workers`: the first ones; their places are reserved together.

        `nodes`: told where each worker listens when the nodes are machines of their own, which find `model` themselves.
        """
        self._run = run
        self._logs = log_directory
        self._config = config
        self._model = model
        self._nodes = nodes
        self._node_requests = NodeRequests(request_nodes)
        self._found: dict[str, _RayProcess] = {}
        self._draining: set[asyncio.Task[None]] = set()
        self._places = {spec.name: index for index, spec in enumerate(workers)}
        bundles = [_bundle(self._resources(spec.name)) for spec in workers]
        self._group = reserve_places(run, bundles, config.strategy.upper()) if bundles else None

    async def find_running(self) -> frozenset[str]:
        """What does not answer in time is ended: it is started again like whatever else is missing."""
        hosts = list(find_hosts(f"{self._run}:"))
        states = await asyncio.gather(*(_state(host) for _, host in hosts))
        for (name, host), state in zip(hosts, states, strict=True):
            if state is None or not state.pid or name.process in self._found:
                end(host)
            elif state.is_ending:
                self._draining.add(asyncio.create_task(_finish(host), name=f"draining-{name.process}"))
            else:
                self._take_over(name.process, host, state)
        _log.info("taken over: %s", ", ".join(sorted(self._found)) or "nothing")
        return frozenset(self._found)

    def _take_over(self, name: str, host: Any, state: HostState) -> None:
        self._found[name] = _RayProcess(host, state.pid)
        if self._nodes is not None and state.target:
            self._nodes.assign(name, state.target)

    async def launch(self, spec: ProcessSpec) -> LaunchedProcess:
        """Raises `StartupError` when no node has room in time, or the node cannot run it."""
        is_worker = spec.stage is Stage.WORKER
        if is_worker:
            self._node_requests.want(spec.name, _bundle(self._resources(spec.name)))
        try:
            process = self._found.pop(spec.name, None) or await self._launch_actor(spec)
        except BaseException:
            self._node_requests.release(spec.name)
            raise
        process.on_exit(lambda: self._node_requests.release(spec.name))
        return process

    async def _launch_actor(self, spec: ProcessSpec) -> _RayProcess:
        name = str(HostName.new(self._run, spec.name))
        options = self._options(spec) | {"name": name, "lifetime": "detached"}
        host = _actor_class().options(**options).remote()
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                pid = await self._start(host, spec)
        except TimeoutError:
            end(host)
            raise StartupError(
                f"{spec.name}: no node had {self._resources(spec.name) or 'room'} within {spec.start_timeout_s:.0f} s"
            ) from None
        except RayTaskError as error:
            end(host)
            raise StartupError(f"{spec.name}: {error.cause}") from None
        except RayActorError:
            end(host)
            return _RayProcess(host, 0)  # it died at once: `wait` says so, and the supervisor tries again
        except BaseException:
            end(host)
            raise
        return _RayProcess(host, pid)

    async def _start(self, host: Any, spec: ProcessSpec) -> int:
        command, environment = list(spec.command), json.dumps(dict(spec.environment))
        if self._nodes is None or spec.stage is not Stage.WORKER:
            return int(await host.start.remote(spec.name, command, environment, str(self._logs)))
        pid, target = await host.start_on_node.remote(spec.name, command, environment, self._model)
        self._nodes.assign(spec.name, target)
        return int(pid)

    async def close(self) -> None:
        await end_tasks(*self._draining)
        await self._node_requests.close()

    def _options(self, spec: ProcessSpec) -> dict[str, Any]:
        """How Ray places the actor: beside the controller, in its bundle of the group, or by the strategy alone."""
        if spec.stage is not Stage.WORKER:
            return {"num_cpus": 0, "resources": ON_HEAD, "max_restarts": 0}
        resources = dict(self._resources(spec.name))
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_restarts": 0,  # the supervisor restarts: it knows about crash loops
            "scheduling_strategy": "SPREAD" if self._config.strategy == "spread" else "DEFAULT",
        }
        index = self._places.get(spec.name)
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
        end(self._host)

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


async def _state(host: Any) -> HostState | None:
    try:
        async with asyncio.timeout(FIND_TIMEOUT_S):
            state: HostState = await host.state.remote()
    except (RayError, TimeoutError):
        return None
    return state


async def _finish(host: Any) -> None:
    """Its worker was asked to drain, and ends by itself in its own time."""
    try:
        await host.wait.remote()
    except RayError as error:
        _log.warning("an actor that drained is gone", extra={"reason": type(error).__name__})
    finally:
        end(host)
