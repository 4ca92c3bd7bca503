"""What every prompt's landing of a worker shares: reservations, the ways to prefill workers, the table of frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tandem.v1 import handoff_pb2

from cluster.identity import Incarnation, WorkerId
from cluster.kv_layout import KvLayout
from decode_worker.decode_metrics import DecodeMetrics
from decode_worker.peer_link import PeerLink, TransferListener
from decode_worker.reservations import Reservations
from kv_transfer.landing_table import LandingTable
from kv_transfer.protocol_limits import ProtocolLimits
from kv_transfer.transfer_ref import TransferRef


class TransferPeer(Protocol):
    """The way to one prefill worker (`prefill_peer.PrefillPeer`)."""

    worker_id: WorkerId
    link: PeerLink | None

    def register(self, ref: TransferRef, listener: TransferListener) -> None: ...

    def unregister(self, ref: TransferRef) -> None: ...

    def send(self, message: handoff_pb2.DecodeToPrefill) -> None:
        """Raises `WorkerUnavailable`."""
        ...

    def hang_up(self, link: PeerLink, reason: str) -> None: ...


class TransferPeers(Protocol):
    """Finds the way to a prefill worker (`prefill_peers.PrefillPeers`)."""

    async def ready(
        self, worker_id: WorkerId, incarnation: Incarnation, address: str, wait_s: float = ...
    ) -> TransferPeer:
        """`wait_s`: for a handshake that is going on. Raises `WorkerUnavailable`."""
        ...


@dataclass(frozen=True, slots=True)
class LandingResources:
    """Owned by the node."""

    reservations: Reservations
    peers: TransferPeers
    table: LandingTable
    layout: KvLayout
    metrics: DecodeMetrics
    limits: ProtocolLimits
    max_credit_bytes: int  # of one transfer, as Hello says
