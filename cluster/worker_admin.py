"""`WorkerAdmin`: what every worker answers about itself, and the two things that an operator may tell it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import grpc.aio
from tandem.v1 import worker_pb2, worker_pb2_grpc


class AdminNode(Protocol):
    """What the admin service needs of a worker."""

    def status(self) -> worker_pb2.WorkerStatus: ...

    def reset_prefix_cache(self) -> int:
        """Forgets every prefix; gives how many blocks that were."""
        ...


class WorkerAdminService(worker_pb2_grpc.WorkerAdminServicer):
    """The servicer of prefill and decode workers alike."""

    def __init__(self, node: AdminNode, ask_to_drain: Callable[[], None]) -> None:
        self._node = node
        self._ask_to_drain = ask_to_drain

    async def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.WorkerStatus:
        return self._node.status()

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DrainResponse:
        """The same as SIGTERM: returns at once, the process ends when nothing is in flight."""
        load = self._node.status().load
        self._ask_to_drain()
        return worker_pb2.DrainResponse(in_flight=load.running_requests + load.waiting_requests)

    async def ResetPrefixCache(
        self, request: worker_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ResetPrefixCacheResponse:
        return worker_pb2.ResetPrefixCacheResponse(dropped_blocks=self._node.reset_prefix_cache())
