"""`/statusz`: every worker's own status, asked for at this moment, with what the router knows beside it.

A worker that does not answer in time is listed with what the router knows of it. Field names are those of
`tandem.v1.WorkerStatus`; 64-bit numbers are numbers.
"""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any

import grpc
from google.protobuf.message import Message
from tandem.v1 import membership_pb2, worker_pb2, worker_pb2_grpc

from cluster.errors import ClientError, WorkerUnavailable, shown
from cluster.identity import WorkerId
from cluster.rpc import open_channel
from cluster.rpc_errors import from_rpc_error
from cluster.rpc_security import RpcSecurity
from cluster.telemetry import RouterMetrics
from router.cache_view import CacheView
from router.generation_service import GenerationService
from router.slow_start import share_of
from router.worker_registry import WorkerRegistry
from router.worker_state import Role, WorkerState

STATUS_TIMEOUT_S = 2.0
KNOWN_STATES = ("ready", "starting", "draining", "unreachable")
SILENT = "silent"  # did not answer just now


class UnknownWorker(ClientError):
    """No worker of that name is in the cluster."""

    code = "worker_not_found"
    http_status = 404
    grpc_status = grpc.StatusCode.NOT_FOUND


class ClusterStatus:
    """Gathers the status of all workers."""

    def __init__(
        self,
        registry: WorkerRegistry,
        service: GenerationService,
        security: RpcSecurity,
        cache_view: CacheView | None,
    ) -> None:
        self._cache_view = cache_view
        self._registry = registry
        self._service = service
        self._security = security

    def pools(self) -> dict[str, int]:
        """How many workers of each role a request could be placed on now."""
        roles = [state.role.value for state, _ in self._registry.workers if state.is_routable]
        return {role: roles.count(role) for role in sorted(set(roles))}

    async def read(self) -> dict[str, Any]:
        """The whole cluster as one JSON object."""
        workers = await asyncio.gather(*(self._worker(state, record) for state, record in self._registry.workers))
        roles = [worker["role"] for worker in workers]
        return {
            "model": self._service.limits.model_name,
            "max_model_len": self._service.limits.max_model_len,
            "policy": self._service.policy_name,
            "ready": self._registry.is_ready,
            "running_requests": self._service.num_running,
            "admission": self._service.admission.status(),
            "pools": {role: roles.count(role) for role in sorted(set(roles))},
            "workers": sorted(workers, key=lambda worker: (worker["role"], worker["worker_id"])),
            "fallbacks": [
                {
                    "component": fallback.component,
                    "wanted": fallback.wanted,
                    "used": fallback.used,
                    "reason": fallback.reason,
                    "count": count,
                }
                for fallback, count in self._service.metrics.fallbacks
            ],
            "prefix_index": None if self._cache_view is None else self._cache_view.status(),
            "block_conservation_error": sum(abs(worker["block_conservation_error"]) for worker in workers),
        }

    async def drain(self, worker_id: WorkerId) -> int:
        """Tells a worker to end when it is idle; how many requests it still has.

        Raises `UnknownWorker`, or `WorkerUnavailable` when it does not answer.
        """
        state = next((state for state, _ in self._registry.workers if state.worker_id == worker_id), None)
        if state is None:
            raise UnknownWorker(f"no worker {shown(worker_id)}; `tandem status` lists them", param="worker_id")
        try:
            async with open_channel(state.control_address, self._security) as channel:
                stub = worker_pb2_grpc.WorkerAdminStub(channel)
                answer = await stub.Drain(worker_pb2.DrainRequest(), timeout=STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise WorkerUnavailable(f"worker {worker_id} does not answer: {from_rpc_error(error).message}") from None
        return int(answer.in_flight)

    async def _worker(self, state: WorkerState, record: membership_pb2.WorkerRecord) -> dict[str, Any]:
        try:
            async with open_channel(state.control_address, self._security) as channel:
                stub = worker_pb2_grpc.WorkerAdminStub(channel)
                status = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=STATUS_TIMEOUT_S)
                is_answering = True
        except grpc.aio.AioRpcError:
            status = worker_pb2.WorkerStatus(model=record.model, load=state.load)
            is_answering = False
        fields = as_json(status)
        fields.pop("identity")
        return {
            "worker_id": state.worker_id,
            "incarnation": state.incarnation,
            "role": state.role.value,
            "state": _state_of(state) if is_answering else SILENT,
            "circuit": state.circuit.position.value,
            "share": share_of(state.joined_s, time.monotonic()),
            **fields,
            "booked": {
                "requests": state.booked_requests,
                "prefill_tokens": state.booked_prefill_tokens,
                "kv_tokens": state.booked_kv_tokens,
            },
        }


def as_json(message: Message) -> dict[str, Any]:
    """Every field of a message, absent ones with their defaults, 64-bit numbers as numbers."""
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            fields[field.name] = dict(value)
        elif field.is_repeated:
            fields[field.name] = [as_json(item) if kind is not None else item for item in value]
        elif kind is not None:
            fields[field.name] = as_json(value)
        else:
            fields[field.name] = value.hex() if isinstance(value, bytes) else value
    return fields


def watch_workers(series: RouterMetrics, registry: WorkerRegistry, model: str) -> None:
    """The gauge of known workers; they are counted when somebody asks for it."""

    def count(role: Role, name: str) -> int:
        return sum(state.role is role and _state_of(state) == name for state, _ in registry.workers)

    for role in Role:
        for name in KNOWN_STATES:
            series.workers.labels(model, role.value, name).set_function(functools.partial(count, role, name))


def _state_of(state: WorkerState) -> str:
    """As far as the router knows it without asking."""
    if state.load.draining:
        return "draining"
    if not state.is_ready:
        return "starting"
    return "ready" if state.is_connected else "unreachable"
