"""One choice's generation as the router follows it: placed, running, moved when its worker is lost, ended.

    NEW ──place──> RUNNING ──end──> ENDED
                    │   ^
      worker lost   v   │ placed again: prompt + generated tokens, fence + 1
                   PARKED ──nobody in time──> ENDED (error)

Noise is keyed by position, so a sequence that goes on elsewhere has the tokens it would have had: nothing is sent twice
and nothing is lost. It knows nothing of text or of the client.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from tandem.v1 import common_pb2, worker_pb2

from cluster.errors import TandemError, WorkerUnavailable
from cluster.identity import BlockHash, Incarnation
from cluster.sampling_params import SamplingParams
from router.bookings import Booking
from router.placement import Placement
from router.worker_session import WorkerSession


class SequenceState(enum.Enum):
    NEW = "new"
    RUNNING = "running"
    PARKED = "parked"  # its worker is lost and no other is there yet
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What one engine step, or an end, gave a sequence."""

    index: int
    token_ids: SequenceOf[int] = ()
    event: worker_pb2.RequestEvent | None = None
    error: TandemError | None = None


class UpdateSink(Protocol):
    """Where a sequence's updates go. Must not block."""

    def put(self, update: SequenceUpdate) -> None: ...


class SequenceMover(Protocol):
    """Who decides where a sequence goes when its worker fails."""

    def sequence_started(self, sequence: Sequence, event: worker_pb2.RequestEvent) -> None: ...

    def sequence_failed(self, sequence: Sequence, error: TandemError) -> None: ...


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What stays the same wherever a sequence runs."""

    submission_id: str
    index: int  # of the choice within the answer
    token_ids: SequenceOf[int]
    sampling: SamplingParams
    scope: common_pb2.CacheScope
    tenant: str = ""
    priority: int = 0
    session_key: str = ""
    block_hashes: SequenceOf[BlockHash] = ()  # of the prompt's full blocks, where the policy wants them
    deadline_s: float | None = None  # on the router's clock
    traceparent: str = ""  # empty: no trace


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by one answer; the dispatcher places it."""

    spec: SequenceSpec
    sink: UpdateSink
    mover: SequenceMover
    state: SequenceState = SequenceState.NEW
    fence: int = 0
    generated: list[int] = field(default_factory=list)
    excluded: set[Incarnation] = field(default_factory=set)  # failed it
    waited_s: float = 0.0  # in the router, for its first placement
    num_failures: int = 0  # placements that did not go well
    num_losses: int = 0  # of them, workers that died with it
    session: WorkerSession | None = None
    booking: Booking | None = None
    has_started: bool = False  # a first token has come
    placement: Placement | None = None  # the last one
    no_match_because: str = ""  # why that one counts on no cached token anywhere; empty: somebody holds some

    @property
    def submission_id(self) -> str:
        return self.spec.submission_id

    @property
    def is_complete(self) -> bool:
        """Nothing is left to generate, though its worker never said so."""
        sampling = self.spec.sampling
        num_generated = len(self.generated)
        is_stopped = bool(self.generated) and self.generated[-1] in sampling.stop_token_ids
        return num_generated >= sampling.max_tokens or (is_stopped and num_generated > sampling.min_tokens)

    def placed(self, placement: Placement, session: WorkerSession, booking: Booking) -> None:
        self.state = SequenceState.RUNNING
        self.placement = placement
        self.session = session
        self.booking = booking

    def on_step(self, token_ids: SequenceOf[int], event: worker_pb2.RequestEvent | None) -> None:
        """From the session: new tokens, perhaps the end."""
        if self.state is not SequenceState.RUNNING:
            return
        if token_ids:
            if event is not None and not self.has_started:
                self.mover.sequence_started(self, event)
            self.has_started = True
            self.generated.extend(token_ids)
            if self.booking is not None:
                self.booking.first_token()
        if event is not None and event.finish_reason in _LOST_REASONS:
            self.on_failure(WorkerUnavailable("the worker gave the request up", stage="decode"))
            return
        if event is not None and event.finish_reason:
            self._leave_worker()
            self.state = SequenceState.ENDED
        self.sink.put(SequenceUpdate(self.spec.index, token_ids, event))

    def on_failure(self, error: TandemError) -> None:
        """From the session: this worker cannot go on with it."""
        if self.state is SequenceState.RUNNING:
            self.mover.sequence_failed(self, error)

    def leave_failed_worker(self) -> None:
        """Before it is placed again: that worker is not asked again."""
        if self.session is not None:
            self.excluded.add(self.session.worker.incarnation)
        self._leave_worker()
        self.fence += 1
        self.state = SequenceState.PARKED

    def fail(self, error: TandemError) -> None:
        """The end, without an answer."""
        if self.state is not SequenceState.ENDED:
            self._leave_worker()
            self.state = SequenceState.ENDED
            self.sink.put(SequenceUpdate(self.spec.index, error=error))

    def complete(self) -> None:
        """The end, when the last token came and the worker died before it said so."""
        stopped = self.generated[-1] in self.spec.sampling.stop_token_ids
        reason = common_pb2.FINISH_REASON_STOP if stopped else common_pb2.FINISH_REASON_LENGTH
        self._leave_worker()
        self.state = SequenceState.ENDED
        event = worker_pb2.RequestEvent(request_id=self.submission_id, fence=self.fence, finish_reason=reason)
        self.sink.put(SequenceUpdate(self.spec.index, event=event))

    def cancel(self, reason: str) -> None:
        """Nobody wants the rest: the worker hears it at once. The sink hears nothing more."""
        if self.state is SequenceState.ENDED:
            return
        if self.session is not None:
            self.session.cancel(self, reason)
        self._leave_worker()
        self.state = SequenceState.ENDED

    def _leave_worker(self) -> None:
        if self.session is not None:
            self.session.forget(self)
            self.session = None
        if self.booking is not None:
            self.booking.release()
            self.booking = None


_LOST_REASONS = (common_pb2.FINISH_REASON_CANCELLED, common_pb2.FINISH_REASON_ERROR)
