"""Ray's own cluster autoscaler is told what shall run, so that it starts nodes for workers and ends those left empty.

A request replaces the one before it and stands until the next, so what is asked for is always the whole of it.
Where Ray has no cluster autoscaler the request is only noted, and nothing comes of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from cluster.ended_tasks import end_tasks

Bundles = list[dict[str, float]]
RequestNodes = Callable[[Bundles], None]

CLOSE_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class NodeRequests:
    """Owned by the launcher; used on its event loop. `close` takes every request back."""

    def __init__(self, request: RequestNodes) -> None:
        """`request` blocks for a call to Ray: it runs on another thread, in order, so that the last one stands."""
        self._request = request
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray-node-requests")
        self._wanted: dict[str, dict[str, float]] = {}
        self._asked: Bundles | None = []  # None: a call was made, and what became of it is not known
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def want(self, worker_id: str, resources: Mapping[str, float]) -> None:
        """The worker shall run, or runs: there must be room for it."""
        self._wanted[worker_id] = dict(resources)
        self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._ask_for_ever(), name="ray-node-requests")

    def release(self, worker_id: str) -> None:
        """The worker has ended; nothing happens when it was not wanted."""
        self._wanted.pop(worker_id, None)
        self._changed.set()

    async def close(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)
            self._wanted.clear()
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._ask()
            except TimeoutError:
                _log.warning("Ray's cluster autoscaler did not answer: what it was asked for may stand until Ray ends")
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _ask_for_ever(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._ask()

    async def _ask(self) -> None:
        """Many changes at once are one request. A Ray that does not answer is asked again at the next change."""
        bundles = [self._wanted[worker_id] for worker_id in sorted(self._wanted)]
        if bundles == self._asked:
            return
        self._asked = None
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._request, bundles)
            self._asked = bundles
        except Exception as error:  # whatever Ray raises: workers run on the nodes that there are
            _log.warning("Ray's cluster autoscaler could not be told what shall run: %s", error)


def request_ray_nodes(bundles: Bundles) -> None:
    """Ray's SDK call."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=bundles)
