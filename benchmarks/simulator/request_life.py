"""One simulated request from its arrival to its end: placed, reserved, prefilled, transferred, decoded, or moved.

arrived ─> [waits in the router] ─> placed ─> [reserved on D ─> prefilled on P ─> transferred] ─> decoded ─> ended
                                      ^       or [prefilled on D]                                    │
                                      └──── a worker failed: placed again with what was generated ───┘
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.request_record import Outcome, RequestRecord
from benchmarks.simulator.event_queue import EventQueue, Timer
from benchmarks.simulator.front import Front
from benchmarks.simulator.shared_links import Flow
from benchmarks.simulator.simulated_engine import GENERATED_TOKEN, StepTokens
from benchmarks.simulator.simulated_traffic import SimulatedArrival
from benchmarks.simulator.simulated_worker import SCOPE_KEY, SimulatedWorker
from benchmarks.simulator.simulation_settings import SimulationSettings
from benchmarks.ttft_stages import TtftStages
from cluster.errors import DeadlineExceeded, NoWorkersAvailable, ServerOverloaded, TandemError
from cluster.identity import BlockRef, Incarnation, RequestId
from cluster.sampling_params import SamplingParams
from engine.request import EngineRequest, LandedPrompt
from engine.sequence import Sequence
from router.admission import Arrival
from router.bookings import Booking
from router.fair_queue import Waiting
from router.placement import Placement

# As the dispatcher has them.
MAX_PLACEMENTS = 4
PARKED_RETRY_S = 0.5
MAX_PARKED_S = 15.0
# Sequences are told apart by themselves.
NO_ID = RequestId("")
NO_TOKENS: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)

Ended = Callable[["RequestLife"], None]


@dataclass(slots=True)
class Stages:
    """Where the time to the first token went, in milliseconds."""

    route: float = 0.0
    queue: float = 0.0
    compute: float = 0.0
    transfer: float = 0.0
    wait: float = 0.0


class RequestLife:
    """Owned by the simulation. `fence` counts placements: what belongs to an older one is void."""

    __slots__ = (
        "_admitted", "_booking", "_cached_there", "_computed_s", "_decode", "_ended", "_events", "_excluded", "_fence",
        "_flow", "_front", "_hashes", "_held", "_landing", "_parked_s", "_placed_s", "_placement", "_prefill",
        "_settings", "_stages", "_timeout", "_token_ids", "_waiting", "arrival", "cached_tokens", "chunk_times_s",
        "chunk_tokens", "detail", "ended_s", "http_status", "num_generated", "outcome",
    )  # fmt: skip

    def __init__(
        self, arrival: SimulatedArrival, events: EventQueue, front: Front, settings: SimulationSettings, ended: Ended
    ) -> None:
        self.arrival = arrival
        self.num_generated = 0
        self.cached_tokens: int | None = None
        self.chunk_times_s: list[float] = []
        self.chunk_tokens: list[int] = []
        self.outcome: Outcome | None = None
        self.detail = ""
        self.http_status = 503  # of one that gets no token and no other answer
        self.ended_s = 0.0
        self._events = events
        self._front = front
        self._settings = settings
        self._ended = ended
        self._token_ids = arrival.token_ids()
        self._hashes = front.hashes(self._token_ids)
        self._fence = 0
        self._excluded: frozenset[Incarnation] = frozenset()
        self._placement: Placement | None = None
        self._booking: Booking | None = None
        self._prefill: SimulatedWorker | None = None
        self._decode: SimulatedWorker | None = None
        self._landing: list[BlockRef] | None = None  # reserved on the decode worker for what is being prefilled
        self._cached_there = 0  # tokens of the prompt that the decode worker has already
        self._parked_s: float | None = None
        self._placed_s = 0.0
        self._stages = Stages()
        self._computed_s = 0.0  # when the prompt was
        self._held: Sequence | None = None  # computed, its blocks kept for the transfer
        self._flow: Flow | None = None  # the prompt's KV on its way
        self._admitted = ExitStack()
        self._waiting: Waiting | None = None
        self._timeout: Timer | None = None
        events.after(settings.route_ms / 1e3, self._arrive)

    # --- placing ------------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        """Through the router's door, or refused there."""
        arrival, admission = self.arrival, self._front.admission
        num_tokens = len(self._token_ids)
        try:
            self._admitted.enter_context(admission.admitted(arrival.tenant))
            admission.charge(arrival.tenant, num_tokens)
            self._waiting = admission.submit(
                Arrival(
                    request_id=NO_ID,
                    tenant=arrival.tenant,
                    priority=arrival.priority,
                    deadline_s=arrival.time_s + self._settings.request_timeout_s,
                    count_tokens=lambda: self._front.uncached_tokens(self._hashes, num_tokens),
                    begin=self._begin,
                    fail=self._refused,
                )
            )
        except TandemError as error:
            self._refused(error)
            return
        if self._waiting is not None:
            self._timeout = self._events.after(self._settings.request_timeout_s, self._give_up)

    def _begin(self) -> None:
        """Its first placement. Raises `NoWorkersAvailable`."""
        self._stages.route = (self._events.now_s - self.arrival.time_s) * 1e3
        self._place()

    def _give_up(self) -> None:
        if self._placement is None and not self.num_generated:
            self._refused(DeadlineExceeded("no worker had room in time", stage="route"))

    def _refused(self, error: TandemError) -> None:
        self.http_status = error.http_status
        self._end(Outcome.HTTP_ERROR, f"{error.error_code}: {error.message}")

    def _place_again(self) -> None:
        try:
            self._place()
        except NoWorkersAvailable as error:
            self._park(error)

    def _place(self) -> None:
        max_tokens = self.arrival.output_tokens - self.num_generated
        placement, booking = self._front.place(self._token_ids, self._hashes, max_tokens, self._excluded)
        self._parked_s = None
        self._placement, self._booking = placement, booking
        self._placed_s = self._events.now_s
        self._decode = self._front.worker(placement.decode)
        self._decode.live.add(self)
        if placement.prefill:
            self._prefill = self._front.worker(placement.prefill[0])
            self._prefill.live.add(self)
            self._decode.reserve(self, self._token_ids, len(self._token_ids) + max_tokens)
        else:
            self._submit(self._decode, self._engine_request())

    def _park(self, error: TandemError) -> None:
        """No worker is there: waits a little for one to come back."""
        now_s = self._events.now_s
        if self._parked_s is None:
            self._parked_s = now_s
        if now_s - self._parked_s >= MAX_PARKED_S:
            self._refused(error)
        else:
            self._events.after(PARKED_RETRY_S, self._place_again)

    def granted(self, blocks: list[BlockRef], cached_tokens: int) -> None:
        """The decode worker has room for the prompt: the prefill worker is asked for it."""
        if self._prefill is None:
            raise RuntimeError("blocks were reserved for a request that no prefill worker has")
        self._landing, self._cached_there = blocks, cached_tokens
        self._stages.wait = (self._events.now_s - self._placed_s) * 1e3
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        self._submit(self._prefill, EngineRequest(NO_ID, self._token_ids, sampling, SCOPE_KEY, hold_blocks=True))

    def _submit(self, worker: SimulatedWorker, request: EngineRequest) -> None:
        try:
            worker.submit(self, request)
        except ServerOverloaded as error:
            self._leave_workers()
            self._refused(error)

    def _engine_request(self, landed: LandedPrompt | None = None) -> EngineRequest:
        sampling = SamplingParams(max_tokens=self.arrival.output_tokens, temperature=0.0, ignore_eos=True)
        return EngineRequest(
            NO_ID, self._token_ids, sampling, SCOPE_KEY, num_generated=self.num_generated, landed=landed
        )

    # --- tokens -------------------------------------------------------------------------------------------------------

    def tokens(self, tokens: StepTokens) -> None:
        """From the engine of a worker that has this request now."""
        sequence = tokens.sequence
        if sequence.request.hold_blocks:
            self._prefilled(sequence)
            return
        if tokens.is_first and sequence.request.landed is None:
            self._started(sequence)
        for time_s, num_tokens in tokens.chunks:
            self._give(time_s, num_tokens)
        if tokens.is_last:
            self._finish()

    def compute_started(self, sequence: Sequence) -> None:
        """From an engine: where this is a prefill worker's, the first layers' KV is on its way soon."""
        prefill, decode = self._prefill, self._decode
        if not sequence.request.hold_blocks or prefill is None or decode is None:
            return
        settings, fence = self._settings, self._fence
        num_prompt, num_cached = len(self._token_ids), sequence.cached_tokens
        ports = (prefill.port, decode.port, *self._front.fabric)
        num_bytes = max(0, num_prompt - self._cached_there) * settings.kv_bytes_per_token

        def sent() -> None:
            self._events.after(settings.round_trip_ms / 1e3, landed)

        def landed() -> None:
            prefill.engine.release(sequence)
            prefill.changed()
            if self._fence == fence:  # else a worker failed meanwhile
                prefill.live.discard(self)
                self._prefill = self._flow = self._held = None
                self._land(sequence.cached_tokens)

        self._flow = Flow(self._events, ports, num_bytes, settings.num_layers, sent)
        self._flow.compute_started(settings.model.prefill_ms(num_prompt - num_cached, num_cached))

    def _prefilled(self, sequence: Sequence) -> None:
        """The prompt is computed; its last layers are still on their way."""
        self._started(sequence)
        if self._flow is None:
            raise RuntimeError("a prompt was computed whose KV never began to move")
        self._computed_s, self._held = self._events.now_s, sequence
        self._flow.compute_ended()

    def _land(self, num_cached: int) -> None:
        decode, blocks = self._decode, self._landing
        if decode is None or blocks is None or self._booking is None:
            raise RuntimeError("a prompt landed where nothing was reserved")
        if not self.chunk_times_s:
            self._stages.transfer = (self._events.now_s - self._computed_s) * 1e3
        self._booking.first_token()
        if self.num_generated + 1 == self.arrival.output_tokens:
            self._give(self._events.now_s, 1)
            self._finish()
            return
        request = self._engine_request(LandedPrompt(tuple(blocks), GENERATED_TOKEN, None, num_cached))
        self._give(self._events.now_s, 1)
        self._submit(decode, request)
        if self.outcome is None:
            self._landing = None  # the engine's now

    def _started(self, sequence: Sequence) -> None:
        first_s = sequence.arrival_s if sequence.first_scheduled_s is None else sequence.first_scheduled_s
        compute_ms = (self._events.now_s - first_s) * 1e3
        if not self.chunk_times_s:
            self._stages.queue = (first_s - sequence.arrival_s) * 1e3
            self._stages.compute = compute_ms
            self.cached_tokens = sequence.cached_tokens
        if self._placement is not None:
            self._front.started(self._placement, len(self._token_ids), sequence.cached_tokens, compute_ms)
        if self._booking is not None and sequence.request.landed is None and not sequence.request.hold_blocks:
            self._booking.first_token()

    def _give(self, time_s: float, num_tokens: int) -> None:
        self.num_generated += num_tokens
        self.chunk_times_s.append(time_s)
        self.chunk_tokens.append(num_tokens)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def worker_failed(self, worker: SimulatedWorker) -> None:
        """Goes on elsewhere with what was generated, or ends."""
        self._excluded |= {worker.state.incarnation}
        self._leave_workers()
        if self._fence >= MAX_PLACEMENTS:
            self._end(Outcome.STREAM_ERROR, f"{MAX_PLACEMENTS} placements failed")
            return
        generated = np.full(self.num_generated, GENERATED_TOKEN, dtype=np.int32)
        self._token_ids = np.concatenate((self.arrival.token_ids(), generated))
        self._events.after(self._settings.round_trip_ms / 1e3, self._place_again)

    def _leave_workers(self) -> None:
        """What the workers still do for this placement is void."""
        self._fence += 1
        if self._booking is not None:
            self._booking.release()
        if self._flow is not None:
            self._flow.cancel()
        if self._held is not None and self._prefill is not None:
            self._prefill.engine.release(self._held)
        if self._landing is not None and self._decode is not None:
            self._decode.engine.pool.release(self._landing)
        for worker in (self._prefill, self._decode):
            if worker is not None:
                worker.live.discard(self)
                worker.changed()
        self._placement = self._booking = self._prefill = self._decode = self._landing = None
        self._flow = self._held = None

    def _finish(self) -> None:
        self._leave_workers()
        self._end(Outcome.OK, "")

    def _end(self, outcome: Outcome, detail: str) -> None:
        self.outcome, self.detail, self.ended_s = outcome, detail, self._events.now_s
        if self._timeout is not None:
            self._timeout.cancel()
        if self._waiting is not None:
            self._front.admission.withdraw(self._waiting)
        self._front.admission.charge(self.arrival.tenant, self.num_generated)
        self._admitted.close()
        # A day's prompts would fill the memory.
        self._token_ids, self._hashes = NO_TOKENS, []
        self._ended(self)

    @property
    def fence(self) -> int:
        return self._fence

    @property
    def stages(self) -> Stages:
        return self._stages

    def record(self, now_s: float) -> RequestRecord:
        """As the load generator would have written it."""
        is_ok = self.outcome is Outcome.OK
        stages = self._stages
        arrival = self.arrival
        return RequestRecord(
            index=arrival.index,
            traffic_class=str(arrival.tenant),
            session=-1,
            turn=0,
            is_warmup=False,
            intended_s=arrival.time_s,
            sent_s=arrival.time_s,
            ended_s=self.ended_s if self.outcome else now_s,
            outcome=self.outcome or Outcome.UNFINISHED,
            detail=self.detail,
            http_status=200 if is_ok or self.chunk_times_s else self.http_status,
            finish_reason="length" if is_ok else "",
            chunk_times_s=tuple(self.chunk_times_s),
            chunk_tokens=tuple(self.chunk_tokens),
            prompt_tokens=arrival.num_prompt_tokens,
            cached_tokens=self.cached_tokens,
            shareable_tokens=arrival.shareable_tokens,
            stages=TtftStages(
                stages.route, stages.queue, stages.compute, stages.transfer, stages.wait, 0.0, 0, "simulated"
            ),
        )
