"""What the autoscaler sees at one tick: plain numbers, measured at admission and reported by the workers.

Demand counts requests when they arrive, also those that wait or were refused; completions would saturate with the pool
and hide the need for more of it.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field


class Pool(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class TtftStage(enum.Enum):
    """Where the time to the first token goes; `decide` grows what the largest one points at."""

    ROUTE = "route"
    PREFILL_QUEUE = "prefill_queue"
    OWN_COMPUTE = "own_compute"
    EXPOSED_TRANSFER = "exposed_transfer"
    DECODE_WAIT = "decode_wait"


@dataclass(frozen=True, slots=True)
class Demand:
    """Load offered during the last tick."""

    requests_per_s: float  # arrivals, refused ones included
    uncached_tokens_per_request: float  # prompt tokens that no cache held
    cached_tokens_per_request: float
    output_tokens_per_request: float
    queued_requests: int = 0  # admitted and waiting for a worker


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One ready worker."""

    worker_id: str
    queue_ms: float
    kv_utilisation: float = 0.0  # [0, 1], decode
    running: int = 0


@dataclass(frozen=True, slots=True)
class StartingReplica:
    """A worker that was asked for and is not ready yet. It counts as capacity until its deadline."""

    worker_id: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class PoolSignals:
    ready: tuple[WorkerLoad, ...]
    starting: tuple[StartingReplica, ...] = ()
    num_draining: int = 0

    def count(self, now_s: float) -> int:
        """Ready workers and those that still may become ready in time."""
        return len(self.ready) + sum(replica.deadline_s > now_s for replica in self.starting)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything `decide` may look at. Times are on the caller's clock."""

    now_s: float
    has_heartbeat: bool  # whether fresh reports came in: without them nothing is known, and nothing changes
    demand: Demand
    prefill: PoolSignals
    decode: PoolSignals
    ttft_p90_ms: dict[TtftStage, float] = field(default_factory=dict)
    itl_p90_ms: float = 0.0

    def pool(self, pool: Pool) -> PoolSignals:
        return self.prefill if pool is Pool.PREFILL else self.decode

    @property
    def is_idle(self) -> bool:
        """No traffic, and we know it."""
        busy = any(worker.running or worker.queue_ms > 0 for worker in (*self.prefill.ready, *self.decode.ready))
        return self.has_heartbeat and self.demand.requests_per_s == 0 and self.demand.queued_requests == 0 and not busy

    @property
    def is_sane(self) -> bool:
        """Whether every number is finite and not negative: a skewed metric must not move a pool."""
        numbers = (
            self.demand.requests_per_s,
            self.demand.uncached_tokens_per_request,
            self.demand.cached_tokens_per_request,
            self.demand.output_tokens_per_request,
            self.itl_p90_ms,
            *self.ttft_p90_ms.values(),
            *(worker.queue_ms for worker in (*self.prefill.ready, *self.decode.ready)),
            *(worker.kv_utilisation for worker in self.decode.ready),
        )
        return all(math.isfinite(number) and number >= 0 for number in numbers)
