"""All attempts of this worker to get KV, and the ends that frames arrive at.

Also this worker's side of the handshake: each connection gets its own nonce, which is void when the stream ends.
"""

from __future__ import annotations

from tandem.v1 import handoff_pb2

from cluster.errors import TandemError
from cluster.worker_counters import WorkerCounters
from decode_worker.kv_arrival import ArrivalFailed, ArrivalRejected, KvArrival, Landed, LandingGate, TransferPeer
from decode_worker.request_check import AcceptedRequest
from decode_worker.request_timeline import RequestTimeline
from decode_worker.reservations import Reservation
from kv_transfer.endpoints import ReceivingEnds
from kv_transfer.hello import HandoffIdentity, make_hello
from kv_transfer.landing_table import LandingTable
from kv_transfer.transfer_ref import TransferRef


class KvArrivals:
    """Owned by the node. Implements `prefill_peer.Handshake`."""

    def __init__(
        self, identity: HandoffIdentity, table: LandingTable, ends: ReceivingEnds, max_credit_bytes: int
    ) -> None:
        self._identity = identity
        self._table = table
        self._gate = LandingGate(table, identity.layout)
        self._ends = ends
        self._max_credit_bytes = max_credit_bytes
        self._live: dict[TransferRef, Reservation] = {}

    # --- attempts -----------------------------------------------------------------------------------------------------

    async def fetch(
        self,
        ref: TransferRef,
        peer: TransferPeer,
        request: AcceptedRequest,
        reservation: Reservation,
        timeline: RequestTimeline,
    ) -> Landed:
        """The prompt's KV, verified, in the reservation's blocks. Raises `ArrivalRejected` (the reservation is whole)
        or `ArrivalFailed` (it is given away); so does a cancelled caller leave it."""
        arrival = KvArrival(ref, peer, request, reservation, self._gate, timeline)
        self._live[ref] = reservation
        try:
            return await arrival.receive()
        except ArrivalRejected:
            arrival.withdraw()
            raise
        except TandemError as error:
            arrival.abandon(error.message)
            raise ArrivalFailed(error) from error
        except BaseException:
            arrival.abandon("the request ended")
            raise
        finally:
            del self._live[ref]

    @property
    def num_active(self) -> int:
        return len(self._live)

    @property
    def reserved_blocks(self) -> int:
        """Blocks that wait for their KV."""
        return sum(len(reservation.fresh) for reservation in self._live.values())

    def counters(self) -> dict[str, float]:
        counts = self._table.counts()
        return {
            "kv_frames_received": float(counts.frames),
            "kv_bytes_received": float(counts.num_bytes),
            "kv_stale_frames": float(counts.stale_frames),
            "kv_bad_digests": float(counts.bad_digests),
            "kv_refused_frames": float(counts.refused_frames),
        }

    def show(self, counters: WorkerCounters) -> None:
        """Brings the metrics of what was dropped up to date; called at every heartbeat."""
        counts = self._table.counts()
        counters.show_arrivals(counts.stale_frames, counts.bad_digests)

    # --- handshake ----------------------------------------------------------------------------------------------------

    def hello(self, peer: str) -> handoff_pb2.Hello:
        return make_hello(self._identity, self._ends.offers(), self._ends.new_session(peer), self._max_credit_bytes)

    def goodbye(self, hello: handoff_pb2.Hello) -> None:
        self._ends.gate.revoke(hello.session_nonce)

    def mismatches(self, answer: handoff_pb2.HelloAck) -> list[handoff_pb2.Mismatch]:
        if answer.accepted:
            return []
        fatal = [mismatch for mismatch in answer.mismatches if mismatch.fatal]
        if fatal:
            return fatal
        return [handoff_pb2.Mismatch(field="transports", mine=answer.transport_reason, yours="none works", fatal=True)]

    def close(self) -> None:
        """Afterwards nothing writes into the pool any more."""
        self._ends.close()
