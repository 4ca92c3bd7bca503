"""The requests of this worker that have not ended, by name, with the fence that tells a placement from its zombie.

A router numbers the placements of one request (`fence`). The highest number seen here is the request; a lower one is
a message of the past. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from cluster.errors import InvalidRequest
from cluster.identity import RequestId

if TYPE_CHECKING:
    from decode_worker.request_flow import RequestFlow

# Fences of ended requests are kept this long: a late, reordered submit of an older placement is still recognised.
MAX_REMEMBERED_FENCES = 8192


class LiveRequests:
    """Owned by the worker; a flow enters before it runs and leaves when it has given everything back."""

    def __init__(self, are_under_way: Callable[[bool], None]) -> None:
        """`are_under_way` is told whether there are any, whenever that may have changed."""
        self._are_under_way = are_under_way
        self._by_request: dict[RequestId, RequestFlow] = {}
        self._by_engine_id: dict[RequestId, RequestFlow] = {}
        self._fences: OrderedDict[RequestId, int] = OrderedDict()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def __len__(self) -> int:
        return len(self._by_engine_id)

    def enter(self, flow: RequestFlow) -> None:
        """Raises `InvalidRequest` for a placement that is not newer than one seen before. An older placement of the
        same request that still runs here is cancelled: its router has given it up."""
        request = flow.request
        last_fence = self._fences.get(request.request_id)
        if last_fence is not None and request.fence <= last_fence:
            raise InvalidRequest(
                f"request {request.request_id}: fence {request.fence} is not above {last_fence}, seen before",
                param="fence",
                code="stale_fence",
            )
        older = self._by_request.get(request.request_id)
        if older is not None:
            older.cancel("a newer placement of this request arrived")
        self._remember_fence(request.request_id, request.fence)
        self._by_request[request.request_id] = flow
        self._by_engine_id[request.engine_id] = flow
        self._is_idle.clear()
        self._are_under_way(True)

    def leave(self, flow: RequestFlow) -> None:
        request = flow.request
        self._by_engine_id.pop(request.engine_id, None)
        if self._by_request.get(request.request_id) is flow:
            del self._by_request[request.request_id]
        if not self._by_engine_id:
            self._is_idle.set()
            self._are_under_way(False)

    def of_engine(self, engine_id: RequestId) -> RequestFlow | None:
        """The flow that an engine output belongs to; None when it has ended."""
        return self._by_engine_id.get(engine_id)

    def current(self, request_id: RequestId, fence: int) -> RequestFlow | None:
        """The flow of this very placement; None for an older or unknown one."""
        flow = self._by_request.get(request_id)
        return flow if flow is not None and flow.request.fence == fence else None

    def all(self) -> list[RequestFlow]:
        return list(self._by_engine_id.values())

    async def wait_until_idle(self) -> None:
        """Returns once every request has ended and given its blocks back."""
        await self._is_idle.wait()

    def _remember_fence(self, request_id: RequestId, fence: int) -> None:
        self._fences[request_id] = fence
        self._fences.move_to_end(request_id)
        while len(self._fences) > MAX_REMEMBERED_FENCES:
            self._fences.popitem(last=False)
