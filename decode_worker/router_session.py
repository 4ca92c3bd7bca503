"""One router's stream from the side of the requests: where flows hand their outputs, and who ends when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tandem.v1 import worker_pb2

from cluster.errors import TandemError, to_failure
from cluster.identity import RequestId
from decode_worker.live_requests import LiveRequests
from decode_worker.request_flow import RequestFlow
from decode_worker.session_outbox import SessionOutbox
from decode_worker.step_tokens import StepEntry, pack_step


class RouterSession:
    """One router's stream. Flows hand their outputs to it."""

    def __init__(self, router_id: str, live: LiveRequests, load_report: Callable[[], worker_pb2.LoadReport]) -> None:
        self.router_id = router_id
        self._live = live
        self.outbox = SessionOutbox()
        self.tasks: dict[RequestFlow, asyncio.Task[None]] = {}
        self._load_report = load_report

    def send_step(self, entries: Sequence[StepEntry]) -> None:
        """The share of this router in one engine step, as one message."""
        self.outbox.put(pack_step(entries, self._load_report()))

    def send_failure(self, request_id: RequestId, fence: int, error: TandemError) -> None:
        failed = worker_pb2.RequestFailed(request_id=request_id, fence=fence, failure=to_failure(error))
        self.outbox.put(worker_pb2.DecodeMessage(failed=failed))

    def start(self, flow: RequestFlow) -> None:
        task = asyncio.create_task(flow.run(), name=f"request {flow.request.engine_id}")
        self.tasks[flow] = task
        task.add_done_callback(lambda _: self._ended(flow))

    def _ended(self, flow: RequestFlow) -> None:
        self.tasks.pop(flow, None)
        self._live.leave(flow)

    async def abort_all(self, reason: str) -> None:
        """Ends every request of this session and waits until each has given its blocks back."""
        tasks = list(self.tasks.values())
        for flow in list(self.tasks):
            flow.cancel(reason)
        await asyncio.gather(*tasks, return_exceptions=True)
