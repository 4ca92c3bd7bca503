"""What a router knows of one worker: its record, its last load report, its link, and what is booked on it.

Owned by `WorkerRegistry` and changed in place on the event loop; policies only read. A restarted worker is a new state:
what was booked on the old one goes with it, so no counter is ever wrong because of a restart.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from tandem.v1 import common_pb2, membership_pb2, worker_pb2

from cluster.identity import Incarnation, WorkerId
from router.circuit import CLOSED, Circuit

RECENT_HALF_LIFE_S = 30.0
FULL_POOL = 0.85  # of its blocks: above it requests are put back for want of some


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


ROLES = {
    common_pb2.WORKER_ROLE_PREFILL: Role.PREFILL,
    common_pb2.WORKER_ROLE_DECODE: Role.DECODE,
    common_pb2.WORKER_ROLE_AGGREGATED: Role.AGGREGATED,
}


@dataclass(slots=True, eq=False)
class WorkerState:
    """One incarnation of a worker."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    control_address: str
    block_tokens: int
    kv_bytes_per_token: int = 0
    num_layers: int = 1
    host_id: str = ""
    is_ready: bool = False  # says the worker
    is_connected: bool = False  # says our link to it
    load: worker_pb2.LoadReport = field(default_factory=worker_pb2.LoadReport)
    load_at_s: float = 0.0  # on the router's clock
    refused: frozenset[Incarnation] = frozenset()  # peers that it refused at Hello
    joined_s: float = -math.inf  # when this router heard of it
    circuit: Circuit = CLOSED
    # Booked by this router and not yet released.
    booked_requests: int = 0
    booked_prefills: int = 0  # prompts whose first token has not come
    booked_prefill_tokens: int = 0
    prefill_since_s: float = 0.0  # when the turn of the first of these came
    booked_kv_tokens: int = 0
    last_chosen_s: float = 0.0
    # The last report's numbers as plain ones: a decision over a thousand workers reads them many times.
    reported_in_flight: int = field(default=0, init=False)
    reported_context_tokens: int = field(default=0, init=False)
    reported_queue_ms: float = field(default=0.0, init=False)
    used_tokens: int = field(default=0, init=False)  # of its KV pool
    capacity_tokens: int = field(default=0, init=False)  # what its KV pool holds; 0 while it has not said
    # A prompt of more than these evicts something; no bound while it has not said what its pool holds.
    never_used_tokens: float = field(default=math.inf, init=False)
    full_tokens: float = field(default=math.inf, init=False)  # of its pool: above these it puts requests back
    # What a prompt gets of its time beside streams, which are in time meanwhile; 0: all, and they wait.
    prefill_share: float = field(default=0.0, init=False)
    restore_ms_per_token: float = field(default=0.0, init=False)  # from a lower tier
    takes_requests: bool = field(default=True, init=False)  # neither drains nor has stopped admission
    # Uncached tokens placed here, fading: who took more than its share lately.
    _recent_tokens: float = 0.0
    _recent_at_s: float = 0.0

    def __post_init__(self) -> None:
        self._read(self.load)

    @property
    def is_routable(self) -> bool:
        return self.is_ready and self.is_connected and self.takes_requests

    @property
    def generates(self) -> bool:
        return self.role is not Role.PREFILL

    @property
    def num_in_flight(self) -> int:
        reported, booked = self.reported_in_flight, self.booked_requests
        return reported if reported > booked else booked  # a call of max() would be most of a decision's reads of it

    def share_beside(self, num_streams: int) -> float:
        """What of its time it has for a prompt beside so many streams."""
        return (self.prefill_share if num_streams > 0 else 0.0) or 1.0

    def recent_tokens(self, now_s: float) -> float:
        return self._recent_tokens * math.exp2((self._recent_at_s - now_s) / RECENT_HALF_LIFE_S)

    def add_recent_tokens(self, num_tokens: int, now_s: float) -> None:
        self._recent_tokens = self.recent_tokens(now_s) + num_tokens
        self._recent_at_s = now_s

    def take_report(self, load: worker_pb2.LoadReport, now_s: float) -> None:
        self.load = load
        self.load_at_s = now_s
        self._read(load)

    def _read(self, load: worker_pb2.LoadReport) -> None:
        self.reported_in_flight = load.running_requests + load.waiting_requests
        self.reported_context_tokens = load.context_tokens
        self.reported_queue_ms = load.queue_ms
        self.used_tokens = (load.total_blocks - load.free_blocks) * self.block_tokens
        self.capacity_tokens = load.total_blocks * self.block_tokens
        never_used = (load.free_blocks - load.cached_blocks) * self.block_tokens
        self.never_used_tokens = never_used if self.capacity_tokens else math.inf
        self.full_tokens = FULL_POOL * self.capacity_tokens if self.capacity_tokens else math.inf
        self.prefill_share = load.prefill_share
        self.restore_ms_per_token = load.restore_ms_per_block / self.block_tokens if self.block_tokens else 0.0
        self.takes_requests = not (load.draining or load.admission_stopped)


def state_from_record(record: membership_pb2.WorkerRecord, now_s: float) -> WorkerState | None:
    """The state of a worker that announced itself; None for a role that this router does not know."""
    role = ROLES.get(record.identity.role)
    if role is None:
        return None
    layout = record.layout
    state = WorkerState(
        worker_id=WorkerId(record.identity.worker_id),
        incarnation=Incarnation(record.identity.incarnation),
        role=role,
        control_address=record.control_address,
        block_tokens=layout.block_tokens or 16,
        kv_bytes_per_token=2
        * layout.num_layers
        * layout.num_kv_heads
        * layout.head_dim
        * _DTYPE_BYTES.get(layout.dtype, 2),
        num_layers=max(1, layout.num_layers),
        host_id=record.host_id,
        joined_s=now_s,
    )
    update_from_record(state, record, now_s)
    return state


def update_from_record(state: WorkerState, record: membership_pb2.WorkerRecord, now_s: float) -> None:
    """A newer heartbeat. Reports that come over the link are fresher, so the record's load waits for their silence."""
    state.is_ready = record.ready
    state.refused = frozenset(Incarnation(peer.incarnation) for peer in record.refused)
    if record.HasField("load") and now_s - state.load_at_s > REPORT_FRESH_S:
        state.take_report(record.load, now_s)


# A report older than this says less than what this router has booked since.
REPORT_FRESH_S = 1.0
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "int8": 1}
