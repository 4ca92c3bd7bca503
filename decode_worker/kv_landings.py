"""All landings of this worker, and the ends that frames arrive at.

Also this worker's side of the handshake: each connection gets its own nonce, which is void when the stream ends.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.v1 import handoff_pb2

from cluster.worker_counters import WorkerCounters
from decode_worker.landing_resources import LandingResources
from decode_worker.prompt_landing import PromptLanding
from decode_worker.request_check import AcceptedRequest
from decode_worker.request_timeline import RequestTimeline
from kv_transfer.endpoints import ReceivingEnds
from kv_transfer.hello import HandoffIdentity, make_hello


class KvLandings:
    """Owned by the node."""

    def __init__(self, resources: LandingResources) -> None:
        self._resources = resources
        self._live: set[PromptLanding] = set()

    def open(self, request: AcceptedRequest, timeline: RequestTimeline) -> PromptLanding:
        """A landing that has not begun. It is kept alive until nothing of it is held or awaited any more."""
        landing = PromptLanding(request, self._resources, timeline, self._live.discard)
        self._live.add(landing)
        return landing

    @property
    def num_active(self) -> int:
        return len(self._live)

    @property
    def reserved_blocks(self) -> int:
        """Blocks that wait for their KV."""
        return sum(landing.num_reserved for landing in self._live)

    def counters(self) -> dict[str, float]:
        counts = self._resources.table.counts()
        return {
            "kv_frames_received": float(counts.frames),
            "kv_bytes_received": float(counts.num_bytes),
            "kv_stale_frames": float(counts.stale_frames),
            "kv_bad_digests": float(counts.bad_digests),
            "kv_refused_frames": float(counts.refused_frames),
        }

    def show(self, counters: WorkerCounters) -> None:
        """Brings the metrics of what was dropped up to date; called at every heartbeat."""
        counts = self._resources.table.counts()
        counters.show_arrivals(counts.stale_frames, counts.bad_digests)


class DecodeHandshake:
    """Implements `prefill_peer.Handshake`: what this worker says of itself, and where its frames shall arrive."""

    def __init__(self, identity: HandoffIdentity, ends: ReceivingEnds, max_credit_bytes: int) -> None:
        self._identity = identity
        self._ends = ends
        self._max_credit_bytes = max_credit_bytes

    def hello(self, peer: str) -> handoff_pb2.Hello:
        return make_hello(self._identity, self._ends.offers(), self._ends.new_session(peer), self._max_credit_bytes)

    def goodbye(self, hello: handoff_pb2.Hello, on_silent: Callable[[], None]) -> None:
        self._ends.gate.end_session(hello.session_nonce, on_silent)

    def mismatches(self, answer: handoff_pb2.HelloAck) -> list[handoff_pb2.Mismatch]:
        if answer.accepted:
            return []
        fatal = [mismatch for mismatch in answer.mismatches if mismatch.fatal]
        if fatal:
            return fatal
        return [handoff_pb2.Mismatch(field="transports", mine=answer.transport_reason, yours="none works", fatal=True)]
