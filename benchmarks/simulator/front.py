"""The router on a virtual clock: the real admission, policy, index, confidence, bookings and timing model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from tandem.v1 import membership_pb2

from benchmarks.simulator.event_queue import EventQueue, Timer
from benchmarks.simulator.shared_links import LinkPort
from benchmarks.simulator.simulated_worker import FINGERPRINT, SCOPE_KEY, SimulatedWorker
from benchmarks.simulator.simulation_settings import SimulationSettings
from cluster.block_hash import HashScope, hash_blocks
from cluster.identity import BlockHash, Incarnation, WorkerId
from router.admission import Admission
from router.bookings import Booking
from router.cache_view import CacheView
from router.placement import ClusterSnapshot, Placement, RequestView
from router.policies import choose_policy
from router.prefix_index import PrefixIndex
from router.tenant_limits import TenantLimit, TenantLimiter
from router.timing_model import TimingPrior
from router.worker_state import WorkerState


class VirtualTimers:
    """Implements `router.admission.Timers` on the simulation's clock."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events

    def call_soon(self, callback: Callable[[], None], /) -> Timer:
        return self._events.after(0.0, callback)

    def call_later(self, delay_s: float, callback: Callable[[], None], /) -> Timer:
        return self._events.after(delay_s, callback)


class Front:
    """What the router does with a request, without its sockets. Implements `router.cache_view.EventSource` and
    `router.admission.Workers`."""

    def __init__(self, events: EventQueue, settings: SimulationSettings) -> None:
        model = settings.model
        truth = TimingPrior((model.c0_ms, model.c1_ms, model.c2_ms), (model.alpha_ms, model.beta_ms, model.gamma_ms))
        choice = choose_policy(settings.placement, settings.seed, settings.router_prior or truth)
        self._events = events
        self._policy = choice.policy
        self._timing = choice.timing
        self._uses_cache = choice.uses_cache
        self._scope = HashScope(SCOPE_KEY, FINGERPRINT, settings.block_tokens)
        self._allows_local_prefill = settings.allows_local_prefill
        # What all transfers cross beside their workers' own links.
        self.fabric = (LinkPort(settings.fabric_bytes_per_ms),) if settings.fabric_bytes_per_ms else ()
        self._workers: dict[WorkerId, SimulatedWorker] = {}
        self._snapshot: ClusterSnapshot | None = None
        self._listeners: list[Callable[[], None]] = []
        self.admission = Admission(
            self,
            choice.timing,
            TenantLimiter(TenantLimit(may_be_critical=True), settings.tenant_limits),
            settings.admission,
            may_choose_local=choice.may_choose_local,
            clock=events.clock,
            timers=lambda: VirtualTimers(events),
        )
        self.view = CacheView(PrefixIndex(), events.clock)
        self.view.connect(self)

    # --- workers ------------------------------------------------------------------------------------------------------

    def joined(self, worker: SimulatedWorker) -> None:
        self._workers[worker.state.worker_id] = worker
        self.view.worker_joined(worker.state.worker_id)
        self.changed()

    def left(self, worker: SimulatedWorker) -> None:
        self._workers.pop(worker.state.worker_id, None)
        self.view.worker_left(worker.state.worker_id)
        self.changed()

    def changed(self) -> None:
        """Somebody came, went, drains or failed."""
        self._snapshot = None
        for listener in self._listeners:
            listener()

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def worker(self, state: WorkerState) -> SimulatedWorker:
        return self._workers[state.worker_id]

    def snapshot(self) -> ClusterSnapshot:
        if self._snapshot is None:
            routable = [worker.state for worker in self._workers.values() if worker.state.is_routable]
            self._snapshot = ClusterSnapshot(
                prefill=[state for state in routable if not state.generates],
                decode=[state for state in routable if state.generates],
                allows_local_prefill=self._allows_local_prefill,
            )
        return self._snapshot

    # --- requests -----------------------------------------------------------------------------------------------------

    def hashes(self, token_ids: npt.NDArray[np.int32]) -> list[BlockHash]:
        return hash_blocks(token_ids, self._scope) if self._uses_cache else []

    def place(
        self,
        token_ids: npt.NDArray[np.int32],
        hashes: Sequence[BlockHash],
        max_tokens: int,
        excluded: frozenset[Incarnation],
    ) -> tuple[Placement, Booking]:
        """Raises `NoWorkersAvailable`."""
        now_s, num_tokens = self._events.now_s, len(token_ids)
        match = self.view.match(hashes, self._scope.block_tokens, num_tokens)
        request = RequestView(num_tokens, max_tokens, hashes, match.tokens, match.longest, excluded)
        placement = self._policy.place(request, self.snapshot(), now_s)
        booking = Booking(placement, num_tokens, max_tokens, lambda: self._events.now_s, self.admission.room_changed)
        if hashes:
            for state in (placement.decode, *placement.prefill[:1]):
                self.view.chosen(state.worker_id, hashes)
        return placement, booking

    def started(self, placement: Placement, num_prompt: int, num_cached: int, compute_ms: float) -> None:
        """The first token came: what was measured refines what will be predicted."""
        computing = placement.prefill[0] if placement.prefill else placement.decode
        self.view.observed(computing.worker_id, placement.expected_cached_tokens, num_cached)
        for state in (placement.decode, *placement.prefill[:1]):
            self.view.answered(state.worker_id)
        if placement.is_local:  # as the dispatcher does
            compute_ms *= placement.decode.share_beside(placement.decode.num_in_flight - 1)
        self._timing.observe_prefill(num_prompt - num_cached, num_cached, compute_ms)

    def uncached_tokens(self, hashes: Sequence[BlockHash], num_tokens: int) -> int:
        """Prompt tokens that even the best worker would have to compute."""
        match = self.view.match(hashes, self._scope.block_tokens, num_tokens)
        return num_tokens - max(match.tokens.values(), default=0)

    # --- KV events ----------------------------------------------------------------------------------------------------

    def read(self, event: membership_pb2.KvEvent) -> None:
        self.view.on_event(event)

    def watch(self, worker_id: WorkerId) -> None:
        """Every worker's stream is read from its first event on."""

    def unwatch(self, worker_id: WorkerId) -> None:
        """A worker that left sends nothing more."""

    def read_again(self, worker_id: WorkerId) -> None:
        if (worker := self._workers.get(worker_id)) is not None:
            worker.stream.send_again()

    def ask_snapshot(self, worker_id: WorkerId) -> None:
        if (worker := self._workers.get(worker_id)) is not None:
            worker.stream.send_snapshot()
