"""Places sequences, and places them again when a worker fails them.

    place    policy decides on a snapshot, the booking is made in the same breath, the session gets the submission
    failed   another worker may succeed: fence + 1, that worker excluded, generated tokens sent along
    parked   no worker is there: wait a little for one to come back, then fail

It knows nothing of clients or text. Deterministic failures are never retried.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from tandem.v1 import worker_pb2

from cluster.errors import (
    HANDED_OVER,
    ClientError,
    DeadlineExceeded,
    EngineFailure,
    KvCapacityExhausted,
    KvTransferFailed,
    NoWorkersAvailable,
    RetryElsewhere,
    RetryLater,
    TandemError,
    WorkerUnavailable,
)
from router import circuit
from router.bookings import Booking
from router.cache_view import CacheMatch, CacheView
from router.placement import ClusterSnapshot, Placement, PlacementPolicy, RequestView
from router.retry_budget import RetryBudget
from router.sequence import Sequence, SequenceSpec, SequenceState
from router.slow_start import warmed
from router.timing_model import TimingModel
from router.worker_registry import WorkerRegistry
from router.worker_state import WorkerState

# Failed ones of one request, before it fails.
MAX_PLACEMENTS = 4
# A request that was running on this many workers when they died is taken to be what killed them.
MAX_LOSSES = 2
# A supervisor brings a crashed worker back within seconds; a client whose answer began would rather wait than lose it.
MAX_PARKED_S = 15.0

_log = logging.getLogger(__name__)


class PlacementListener(Protocol):
    """Hears of what was decided, for metrics and explanations."""

    def placed(self, sequence: Sequence, placement: Placement) -> None: ...

    def started(self, sequence: Sequence, event: worker_pb2.RequestEvent) -> None: ...

    def moved(self, sequence: Sequence, error: TandemError) -> None: ...


class Dispatcher:
    """Owned by the router process; used on the event loop only."""

    def __init__(
        self,
        registry: WorkerRegistry,
        policy: PlacementPolicy,
        listeners: Iterable[PlacementListener],
        cache_view: CacheView | None = None,
        timing: TimingModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        """`cache_view` and `timing` are those that the policy reads: what workers report goes back into them."""
        self._registry = registry
        self.policy = policy
        self.cache_view = cache_view
        self._timing = timing
        self._listeners = tuple(listeners)
        self._clock = clock
        self._chance = chance or random.Random()  # noqa: S311  a warming worker's share, no secret
        self.retries = RetryBudget(clock())
        self._room_changed: Callable[[], None] = _nobody_asked
        self._parked: dict[Sequence, asyncio.TimerHandle] = {}
        registry.on_change(self._place_parked)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def on_room(self, listener: Callable[[], None]) -> None:
        """`listener` is called when something that was booked on a worker is given back. It must not block."""
        self._room_changed = listener

    def submit(self, sequence: Sequence) -> None:
        """Places a new sequence. Raises `NoWorkersAvailable` when nobody can take it now."""
        self.retries.request_came()
        self._place(sequence)

    def uncached_tokens(self, spec: SequenceSpec) -> int:
        """Prompt tokens that even the best worker would have to compute."""
        num_tokens = len(spec.token_ids)
        return num_tokens - max(self._match(spec, num_tokens).tokens.values(), default=0)

    def sequence_started(self, sequence: Sequence, event: worker_pb2.RequestEvent) -> None:
        """From a sequence: its first token. What was measured refines what will be predicted."""
        placement = sequence.placement
        if placement is None or event.prompt_tokens != len(sequence.spec.token_ids):
            return
        for listener in self._listeners:
            listener.started(sequence, event)
        computing = placement.prefill[0] if placement.prefill else placement.decode
        timeline = event.timeline
        was_as_placed = timeline.prefill_worker_id in ("", computing.worker_id)
        self._note_outcome(placement, is_prefill_as_placed=was_as_placed)
        if self.cache_view is not None and was_as_placed:
            self.cache_view.observed(computing.worker_id, placement.expected_cached_tokens, event.cached_tokens)
            for worker in (placement.decode, *placement.prefill[:1]):
                self.cache_view.answered(worker.worker_id)
        if self._timing is not None:
            learn_times(self._timing, placement.decode, event)

    def sequence_failed(self, sequence: Sequence, error: TandemError) -> None:
        """From a session. The sequence goes on elsewhere, waits, or ends with this error."""
        # A worker that stops in order gives back what it has: however often that happens, nothing went wrong.
        is_failure = error.error_code != HANDED_OVER
        sequence.num_failures += is_failure
        sequence.num_losses += error.error_code == "worker_lost"
        if sequence.is_complete:
            sequence.complete()
            return
        self._note_failure(sequence.placement, error)
        if not isinstance(error, RetryElsewhere) or sequence.num_failures >= MAX_PLACEMENTS:
            sequence.fail(error)
            return
        if is_failure and not self.retries.may_move(sequence.num_failures - 1, self._clock()):
            sequence.fail(error)
            return
        if sequence.num_losses >= MAX_LOSSES:
            sequence.fail(
                EngineFailure(
                    f"{MAX_LOSSES} workers died while they ran this request: it is not tried again",
                    code="request_poisoned",
                    stage="decode",
                )
            )
            return
        for listener in self._listeners:
            listener.moved(sequence, error)
        sequence.leave_failed_worker()
        try:
            self._place(sequence)
        except NoWorkersAvailable:
            # A worker that is gone may come back; one that has no room says so to everybody.
            if isinstance(error, WorkerUnavailable):
                self._park(sequence, error)
            else:
                sequence.fail(error)

    def _place(self, sequence: Sequence) -> None:
        now_s = self._clock()
        spec = sequence.spec
        num_tokens = len(spec.token_ids) + len(sequence.generated)
        match = self._match(spec, num_tokens)
        request = RequestView(
            num_prompt_tokens=num_tokens,
            max_tokens=spec.sampling.max_tokens - len(sequence.generated),
            block_hashes=spec.block_hashes,
            cached_tokens=match.tokens,
            restorable_tokens=match.restorable_tokens,
            longest_match=match.longest,
            excluded=frozenset(sequence.excluded),
            session_key=spec.session_key,
        )
        placement = self.policy.place(request, self._candidates(now_s), now_s)
        session = self._registry.session_of(placement.decode)
        booking = Booking(placement, request.num_prompt_tokens, request.max_tokens, self._clock, self._room_changed)
        for worker in (placement.decode, *placement.prefill[:1]):
            worker.circuit = circuit.on_sent(worker.circuit, now_s)
        try:
            session.submit(sequence, self._submission(sequence, placement, now_s))
        except TandemError:
            booking.release()
            raise
        sequence.no_match_because = match.no_match_because
        sequence.placed(placement, session, booking)
        if self.cache_view is not None and spec.block_hashes:
            for worker in (placement.decode, *placement.prefill[:1]):
                self.cache_view.chosen(worker.worker_id, spec.block_hashes)
        for listener in self._listeners:
            listener.placed(sequence, placement)

    # --- who is asked -------------------------------------------------------------------------------------------------

    def _candidates(self, now_s: float) -> ClusterSnapshot:
        """Routable workers, less those that keep failing, and warming ones for their share of the decisions."""
        snapshot = self._registry.snapshot()
        return ClusterSnapshot(
            warmed(_closed(snapshot.prefill, now_s), now_s, self._chance),
            warmed(_closed(snapshot.decode, now_s), now_s, self._chance),
            snapshot.allows_local_prefill,
        )

    def _note_outcome(self, placement: Placement, *, is_prefill_as_placed: bool) -> None:
        """A first token came. A prefill worker that was passed over for another one had failed the decode worker."""
        decode = placement.decode
        decode.circuit = circuit.on_success(decode.circuit)
        for worker in placement.prefill[:1]:
            if is_prefill_as_placed:
                worker.circuit = circuit.on_success(worker.circuit)
            else:
                self._failed(worker)

    def _note_failure(self, placement: Placement | None, error: TandemError) -> None:
        """Counts what a worker did. Wrong requests, overload and full pools are nobody's failure, nor is a drain."""
        if placement is None or isinstance(error, ClientError | RetryLater | KvCapacityExhausted | DeadlineExceeded):
            return
        is_prefill = isinstance(error, KvTransferFailed) or error.stage == "prefill"
        worker = placement.prefill[0] if is_prefill and placement.prefill else placement.decode
        if not worker.load.draining:
            self._failed(worker)

    def _failed(self, worker: WorkerState) -> None:
        before, worker.circuit = worker.circuit, circuit.on_failure(worker.circuit, self._clock())
        if worker.circuit.position is not before.position:
            _log.warning("a worker keeps failing and is not asked for a while", extra={"peer": worker.worker_id})

    def _match(self, spec: SequenceSpec, num_tokens: int) -> CacheMatch:
        if self.cache_view is None:
            return CacheMatch({}, None, f"the policy {self.policy.name} does not look at caches")
        return self.cache_view.match(spec.block_hashes, self._registry.block_tokens, num_tokens)

    def _submission(self, sequence: Sequence, placement: Placement, now_s: float) -> worker_pb2.SubmitRequest:
        spec = sequence.spec
        deadline_ms = 0
        if spec.deadline_s is not None:
            deadline_ms = max(1, int((spec.deadline_s - now_s) * 1000))
        return worker_pb2.SubmitRequest(
            request_id=spec.submission_id,
            token_ids=spec.token_ids,
            sampling=spec.sampling.to_proto(),
            prefill=[
                worker_pb2.PrefillPlacement(
                    worker_id=worker.worker_id,
                    incarnation=worker.incarnation,
                    control_address=worker.control_address,
                    expected_prefill_ms=placement.expected_prefill_ms,
                    expected_cached_tokens=placement.expected_cached_tokens,
                )
                for worker in placement.prefill
            ],
            allow_local_prefill=placement.is_local or self._registry.allows_local_prefill,
            priority=spec.priority,
            deadline_ms=deadline_ms,
            scope=spec.scope,
            tenant=spec.tenant,
            generated_token_ids=sequence.generated,
            fence=sequence.fence,
            traceparent=spec.traceparent,
        )

    # --- waiting for a worker -----------------------------------------------------------------------------------------

    def _park(self, sequence: Sequence, error: TandemError) -> None:
        _log.info("no worker can go on with a request, waiting for one", extra={"request": sequence.submission_id})
        timer = asyncio.get_running_loop().call_later(MAX_PARKED_S, self._give_up, sequence, error)
        self._parked[sequence] = timer

    def _place_parked(self) -> None:
        for sequence, timer in list(self._parked.items()):
            if sequence.state is not SequenceState.PARKED:  # its client went away
                self._unpark(sequence, timer)
                continue
            try:
                self._place(sequence)
            except (NoWorkersAvailable, RetryElsewhere):
                continue
            self._unpark(sequence, timer)

    def _give_up(self, sequence: Sequence, error: TandemError) -> None:
        self._parked.pop(sequence, None)
        if sequence.state is not SequenceState.PARKED:
            return
        is_late = sequence.spec.deadline_s is not None and self._clock() >= sequence.spec.deadline_s
        sequence.fail(DeadlineExceeded("no worker came back in time", stage="route") if is_late else error)

    def _unpark(self, sequence: Sequence, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self._parked.pop(sequence, None)


def learn_times(timing: TimingModel, decode: WorkerState, event: worker_pb2.RequestEvent) -> None:
    """From a first token: what its prompt took, and what the decode worker's steps take."""
    compute_ms = event.timeline.prefill_compute_us / 1e3
    if not event.timeline.prefill_worker_id:  # the decode worker computed it, and its other requests' tokens meanwhile
        compute_ms *= decode.share_beside(decode.num_in_flight - 1)
    timing.observe_prefill(event.prompt_tokens - event.cached_tokens, event.cached_tokens, compute_ms)
    load = decode.load
    if load.running_requests and not decode.booked_prefills:  # steps of decodes alone
        timing.observe_step(load.running_requests, load.context_tokens, load.step_ms)


def _closed(workers: SequenceOf[WorkerState], now_s: float) -> SequenceOf[WorkerState]:
    """Those whose circuit lets a request through; all of them when that is nobody."""
    return [worker for worker in workers if circuit.admits(worker.circuit, now_s)] or workers


def _nobody_asked() -> None:
    """Admission has not been connected."""
