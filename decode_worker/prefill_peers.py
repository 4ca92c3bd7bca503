"""The prefill workers that this decode worker knows: from membership, ahead of any request, or from a placement.

Connecting ahead means that a pair that does not fit is refused before the first request needs it, and that the first
request does not pay for the handshake. Of many prefill workers only those are connected to that requests name, and
links that are not needed any more are closed: N x M links would cost each side a ring, a thread and pings for peers
that it hardly ever meets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
from tandem.v1 import common_pb2, membership_pb2, worker_pb2

from cluster.errors import WorkerUnavailable
from cluster.identity import Incarnation, WorkerId
from cluster.membership_state import ChangeKind, MembershipChange
from decode_worker.peer_link import Handshake, PeerResources, PeerState, PeerTiming
from decode_worker.prefill_peer import PrefillPeer

# What a request waits for a peer that is just connecting: the handshake with its link probe, not a dead host.
CONNECT_WAIT_S = 1.0
# A decode worker that is told of more than this has a membership that is wrong.
MAX_PEERS = 4096
# So many prefill workers are connected to ahead of any request; of more only those that requests name.
MAX_AHEAD = 8


class PrefillPeers:
    """Owns every `PrefillPeer` of the worker. Used on the event loop only."""

    def __init__(
        self,
        open_channel: Callable[[str], grpc.aio.Channel],
        handshake: Handshake,
        load_report: Callable[[], worker_pb2.LoadReport],
        timing: PeerTiming | None = None,
    ) -> None:
        self._resources = PeerResources(
            open_channel, handshake, load_report, timing or PeerTiming(), lambda: len(self._peers) <= MAX_AHEAD
        )
        self._peers: dict[WorkerId, PrefillPeer] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def ready(
        self, worker_id: WorkerId, incarnation: Incarnation, address: str, wait_s: float = CONNECT_WAIT_S
    ) -> PrefillPeer:
        """A connected peer. Raises `WorkerUnavailable` when it is refused, in back-off, or too slow to connect."""
        peer = self._known(worker_id, address)
        peer.expect_incarnation(incarnation)
        await peer.ready(wait_s)
        return peer

    def on_membership(self, change: MembershipChange) -> None:
        """Connects to prefill workers as they appear and forgets them when they leave."""
        record = change.record
        if record.identity.role != common_pb2.WORKER_ROLE_PREFILL:
            return
        worker_id = WorkerId(record.identity.worker_id)
        if change.kind is ChangeKind.LEFT:
            if worker_id in self._peers:
                self._peers[worker_id].retire()
        elif record.ready:
            self._known(worker_id, record.control_address).expect_incarnation(Incarnation(record.identity.incarnation))

    def refused(self) -> list[membership_pb2.RefusedPeer]:
        """The peers that do not fit, with the field's name: routers never pair them with this worker."""
        return [
            membership_pb2.RefusedPeer(
                worker_id=peer.worker_id, incarnation=peer.refused_incarnation, field=peer.refused_field
            )
            for peer in self._peers.values()
            if peer.state is PeerState.REFUSED
        ]

    def status(self) -> list[worker_pb2.PeerStatus]:
        """Of those that there is, or shall be, a link to."""
        without = (PeerState.CLOSED, PeerState.IDLE)
        return [peer.status() for peer in self._peers.values() if peer.state not in without]

    async def close(self) -> None:
        for worker_id in list(self._peers):
            self._forget(worker_id)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _known(self, worker_id: WorkerId, address: str) -> PrefillPeer:
        peer = self._peers.get(worker_id)
        if peer is not None and peer.address == address and peer.state is not PeerState.CLOSED:
            return peer
        if peer is not None:
            self._forget(worker_id)
        # Those that left the cluster make room: names of an autoscaled pool come and go for ever.
        self._peers = {key: known for key, known in self._peers.items() if known.state is not PeerState.CLOSED}
        if len(self._peers) >= MAX_PEERS:
            raise WorkerUnavailable(f"{MAX_PEERS} prefill workers are known already", stage="prefill")
        peer = PrefillPeer(worker_id, address, self._resources)
        self._peers[worker_id] = peer
        return peer

    def _forget(self, worker_id: WorkerId) -> None:
        peer = self._peers.pop(worker_id, None)
        if peer is not None:
            task = asyncio.create_task(peer.close(), name=f"close peer {worker_id}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
