"""The router on a virtual clock: the real policy, index, confidence, bookings and timing model; a predicted refusal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tandem.v1 import membership_pb2

from benchmarks.simulator.event_queue import EventQueue
from benchmarks.simulator.simulated_worker import FINGERPRINT, SCOPE_KEY, SimulatedWorker
from benchmarks.simulator.simulation_settings import SimulationSettings
from cluster.block_hash import HashScope, hash_blocks
from cluster.errors import ServerOverloaded
from cluster.identity import BlockHash, Incarnation, WorkerId
from router.bookings import Booking
from router.cache_view import CacheView
from router.load_policies import prefill_queue_ms
from router.placement import ClusterSnapshot, Placement, RequestView
from router.policies import choose_policy
from router.prefix_index import PrefixIndex
from router.timing_model import TimingPrior
from router.worker_state import WorkerState


class Front:
    """What the dispatcher does with a request, without its sockets. Implements `router.cache_view.EventSource`."""

    def __init__(self, events: EventQueue, settings: SimulationSettings) -> None:
        model = settings.model
        prior = TimingPrior((model.c0_ms, model.c1_ms, model.c2_ms), (model.alpha_ms, model.beta_ms, model.gamma_ms))
        choice = choose_policy(settings.placement, settings.seed, prior)
        self._events = events
        self._policy = choice.policy
        self._timing = choice.timing
        self._uses_cache = choice.uses_cache
        self._refuse_above_ms = settings.refuse_above_slo * settings.slo.ttft_ms
        self._scope = HashScope(SCOPE_KEY, FINGERPRINT, settings.block_tokens)
        self._allows_local_prefill = settings.allows_local_prefill
        self._workers: dict[WorkerId, SimulatedWorker] = {}
        self._snapshot: ClusterSnapshot | None = None
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

    def worker(self, state: WorkerState) -> SimulatedWorker:
        return self._workers[state.worker_id]

    @property
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
        """Raises `NoWorkersAvailable`, and `ServerOverloaded` for a first token that would come too late."""
        now_s, num_tokens = self._events.now_s, len(token_ids)
        match = self.view.match(hashes, self._scope.block_tokens, num_tokens)
        request = RequestView(num_tokens, max_tokens, hashes, match.tokens, match.longest, excluded)
        placement = self._policy.place(request, self.snapshot, now_s)
        if self._refuse_above_ms:
            self._refuse_if_late(placement, now_s)
        booking = Booking(placement, num_tokens, max_tokens, now_s)
        if hashes:
            for state in (placement.decode, *placement.prefill[:1]):
                self.view.chosen(state.worker_id, hashes)
        return placement, booking

    def started(self, placement: Placement, num_prompt: int, num_cached: int, compute_ms: float) -> None:
        """The first token came: what was measured refines what will be predicted."""
        computing = placement.prefill[0] if placement.prefill else placement.decode
        self.view.observed(computing.worker_id, placement.expected_cached_tokens, num_cached)
        self._timing.observe_prefill(num_prompt - num_cached, num_cached, compute_ms)

    def _refuse_if_late(self, placement: Placement, now_s: float) -> None:
        computing = placement.prefill[0] if placement.prefill else placement.decode
        first_token_ms = prefill_queue_ms(computing, self._timing, now_s) + placement.expected_prefill_ms
        if first_token_ms > self._refuse_above_ms:
            late_s = (first_token_ms - self._refuse_above_ms) / 1e3
            raise ServerOverloaded(
                f"the first token would come after {first_token_ms:.0f} ms", retry_after_s=late_s, stage="route"
            )

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
