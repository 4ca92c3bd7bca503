"""The prefill worker's side of one attempt as a pure machine: (attempt, event, now) gives (attempt, actions).

    NEW ─> ACCEPTED ─> QUEUED ─> COMPUTING (and pushing) ─> SEALED ─> COMMITTED ─acknowledged─> CANCELLING ─> FREE
              │           │          │                        │ ^         │ └─resend─> SEALED      ^    └────> DRAINED
              └─refused   └──────────┴─ cancel, peer gone, ───┘ └─────────┘     failure, deadline ─┘
                └> REJECTED

No I/O, no clock. Every way out goes through CANCELLING: source blocks are released only when the engine has let go of
them and no posted operation reads them. FREE was acknowledged; DRAINED was not, and says so to a peer that can hear it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from cluster.errors import DeadlineExceeded, KvTransferFailed, TandemError
from kv_transfer import prefill_events as on
from kv_transfer.prefill_events import PrefillAction, PrefillEvent
from kv_transfer.protocol_limits import MAX_MISSED_LISTINGS, MAX_RESENDS, ProtocolLimits, ProtocolViolation
from kv_transfer.transfer_ref import TransferRef


class PrefillPhase(enum.Enum):
    NEW = "new"
    ACCEPTED = "accepted"
    QUEUED = "queued"
    COMPUTING = "computing"
    SEALED = "sealed"
    COMMITTED = "committed"
    CANCELLING = "cancelling"
    FREE = "free"
    DRAINED = "drained"
    REJECTED = "rejected"


ENDED = frozenset({PrefillPhase.FREE, PrefillPhase.DRAINED, PrefillPhase.REJECTED})
_LIVE = frozenset({PrefillPhase.QUEUED, PrefillPhase.COMPUTING, PrefillPhase.SEALED, PrefillPhase.COMMITTED})


@dataclass(frozen=True, slots=True)
class PrefillTransfer:
    """The whole state of one attempt."""

    ref: TransferRef
    deadline_s: float  # on the caller's clock
    credit_bytes: int
    max_credit_bytes: int  # what D said of itself: so much may be on its way
    asked_again_bytes: int = 0
    phase: PrefillPhase = PrefillPhase.NEW
    progress_due_s: float = 0.0
    sealed_push: on.PushSealed | None = None  # all cells posted and retired; a resend takes it back
    num_resends: int = 0
    num_missed_listings: int = 0
    is_acknowledged: bool = False
    is_peer_gone: bool = False
    has_engine_let_go: bool = False
    drained: on.PushDrained | None = None
    drain_by_s: float = 0.0
    is_destroying: bool = False
    limits: ProtocolLimits = field(default_factory=ProtocolLimits)

    @property
    def is_over(self) -> bool:
        """Nothing is held and nothing is awaited any more."""
        return self.phase in ENDED


Outcome: TypeAlias = tuple[PrefillTransfer, tuple[PrefillAction, ...]]
Handler: TypeAlias = Callable[[PrefillTransfer, Any, float], Outcome]


def apply(transfer: PrefillTransfer, event: PrefillEvent, now: float) -> Outcome:
    """The attempt after the event, and what is to be done, in order. Raises `ProtocolViolation` for our own bugs."""
    handler = _TRANSITIONS.get((transfer.phase, type(event)))
    if handler is None:
        return transfer, ()
    after, actions = handler(transfer, event, now)
    check_invariants(after, actions)
    return after, actions


def next_tick_s(transfer: PrefillTransfer) -> float | None:
    """When `Tick` can change something at the earliest; None: never."""
    if transfer.phase is PrefillPhase.CANCELLING:
        return None if transfer.is_destroying else transfer.drain_by_s
    if transfer.phase in _LIVE - {PrefillPhase.COMMITTED}:
        return min(transfer.deadline_s, transfer.progress_due_s)
    return None if transfer.phase in ENDED else transfer.deadline_s


# --- the way through --------------------------------------------------------------------------------------------------


def _asked(transfer: PrefillTransfer, event: on.PrefillAsked, now: float) -> Outcome:
    return replace(transfer, phase=PrefillPhase.ACCEPTED), (on.SubmitToEngine(),)


def _queued(transfer: PrefillTransfer, event: on.EngineQueued, now: float) -> Outcome:
    progress_due_s = now + transfer.limits.progress_s
    return replace(transfer, phase=PrefillPhase.QUEUED, progress_due_s=progress_due_s), (on.SendAccept(),)


def _refused(transfer: PrefillTransfer, event: on.EngineRefused, now: float) -> Outcome:
    return replace(transfer, phase=PrefillPhase.REJECTED), (on.SendReject(event.error),)


def _compute_started(transfer: PrefillTransfer, event: on.ComputeStarted, now: float) -> Outcome:
    return replace(transfer, phase=PrefillPhase.COMPUTING), ()


def _compute_ended(transfer: PrefillTransfer, event: on.ComputeEnded, now: float) -> Outcome:
    return _commit_when_sealed(replace(transfer, phase=PrefillPhase.SEALED))


def _push_sealed(transfer: PrefillTransfer, event: on.PushSealed, now: float) -> Outcome:
    """The last cells may have left before the engine's step is over and its token known."""
    return _commit_when_sealed(replace(transfer, sealed_push=event))


def _commit_when_sealed(transfer: PrefillTransfer) -> Outcome:
    sealed = transfer.sealed_push
    if transfer.phase is not PrefillPhase.SEALED or sealed is None:
        return transfer, ()
    commit = on.SendCommit(sealed.num_frames, sealed.num_bytes, transfer.num_resends)
    return replace(transfer, phase=PrefillPhase.COMMITTED), (commit,)


def _resend(transfer: PrefillTransfer, event: on.ResendAsked, now: float) -> Outcome:
    num_resends = MAX_RESENDS - event.tries_left
    if num_resends <= transfer.num_resends:
        return transfer, ()  # a repeated message
    if num_resends > MAX_RESENDS:
        return _stop(transfer, now, on.SendFailedCommit(_failed("asked to resend more often than allowed")))
    transfer = replace(
        transfer,
        phase=PrefillPhase.SEALED,
        sealed_push=None,
        num_resends=num_resends,
        asked_again_bytes=transfer.asked_again_bytes + event.num_bytes,
        progress_due_s=now + transfer.limits.progress_s,
    )
    return transfer, (on.ResendCells(event.ranges),)


def _credit(transfer: PrefillTransfer, event: on.CreditGranted, now: float) -> Outcome:
    """Never more than D's own limit, on top of what was sent: it would be flooded on its own word. What was asked for
    again may have come late after all, and pay twice."""
    credit_bytes = transfer.credit_bytes + event.num_bytes
    unspent_bytes = credit_bytes - event.posted_bytes - transfer.asked_again_bytes
    if unspent_bytes > transfer.max_credit_bytes:
        what = f"granted {unspent_bytes} bytes, {transfer.max_credit_bytes} is the decode worker's own limit"
        return _stop(transfer, now, on.SendFailedCommit(_failed(what)))
    return replace(transfer, credit_bytes=credit_bytes), (on.AddPushCredit(event.num_bytes),)


# --- the ways out -----------------------------------------------------------------------------------------------------


def _acknowledged(transfer: PrefillTransfer, event: on.Acknowledged, now: float) -> Outcome:
    return _stop(replace(transfer, is_acknowledged=event.is_ok), now)


def _cancelled(transfer: PrefillTransfer, event: on.CancelAsked, now: float) -> Outcome:
    return _stop(transfer, now)


def _peer_gone(transfer: PrefillTransfer, event: on.DecodeWorkerGone, now: float) -> Outcome:
    return _stop(replace(transfer, is_peer_gone=True), now)


def _peer_gone_meanwhile(transfer: PrefillTransfer, event: on.DecodeWorkerGone, now: float) -> Outcome:
    return replace(transfer, is_peer_gone=True), ()


def _listed(transfer: PrefillTransfer, event: on.DecodeWorkerListed, now: float) -> Outcome:
    missed = 0 if event.is_listed else transfer.num_missed_listings + 1
    transfer = replace(transfer, num_missed_listings=missed)
    return _stop(transfer, now) if missed >= MAX_MISSED_LISTINGS else (transfer, ())


def _failed_part(transfer: PrefillTransfer, event: on.ComputeFailed | on.PushFailed, now: float) -> Outcome:
    return _stop(transfer, now, on.SendFailedCommit(event.error))


def _stop(transfer: PrefillTransfer, now: float, *first: PrefillAction) -> Outcome:
    transfer = replace(transfer, phase=PrefillPhase.CANCELLING, drain_by_s=now + transfer.limits.drain_s)
    return transfer, (*first, on.CancelPush(), on.CancelCompute())


def _engine_let_go(transfer: PrefillTransfer, event: on.EngineLetGo | on.EngineRefused, now: float) -> Outcome:
    return _free_when_silent(replace(transfer, has_engine_let_go=True))


def _push_drained(transfer: PrefillTransfer, event: on.PushDrained, now: float) -> Outcome:
    return _free_when_silent(replace(transfer, drained=event))


def _free_when_silent(transfer: PrefillTransfer) -> Outcome:
    drained = transfer.drained
    if transfer.phase is not PrefillPhase.CANCELLING or drained is None or not transfer.has_engine_let_go:
        return transfer, ()
    if transfer.is_acknowledged:
        return replace(transfer, phase=PrefillPhase.FREE), (on.ReleaseBlocks(),)
    told = () if transfer.is_peer_gone else (on.SendDrained(drained.num_frames),)
    return replace(transfer, phase=PrefillPhase.DRAINED), (on.ReleaseBlocks(), *told)


def _cancelled_again(transfer: PrefillTransfer, event: on.CancelAsked, now: float) -> Outcome:
    """The answer may not have been heard: it is the same."""
    if transfer.drained is None or transfer.is_peer_gone:
        return transfer, ()
    return transfer, (on.SendDrained(transfer.drained.num_frames),)


# --- time -------------------------------------------------------------------------------------------------------------


def _tick(transfer: PrefillTransfer, event: on.Tick, now: float) -> Outcome:
    if now >= transfer.deadline_s:
        error = DeadlineExceeded("the request's deadline passed in the prefill worker", stage="prefill")
        return _stop(transfer, now, on.SendFailedCommit(error))
    if transfer.phase in _LIVE and transfer.phase is not PrefillPhase.COMMITTED and now >= transfer.progress_due_s:
        progress_due_s = now + transfer.limits.progress_s
        return replace(transfer, progress_due_s=progress_due_s), (on.SendProgress(),)
    return transfer, ()


def _tick_cancelling(transfer: PrefillTransfer, event: on.Tick, now: float) -> Outcome:
    if transfer.is_destroying or transfer.drained is not None or now < transfer.drain_by_s:
        return transfer, ()
    return replace(transfer, is_destroying=True), (on.DestroyEndpoint(),)


def _failed(message: str) -> TandemError:
    return KvTransferFailed(message, stage="transfer")


# --- invariants -------------------------------------------------------------------------------------------------------


def check_invariants(after: PrefillTransfer, actions: tuple[PrefillAction, ...]) -> None:
    """What holds after every event. Raises `ProtocolViolation`."""
    sealed = after.sealed_push
    if sealed is not None and sealed.num_bytes > after.credit_bytes:
        raise ProtocolViolation(f"{sealed.num_bytes} bytes were sent on a credit of {after.credit_bytes}")
    if after.phase is PrefillPhase.COMMITTED and sealed is None:
        raise ProtocolViolation("committed before everything was sent")
    is_silent = after.has_engine_let_go and after.drained is not None
    if any(isinstance(action, on.ReleaseBlocks) for action in actions) and not is_silent:
        raise ProtocolViolation("source blocks would be released while somebody reads them")
    if after.phase in (PrefillPhase.FREE, PrefillPhase.DRAINED) and not is_silent:
        raise ProtocolViolation(f"phase {after.phase.value} while a writer is alive")


def _in(phases: frozenset[PrefillPhase], event: type, handler: Handler) -> dict[tuple[PrefillPhase, type], Handler]:
    return {(phase, event): handler for phase in phases}


_BEFORE_END = _LIVE | {PrefillPhase.ACCEPTED}
_TRANSITIONS: dict[tuple[PrefillPhase, type], Handler] = {
    (PrefillPhase.NEW, on.PrefillAsked): _asked,
    (PrefillPhase.ACCEPTED, on.EngineQueued): _queued,
    (PrefillPhase.ACCEPTED, on.EngineRefused): _refused,
    (PrefillPhase.QUEUED, on.ComputeStarted): _compute_started,
    (PrefillPhase.COMPUTING, on.ComputeEnded): _compute_ended,
    (PrefillPhase.COMPUTING, on.PushSealed): _push_sealed,
    (PrefillPhase.SEALED, on.PushSealed): _push_sealed,
    (PrefillPhase.COMMITTED, on.ResendAsked): _resend,
    (PrefillPhase.COMMITTED, on.Acknowledged): _acknowledged,
    **_in(_LIVE, on.CreditGranted, _credit),
    **_in(_LIVE, on.ComputeFailed, _failed_part),
    **_in(_LIVE, on.PushFailed, _failed_part),
    **_in(_LIVE, on.DecodeWorkerListed, _listed),
    **_in(_BEFORE_END, on.EngineLetGo, _engine_let_go),
    **_in(_BEFORE_END, on.CancelAsked, _cancelled),
    **_in(_BEFORE_END, on.DecodeWorkerGone, _peer_gone),
    **_in(_BEFORE_END, on.Tick, _tick),
    (PrefillPhase.CANCELLING, on.EngineLetGo): _engine_let_go,
    (PrefillPhase.CANCELLING, on.EngineRefused): _engine_let_go,
    (PrefillPhase.CANCELLING, on.PushDrained): _push_drained,
    (PrefillPhase.CANCELLING, on.DecodeWorkerGone): _peer_gone_meanwhile,
    (PrefillPhase.CANCELLING, on.Tick): _tick_cancelling,
    (PrefillPhase.DRAINED, on.CancelAsked): _cancelled_again,
}
