"""A cluster on a virtual clock: the real policies, bookings and index in front of workers that take modelled time.

A prefill worker computes one prompt at a time and keeps every block it computed; a decode worker runs its requests for
`output_ms`. Only what the live router would know reaches the policy: bookings, and KV events after they are stored.
With several routers requests go to them in turn; each books for itself, and of the others it sees what workers report.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.v1 import membership_pb2, worker_pb2

from cluster.block_hash import HashScope
from cluster.identity import Incarnation, WorkerId
from router.bookings import Booking
from router.cache_view import CacheView, prompt_hashes
from router.placement import ClusterSnapshot, Placement, PlacementPolicy, RequestView
from router.prefix_index import PrefixIndex
from router.timing_model import TimingModel
from router.worker_state import Role, WorkerState

BLOCK_TOKENS = 16
SCOPE = HashScope(b"scope", "model", BLOCK_TOKENS)


def worker(worker_id: str, role: Role = Role.PREFILL, total_blocks: int = 100_000) -> WorkerState:
    load = worker_pb2.LoadReport(total_blocks=total_blocks, free_blocks=total_blocks)
    return WorkerState(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(f"{worker_id}-one"),
        role=role,
        control_address="",
        block_tokens=BLOCK_TOKENS,
        kv_bytes_per_token=1000,
        num_layers=4,
        is_ready=True,
        is_connected=True,
        load=load,
    )


@dataclass
class SimulatedRouter:
    """One router's policy, and all it knows of the workers."""

    policy: PlacementPolicy
    prefill: list[WorkerState]
    decode: list[WorkerState]
    view: CacheView

    def states_of(self, worker_id: WorkerId) -> list[WorkerState]:
        return [state for state in (*self.prefill, *self.decode) if state.worker_id == worker_id]


@dataclass
class SimulatedCluster:
    """`run` sends prompts at their times and counts where they went and how long their first token took."""

    policy: PlacementPolicy
    timing: TimingModel
    prefill: list[WorkerState]
    decode: list[WorkerState]
    output_ms: float = 500.0
    other_policies: Sequence[PlacementPolicy] = ()  # of as many more routers
    now_s: float = 0.0
    num_cached_tokens: int = 0  # found where prompts were computed
    placements: list[Placement] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    _free_at_s: dict[WorkerId, float] = field(default_factory=dict)
    _caches: dict[WorkerId, set[bytes]] = field(default_factory=dict)
    _seqs: Counter[WorkerId] = field(default_factory=Counter)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _num_events: int = 0

    def __post_init__(self) -> None:
        self.routers = [self._router(self.policy, self.prefill, self.decode)]
        for policy in self.other_policies:
            prefill, decode = (
                [worker(one.worker_id, one.role) for one in pool] for pool in (self.prefill, self.decode)
            )
            self.routers.append(self._router(policy, prefill, decode))

    def _router(
        self, policy: PlacementPolicy, prefill: list[WorkerState], decode: list[WorkerState]
    ) -> SimulatedRouter:
        view = CacheView(PrefixIndex(), lambda: self.now_s)
        for state in prefill + decode:
            view.worker_joined(state.worker_id)
        return SimulatedRouter(policy, prefill, decode, view)

    def run(self, prompts: Sequence[tuple[float, Sequence[int]]]) -> None:
        for at_s, token_ids in prompts:
            self._advance(at_s)
            self._place(token_ids)
        self._advance(float("inf"))

    def prefills_of(self) -> Counter[WorkerId]:
        return Counter(placement.prefill[0].worker_id for placement in self.placements if placement.prefill)

    def _place(self, token_ids: Sequence[int]) -> None:
        router = self.routers[len(self.placements) % len(self.routers)]
        hashes = prompt_hashes(token_ids, SCOPE)
        match = router.view.match(hashes, BLOCK_TOKENS, len(token_ids))
        request = RequestView(
            num_prompt_tokens=len(token_ids),
            max_tokens=64,
            block_hashes=hashes,
            cached_tokens=match.tokens,
            longest_match=match.longest,
        )
        placement = router.policy.place(request, ClusterSnapshot(router.prefill, router.decode), self.now_s)
        booking = Booking(placement, len(token_ids), 64, lambda: self.now_s)
        self.placements.append(placement)
        computing = placement.prefill[0] if placement.prefill else placement.decode
        router.view.chosen(computing.worker_id, hashes)
        cache = self._caches.setdefault(computing.worker_id, set())
        num_cached = 0
        for block_hash in hashes:
            if block_hash not in cache:
                break
            num_cached += BLOCK_TOKENS
        num_cached = min(num_cached, len(token_ids) - 1)
        self.num_cached_tokens += num_cached
        start_s = max(self.now_s, self._free_at_s.get(computing.worker_id, 0.0))
        end_s = start_s + self.timing.prefill_ms(len(token_ids) - num_cached, num_cached) / 1000
        self._free_at_s[computing.worker_id] = end_s
        cache.update(hashes)
        self.ttft_ms.append((end_s - self.now_s) * 1000)

        def first_token() -> None:
            booking.first_token()
            self._seqs[computing.worker_id] += 1
            event = membership_pb2.KvEvent(
                worker_id=computing.worker_id,
                incarnation=computing.incarnation,
                seq=self._seqs[computing.worker_id],
                op=membership_pb2.KV_EVENT_OP_STORED,
                block_hashes=b"".join(hashes),
            )
            for one in self.routers:
                one.view.on_event(event)
            if len(self.routers) > 1:
                self._report(computing)

        self._at(end_s, first_token)
        self._at(end_s + self.output_ms / 1000, booking.release)

    def _report(self, computing: WorkerState) -> None:
        """What the worker has to compute yet, whoever sent it, to every router."""
        queue_ms = max(0.0, self._free_at_s[computing.worker_id] - self.now_s) * 1000
        load = worker_pb2.LoadReport(
            total_blocks=computing.load.total_blocks, free_blocks=computing.load.total_blocks, queue_ms=queue_ms
        )
        for router in self.routers:
            for state in router.states_of(computing.worker_id):
                state.take_report(load, self.now_s)

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, action))

    def _advance(self, to_s: float) -> None:
        while self._events and self._events[0][0] <= to_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        if to_s != float("inf"):
            self.now_s = to_s
