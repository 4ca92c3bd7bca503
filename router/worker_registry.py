"""The workers a router can use: membership's records joined with the state of our own links to them.

    membership ──JOINED, UPDATED, RESTARTED, LEFT──> WorkerRegistry ──> WorkerState + link for each incarnation
    links: decode and aggregated workers a `WorkerSession`, prefill workers a `PrefillLink` (connectivity only)

A broken link makes a worker unroutable at once, whatever Redis still says; Redis is never on a request's way.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import zlib
from collections.abc import Callable, Iterator

import grpc
from tandem.v1 import membership_pb2, worker_pb2

from cluster.block_hash import HashScope
from cluster.ended_tasks import end_tasks
from cluster.identity import WorkerId
from cluster.membership_state import ChangeKind, MembershipChange
from cluster.rpc import open_channel
from cluster.rpc_security import RpcSecurity
from router.placement import ClusterSnapshot
from router.worker_session import WorkerSession
from router.worker_state import WorkerState, state_from_record, update_from_record

_log = logging.getLogger(__name__)


class PrefillLink:
    """Watches the connection to a prefill worker: requests never go over it, its loss tells that the worker is gone."""

    def __init__(self, worker: WorkerState, security: RpcSecurity, on_link_change: Callable[[], None]) -> None:
        self.worker = worker
        self._security = security
        self._on_link_change = on_link_change
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name=f"link {self.worker.worker_id}")

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None
        self._set(False)

    async def _watch(self) -> None:
        async with open_channel(self.worker.control_address, self._security) as channel:
            while True:
                state = channel.get_state(try_to_connect=True)
                self._set(state is grpc.ChannelConnectivity.READY)
                await channel.wait_for_state_change(state)

    def _set(self, is_connected: bool) -> None:
        if self.worker.is_connected != is_connected:
            self.worker.is_connected = is_connected
            self._on_link_change()


Link = WorkerSession | PrefillLink


def turn_of(router_id: str) -> int:
    """At which of several equal workers a router begins: router-3 at the fourth one, a name without a number anywhere.

    Routers know nothing of each other's bookings. If all began at the first one it would get all of their first
    requests, and as many again whenever they have caught up with each other.
    """
    number = re.search(r"\d{1,9}$", router_id)
    return int(number[0]) if number else zlib.crc32(router_id.encode())


def in_turn(workers: list[WorkerState], turn: int) -> list[WorkerState]:
    """The same workers, beginning with this one."""
    first = turn % len(workers) if workers else 0
    return workers[first:] + workers[:first] if first else workers


class WorkerRegistry:
    """Owned by the router process. `on_membership_change` is given to the membership view."""

    def __init__(
        self,
        hello: worker_pb2.RouterHello,
        security: RpcSecurity,
        *,
        allows_local_prefill: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hello = hello
        self._turn = turn_of(hello.router_id)
        self._security = security
        self.allows_local_prefill = allows_local_prefill
        self._clock = clock
        self._links: dict[WorkerId, Link] = {}
        self._records: dict[WorkerId, membership_pb2.WorkerRecord] = {}
        self._listeners: list[Callable[[], None]] = []
        self._stopping: set[asyncio.Task[None]] = set()
        self._joined: Callable[[WorkerId], None] = _ignore
        self._left: Callable[[WorkerId], None] = _ignore

    def on_change(self, listener: Callable[[], None]) -> None:
        """`listener` is called after a worker joined, left, or its link came up or broke. It must not block."""
        self._listeners.append(listener)

    def on_workers(self, joined: Callable[[WorkerId], None], left: Callable[[WorkerId], None]) -> None:
        """`joined` is called for each new incarnation, `left` when one is dropped. They must not block."""
        self._joined, self._left = joined, left

    def on_membership_change(self, change: MembershipChange) -> None:
        worker_id = WorkerId(change.record.identity.worker_id)
        link = self._links.get(worker_id)
        if change.kind is ChangeKind.LEFT:
            self._retire(worker_id)
        elif link is None or link.worker.incarnation != change.record.identity.incarnation:
            self._drop(worker_id)
            self._add(worker_id, change.record)
        else:
            self._records[worker_id] = change.record
            if isinstance(link, WorkerSession):
                link.is_retired = False
            update_from_record(link.worker, change.record, self._clock())
        self._notify()

    def snapshot(self) -> ClusterSnapshot:
        """Who could take a request now, in this router's own order: ties go by it."""
        prefill: list[WorkerState] = []
        decode: list[WorkerState] = []
        for link in self._links.values():
            worker = link.worker
            if worker.is_routable:
                (decode if worker.generates else prefill).append(worker)
        return ClusterSnapshot(in_turn(prefill, self._turn), in_turn(decode, self._turn), self.allows_local_prefill)

    def session_of(self, worker: WorkerState) -> WorkerSession:
        """The stream to a decode or aggregated worker of the last snapshot."""
        link = self._links[worker.worker_id]
        if not isinstance(link, WorkerSession):
            raise TypeError(f"worker {worker.worker_id} generates nothing")
        return link

    @property
    def workers(self) -> Iterator[tuple[WorkerState, membership_pb2.WorkerRecord]]:
        """Everyone known, routable or not."""
        return ((link.worker, self._records[worker_id]) for worker_id, link in list(self._links.items()))

    @property
    def is_ready(self) -> bool:
        """Whether a request could be served now."""
        return self.snapshot().can_serve

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block; the same on all workers of a cluster."""
        return next((link.worker.block_tokens for link in self._links.values()), 0)

    def hash_scope(self, scope_key: bytes) -> HashScope | None:
        """What seeds the workers' block hashes; None while no worker is known."""
        for worker_id, record in self._records.items():
            return HashScope(scope_key, record.model_fingerprint, self._links[worker_id].worker.block_tokens)
        return None

    def max_capacity_tokens(self) -> int:
        """The largest KV pool of a known decode worker, in tokens; 0: none has said yet."""
        return max((link.worker.capacity_tokens for link in self._links.values() if link.worker.generates), default=0)

    async def stop(self) -> None:
        """Ends every link."""
        for worker_id in list(self._links):
            self._drop(worker_id)
        await asyncio.gather(*self._stopping, return_exceptions=True)

    def _add(self, worker_id: WorkerId, record: membership_pb2.WorkerRecord) -> None:
        worker = state_from_record(record, self._clock())
        if worker is None:
            _log.warning("a worker has a role that this router does not know", extra={"peer": worker_id})
            return
        link: Link
        if worker.generates:
            link = WorkerSession(worker, self._hello, self._security, self._notify, self._clock)
        else:
            link = PrefillLink(worker, self._security, self._notify)
        self._links[worker_id] = link
        self._records[worker_id] = record
        self._joined(worker_id)
        link.start()

    def _retire(self, worker_id: WorkerId) -> None:
        """It takes no new requests. A stream that still stands goes on: a lost heartbeat must not end an answer."""
        link = self._links.get(worker_id)
        if isinstance(link, WorkerSession) and link.worker.is_connected:
            link.worker.is_ready = False
            link.is_retired = True
        else:
            self._drop(worker_id)

    def _drop(self, worker_id: WorkerId) -> None:
        link = self._links.pop(worker_id, None)
        self._records.pop(worker_id, None)
        if link is None:
            return
        link.worker.is_ready = False
        self._left(worker_id)
        task = asyncio.create_task(link.stop(), name=f"stop link {worker_id}")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def _notify(self) -> None:
        for worker_id, link in list(self._links.items()):
            if isinstance(link, WorkerSession) and link.is_over:
                self._drop(worker_id)
        for listener in self._listeners:
            listener()


def _ignore(_: WorkerId) -> None:
    """Nobody asked to hear of it."""
