"""The interface of placement: a request and a snapshot in, one explained decision out.

A policy is a function of (request, snapshot, now) and its own state (a cursor, a generator): no I/O, no clock, no lock.
The live router and the simulator call the same code. Every term is a predicted time in milliseconds, so each decision
can be explained by adding numbers; the lowest total wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cluster.errors import NoWorkersAvailable
from cluster.identity import BlockHash, Incarnation, WorkerId
from router.worker_state import Role, WorkerState

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of a request."""

    num_prompt_tokens: int  # with tokens that were generated elsewhere
    max_tokens: int
    block_hashes: Sequence[BlockHash] = ()
    # How many of its first tokens each worker is believed to hold; absent: none.
    cached_tokens: Mapping[WorkerId, int] = field(default_factory=dict)
    # The last block of the longest prefix that any worker is believed to hold; None: nobody holds one.
    longest_match: BlockHash | None = None
    excluded: frozenset[Incarnation] = frozenset()  # failed this request already
    session_key: str = ""  # equal for the requests of one conversation, where the client says so
    # How many tokens behind the cached ones each worker can bring back from a lower tier; absent: none.
    restorable_tokens: Mapping[WorkerId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """Who could take a request now. Routable workers only."""

    prefill: Sequence[WorkerState]
    decode: Sequence[WorkerState]  # decode and aggregated
    allows_local_prefill: bool = True

    @property
    def can_serve(self) -> bool:
        """Whether a request could be placed."""
        if any(worker.role is Role.AGGREGATED for worker in self.decode):
            return True
        return bool(self.decode) and (bool(self.prefill) or self.allows_local_prefill)

    @property
    def computing(self) -> Sequence[WorkerState]:
        """Who computes prompts: prefill and aggregated workers, the decode workers where there are none."""
        aggregated = [worker for worker in self.decode if worker.role is Role.AGGREGATED]
        return [*self.prefill, *aggregated] or self.decode


class Candidate(NamedTuple):
    """One worker as the policy saw it. Every decision makes sixteen of these, and hardly one is ever looked at: its
    terms get their names then."""

    worker: WorkerState
    total_ms: float
    names: tuple[str, ...]
    values_ms: tuple[float, ...]

    @classmethod
    def of(cls, worker: WorkerState, terms_ms: Mapping[str, float]) -> Candidate:
        return cls(worker, sum(terms_ms.values()), tuple(terms_ms), tuple(terms_ms.values()))

    @property
    def terms_ms(self) -> Mapping[str, float]:
        """By name, in the order in which they are shown."""
        return dict(zip(self.names, self.values_ms, strict=True))


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes, and why."""

    policy: str
    decode: WorkerState
    # In order of preference; empty: the decode worker prefills by itself.
    prefill: Sequence[WorkerState] = ()
    expected_cached_tokens: int = 0
    expected_prefill_ms: float = 0.0
    candidates: Sequence[Candidate] = ()
    local: Candidate | None = None  # the decode worker's own prefill, where that was weighed against a prefill worker's
    reason: str = ""
    is_fallback: bool = False  # a prefill worker was wanted and none was there

    @property
    def is_local(self) -> bool:
        return not self.prefill


class PlacementPolicy(Protocol):
    """How placements are chosen."""

    name: str

    def place(self, request: RequestView, snapshot: ClusterSnapshot, now_s: float) -> Placement:
        """Raises `NoWorkersAvailable`."""
        ...


def eligible_decode(request: RequestView, snapshot: ClusterSnapshot) -> list[WorkerState]:
    """Workers that can take the request at all. Raises `NoWorkersAvailable`, saying why."""
    alive = snapshot.decode
    if request.excluded:
        alive = [worker for worker in alive if worker.incarnation not in request.excluded]
    if not alive:
        raise NoWorkersAvailable("no decode worker is ready", retry_after_s=RETRY_AFTER_S, stage="route")
    needed = request.num_prompt_tokens + 1
    fitting = [worker for worker in alive if not worker.capacity_tokens or needed <= worker.capacity_tokens]
    if not fitting:
        raise NoWorkersAvailable(
            f"no ready decode worker has room for {needed} tokens", retry_after_s=RETRY_AFTER_S, stage="route"
        )
    return fitting


def eligible_prefill(request: RequestView, snapshot: ClusterSnapshot, decode: WorkerState) -> list[WorkerState]:
    """Prefill workers that may serve this decode worker. Empty when the decode worker prefills for itself.

    Raises `NoWorkersAvailable` when none is ready and falling back is not allowed.
    """
    if decode.role is Role.AGGREGATED:
        return []
    found = [
        worker for worker in snapshot.prefill if worker.incarnation not in request.excluded and may_pair(worker, decode)
    ]
    if not found and not snapshot.allows_local_prefill:
        raise NoWorkersAvailable(
            "no prefill worker is ready and local prefill is not allowed", retry_after_s=RETRY_AFTER_S, stage="route"
        )
    return found


def may_pair(prefill: WorkerState, decode: WorkerState) -> bool:
    """Neither has refused the other at Hello."""
    return prefill.incarnation not in decode.refused and decode.incarnation not in prefill.refused


def is_fallback(decode: WorkerState, prefill: Sequence[WorkerState]) -> bool:
    return decode.role is Role.DECODE and not prefill
