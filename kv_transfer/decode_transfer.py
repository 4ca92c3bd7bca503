"""The decode worker's side of one transfer as a pure machine: (transfer, event, now) gives (transfer, actions).

    NEW ─> MATCH ─> RESERVED ─> REQUESTED ─> RECEIVING ─> SEALED ─> VERIFIED ─> RUNNABLE
             ^         ^  └─no candidate─> LOCAL | FAILED    │          └─engine refuses─> FAILED
             │         │            │          │          │  └─resend, 2 tries─> RECEIVING
             │         │            └──────────┴──────────┴─ reject, time-out, dead peer, bad bytes, cancel
             │         │                         v
             │         └─rejected, same blocks─ CANCELLING ─> CANCELLED | FAILED | LOCAL
             └───────────next candidate────────┘    └─ a writer may be alive: its blocks ─> QUARANTINED ─> free

No I/O, no clock, no protobuf. A reservation holds all that the request needs, so what has landed can run. Blocks of an
attempt are given back only when every possible writer is proven silent: by the closed fence of a transport whose
receiver copies, else by Drained from each rank or by the destroyed endpoint; until then they are in quarantine, and the
transfer goes on with others. Events of attempts that are over change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from cluster.errors import DeadlineExceeded, KvTransferFailed, NoWorkersAvailable, TandemError, WorkerUnavailable
from kv_transfer import decode_events as on
from kv_transfer.decode_events import DecodeAction, DecodeEvent
from kv_transfer.decode_state import (
    ENDED,
    Attempt,
    DecodePhase,
    DecodeTransfer,
    Ending,
    EndingKind,
    QuarantinedAttempt,
    check_invariants,
)
from kv_transfer.protocol_limits import MAX_MISSED_LISTINGS, ProtocolViolation
from kv_transfer.transfer_ref import TransferRef
from kv_transfer.transport import CancelGuarantee

Outcome: TypeAlias = tuple[DecodeTransfer, tuple[DecodeAction, ...]]
Handler: TypeAlias = Callable[[DecodeTransfer, Any, float], Outcome]


def apply(transfer: DecodeTransfer, event: DecodeEvent, now: float) -> Outcome:
    """The transfer after the event, and what is to be done, in order. Raises `ProtocolViolation` for our own bugs."""
    ref = getattr(event, "ref", None)
    handler: Handler | None
    if ref is not None and (transfer.attempt is None or ref != transfer.attempt.ref):
        handler = _IN_QUARANTINE.get(type(event))
    elif isinstance(event, on.Tick):
        return _checked_after(transfer, *_tick(transfer, now))
    elif isinstance(event, on.PeerGone):
        return _checked_after(transfer, *_peer_gone(transfer, event, now))
    else:
        handler = _TRANSITIONS.get((transfer.phase, type(event)))
    if handler is None:
        return transfer, ()
    return _checked_after(transfer, *handler(transfer, event, now))


def _checked_after(before: DecodeTransfer, after: DecodeTransfer, actions: tuple[DecodeAction, ...]) -> Outcome:
    check_invariants(before, after)
    return after, actions


def next_tick_s(transfer: DecodeTransfer) -> float | None:
    """When `Tick` can change something at the earliest; None: never."""
    times = [held.destroy_by_s for held in transfer.quarantined if not held.is_destroying]
    if transfer.phase not in ENDED and transfer.phase is not DecodePhase.NEW:
        times.append(transfer.drain_by_s if transfer.phase is DecodePhase.CANCELLING else transfer.request.deadline_s)
    if transfer.phase is DecodePhase.RESERVED:
        times.append(transfer.connect_by_s)
    attempt = transfer.attempt
    if attempt is not None and transfer.phase in _AWAITING_PEER:
        times.append(attempt.answer_by_s)
        if transfer.phase is DecodePhase.SEALED and not attempt.is_checking:
            times.append(attempt.check_by_s)
    return min(times, default=None)


# --- reserve and ask --------------------------------------------------------------------------------------------------


def _start(transfer: DecodeTransfer, event: on.TransferWanted, now: float) -> Outcome:
    if not transfer.request.candidates:
        return _fall_back(transfer, NoWorkersAvailable("no prefill worker was named", stage="prefill"))
    return replace(transfer, phase=DecodePhase.MATCH), (on.MatchAndReserve(),)


def _reserved(transfer: DecodeTransfer, event: on.BlocksReserved, now: float) -> Outcome:
    transfer = replace(transfer, matched=event.matched, destination=event.destination, spare=event.spare)
    return _connect(transfer, now)


def _reservation_refused(transfer: DecodeTransfer, event: on.ReservationRefused, now: float) -> Outcome:
    return _end(transfer, DecodePhase.FAILED, on.ReportFailure(event.error))


def _connect(transfer: DecodeTransfer, now: float) -> Outcome:
    """Turns to the next candidate; the blocks that we hold are good for it."""
    if transfer.num_asked == len(transfer.request.candidates):
        return _fall_back(transfer, transfer.last_error or NoWorkersAvailable("no prefill worker was left"))
    connect_by_s = now + transfer.request.limits.connect_s
    transfer = replace(transfer, phase=DecodePhase.RESERVED, attempt=None, ending=None, connect_by_s=connect_by_s)
    return transfer, (on.ConnectPeer(transfer.candidate),)


def _peer_ready(transfer: DecodeTransfer, event: on.PeerReady, now: float) -> Outcome:
    if event.peer != transfer.candidate:
        return transfer, ()
    request = transfer.request
    ref = TransferRef(request.transfer_id, transfer.epoch + 1)
    attempt = Attempt(
        ref=ref,
        peer=event.peer,
        guarantee=event.guarantee,
        num_ranks=event.num_ranks,
        answer_by_s=now + request.limits.accept_s,
        granted_bytes=request.credit_bytes,
    )
    ask = on.SendPrefill(
        ref=ref,
        peer=event.peer,
        destination=transfer.destination,
        num_have_blocks=len(transfer.matched),
        credit_bytes=request.credit_bytes,
        deadline_s=max(0.0, request.deadline_s - now),
    )
    transfer = replace(
        transfer,
        phase=DecodePhase.REQUESTED,
        epoch=ref.epoch,
        num_asked=transfer.num_asked + 1,
        attempt=attempt,
    )
    return transfer, (on.OpenLanding(ref, transfer.destination, len(transfer.matched)), ask)


def _peer_unavailable(transfer: DecodeTransfer, event: on.PeerUnavailable | on.PeerGone, now: float) -> Outcome:
    if event.peer != transfer.candidate:
        return transfer, ()
    return _connect(replace(transfer, num_asked=transfer.num_asked + 1, last_error=event.error), now)


# --- receive ----------------------------------------------------------------------------------------------------------


def _accepted(transfer: DecodeTransfer, event: on.Accepted, now: float) -> Outcome:
    return _alive(replace(transfer, phase=DecodePhase.RECEIVING), now), ()


def _progress(transfer: DecodeTransfer, event: on.ProgressMade, now: float) -> Outcome:
    return _alive(transfer, now), ()


def _landed(transfer: DecodeTransfer, event: on.FramesLanded, now: float) -> Outcome:
    """Frames and messages travel on two ways, so a frame may be here before Accept."""
    attempt = _attempt(transfer)
    if event.num_bytes <= attempt.landed_bytes:
        return transfer, ()
    attempt = replace(
        attempt,
        landed_bytes=event.num_bytes,
        num_verified=max(attempt.num_verified, event.num_verified),
        num_bad=max(attempt.num_bad, event.num_bad),
        check_by_s=now + transfer.request.limits.arrival_grace_s,
    )
    transfer = _alive(replace(transfer, attempt=attempt), now)
    if attempt.landed_bytes > attempt.granted_bytes:
        return _retire(transfer, _retry("the peer sent more than its credit", may_salvage=True), now)
    transfer, credit = _grant(transfer)
    transfer, check = _check_when_due(transfer, now)
    return transfer, (*credit, *check)


def _committed(transfer: DecodeTransfer, event: on.RankCommitted, now: float) -> Outcome:
    if event.failure is not None:
        return _retire(transfer, Ending(EndingKind.RETRY, event.failure), now)
    attempt = _attempt(transfer)
    if event.rank in dict(attempt.committed_frames) or event.num_resends != attempt.num_resends:
        return transfer, ()
    if not 0 <= event.rank < attempt.num_ranks:
        return _retire(transfer, _retry(f"rank {event.rank} of {attempt.num_ranks} committed"), now)
    attempt = replace(
        attempt,
        committed_frames=(*attempt.committed_frames, (event.rank, event.num_frames)),
        check_by_s=now + transfer.request.limits.arrival_grace_s,
    )
    phase = DecodePhase.SEALED if attempt.is_committed else DecodePhase.RECEIVING
    return _check_when_due(_alive(replace(transfer, phase=phase, attempt=attempt), now), now)


def _check_when_due(transfer: DecodeTransfer, now: float) -> Outcome:
    """Once all ranks committed: when all frames are here, or none came for the grace period."""
    attempt = _attempt(transfer)
    if transfer.phase is not DecodePhase.SEALED or attempt.is_checking:
        return transfer, ()
    if not attempt.has_all_frames and now < attempt.check_by_s:
        return transfer, ()
    return replace(transfer, attempt=replace(attempt, is_checking=True)), (on.CheckArrival(attempt.ref),)


def _checked(transfer: DecodeTransfer, event: on.ArrivalChecked, now: float) -> Outcome:
    attempt = _attempt(transfer)
    if not attempt.is_checking:
        return transfer, ()
    ack = on.SendCommitAck(attempt.ref, False, event.missing)
    if not event.generations_match:
        return _retire(transfer, _retry("a destination block changed hands"), now, ack)
    if event.missing:
        if attempt.tries_left == 0 or attempt.is_peer_gone:
            return _retire(transfer, _retry("KV is missing after every try", may_salvage=True), now, ack)
        return _resend(transfer, event, now)
    if not event.digests_match:
        return _retire(transfer, _retry("the root digest is not the one that was committed"), now, ack)
    verified = replace(attempt, is_checking=False, is_verified=True)
    transfer = replace(transfer, phase=DecodePhase.VERIFIED, attempt=verified)
    return transfer, (on.SendCommitAck(attempt.ref, True), on.Fence(attempt.ref))


def _resend(transfer: DecodeTransfer, event: on.ArrivalChecked, now: float) -> Outcome:
    attempt = _attempt(transfer)
    attempt = replace(
        attempt,
        is_checking=False,
        committed_frames=(),
        num_bad_before=attempt.num_bad,
        tries_left=attempt.tries_left - 1,
        granted_bytes=attempt.granted_bytes + event.missing_bytes,  # what was lost used its credit up
    )
    transfer = _alive(replace(transfer, phase=DecodePhase.RECEIVING, attempt=attempt), now)
    actions: list[DecodeAction] = []
    if event.missing_bytes:
        actions.append(on.SendCredit(attempt.ref, event.missing_bytes))
    actions.append(on.SendResend(attempt.ref, event.missing, attempt.tries_left))
    return transfer, tuple(actions)


def _grant(transfer: DecodeTransfer) -> Outcome:
    """Tops the credit up when half of the window is used, so that a message pays for many frames."""
    attempt = _attempt(transfer)
    window = transfer.request.credit_bytes
    if transfer.phase is DecodePhase.SEALED or 2 * (attempt.granted_bytes - attempt.landed_bytes) > window:
        return transfer, ()
    grant = attempt.landed_bytes + window - attempt.granted_bytes
    attempt = replace(attempt, granted_bytes=attempt.granted_bytes + grant)
    return replace(transfer, attempt=attempt), (on.SendCredit(attempt.ref, grant),)


def _listed(transfer: DecodeTransfer, event: on.PeerListed, now: float) -> Outcome:
    attempt = _attempt(transfer)
    missed = 0 if event.is_listed else attempt.num_missed_listings + 1
    transfer = replace(transfer, attempt=replace(attempt, num_missed_listings=missed))
    if missed < MAX_MISSED_LISTINGS:
        return transfer, ()
    return _retire(transfer, _retry("the prefill worker does not know this transfer", may_salvage=True), now)


# --- run --------------------------------------------------------------------------------------------------------------


def _fence_closed_on_success(transfer: DecodeTransfer, event: on.FenceClosed, now: float) -> Outcome:
    """Nothing can land any more: only now the blocks are somebody else's to read."""
    attempt = _attempt(transfer)
    if attempt.is_admitting:
        return transfer, ()
    transfer = replace(transfer, attempt=replace(attempt, is_admitting=True))
    return transfer, (on.AdmitToEngine(attempt.ref, transfer.blocks),)


def _admitted(transfer: DecodeTransfer, event: on.EngineAdmitted, now: float) -> Outcome:
    if not _attempt(transfer).is_admitting:
        raise ProtocolViolation("the engine took blocks that were not offered")
    return replace(transfer, phase=DecodePhase.RUNNABLE, matched=(), destination=(), spare=()), ()


def _engine_refused(transfer: DecodeTransfer, event: on.EngineRefused, now: float) -> Outcome:
    return _end(transfer, DecodePhase.FAILED, on.ReportFailure(event.error))


# --- end an attempt ---------------------------------------------------------------------------------------------------


def _rejected(transfer: DecodeTransfer, event: on.Rejected, now: float) -> Outcome:
    is_untouched = transfer.phase is DecodePhase.REQUESTED and _attempt(transfer).landed_bytes == 0
    return _retire(transfer, Ending(EndingKind.REJECTED if is_untouched else EndingKind.RETRY, event.error), now)


def _peer_gone(transfer: DecodeTransfer, event: on.PeerGone, now: float) -> Outcome:
    """Ends the attempt with that peer; its earlier ones, in quarantine, will never hear Drained."""
    actions: list[DecodeAction] = []
    for held in transfer.quarantined:
        if held.peer == event.peer and not held.is_destroying:
            transfer = _replace_held(transfer, held, replace(held, is_destroying=True))
            actions.append(on.DestroyEndpoint(held.ref, held.peer))
    handler = _TRANSITIONS.get((transfer.phase, on.PeerGone))
    if handler is None:
        return transfer, tuple(actions)
    transfer, more = handler(transfer, event, now)
    return transfer, (*actions, *more)


def _peer_of_attempt_gone(transfer: DecodeTransfer, event: on.PeerGone, now: float) -> Outcome:
    attempt = _attempt(transfer)
    if event.peer != attempt.peer:
        return transfer, ()
    if transfer.phase is DecodePhase.SEALED and attempt.is_checking:
        return replace(transfer, attempt=replace(attempt, is_peer_gone=True)), ()  # all it had to say is here
    return _retire(transfer, Ending(EndingKind.RETRY, event.error, may_salvage=True, is_peer_gone=True), now)


def _link_failed(transfer: DecodeTransfer, event: on.LinkFailed, now: float) -> Outcome:
    return _retire(transfer, Ending(EndingKind.RETRY, event.error, may_salvage=True), now)


def _cancel_attempt(transfer: DecodeTransfer, event: on.RequestCancelled, now: float) -> Outcome:
    return _retire(transfer, Ending(EndingKind.CANCEL, KvTransferFailed("the request was cancelled")), now)


def _cancel_before(transfer: DecodeTransfer, event: on.RequestCancelled, now: float) -> Outcome:
    leave = (on.CancelReservation(),) if transfer.phase is DecodePhase.MATCH else ()
    return _end(transfer, DecodePhase.CANCELLED, *leave)


def _cancel_verified(transfer: DecodeTransfer, event: on.RequestCancelled, now: float) -> Outcome:
    """Offered blocks are the engine's or ours as soon as it answers: until then nobody may release them."""
    if _attempt(transfer).is_admitting:
        return transfer, ()
    return _end(transfer, DecodePhase.CANCELLED)


def _cancel_again(transfer: DecodeTransfer, event: on.RequestCancelled, now: float) -> Outcome:
    ending = transfer.ending
    if ending is None or ending.kind is EndingKind.CANCEL:
        return transfer, ()
    return replace(transfer, ending=replace(ending, kind=EndingKind.CANCEL, may_salvage=False)), ()


def _retire(transfer: DecodeTransfer, ending: Ending, now: float, *first: DecodeAction) -> Outcome:
    """Stops the attempt. Where the receiver copies, the fence says within one frame's time that all is silent; else the
    blocks go to quarantine at once and the transfer goes on without them."""
    attempt = _attempt(transfer)
    limits = transfer.request.limits
    transfer = replace(
        transfer,
        phase=DecodePhase.CANCELLING,
        ending=ending,
        drain_by_s=now + limits.drain_s,
        last_error=ending.error,
    )
    actions: list[DecodeAction] = [*first, on.Fence(attempt.ref)]
    is_told = any(isinstance(action, on.SendCommitAck) for action in first)
    if ending.kind is not EndingKind.REJECTED and not ending.is_peer_gone and not is_told:
        actions.append(on.SendCancel(attempt.ref, ending.error.message))
    if attempt.guarantee is CancelGuarantee.FENCED or ending.kind is EndingKind.REJECTED:
        return transfer, tuple(actions)
    transfer, more = _quarantine(transfer, now)
    return transfer, (*actions, *more)


def _fence_closed(transfer: DecodeTransfer, event: on.FenceClosed, now: float) -> Outcome:
    """Every possible writer is silent: what verified may be kept, the rest goes back."""
    ending = _ending(transfer)
    if ending.kind is EndingKind.REJECTED:
        return _connect(transfer, now)
    keep: tuple[DecodeAction, ...] = ()
    if ending.may_salvage and event.num_complete_blocks:
        keep = (on.PublishPrefix(transfer.matched + transfer.destination[: event.num_complete_blocks]),)
    transfer, more = _continue(transfer, now)
    return transfer, (*keep, *more)


def _endpoint_destroyed(transfer: DecodeTransfer, event: on.EndpointDestroyed, now: float) -> Outcome:
    return _continue(transfer, now)


def _quarantine(transfer: DecodeTransfer, now: float) -> Outcome:
    """The attempt's blocks stay behind until its writers are silent; everything else goes on."""
    attempt, ending = _attempt(transfer), _ending(transfer)
    held = QuarantinedAttempt(
        ref=attempt.ref,
        peer=attempt.peer,
        guarantee=attempt.guarantee,
        num_ranks=attempt.num_ranks,
        blocks=transfer.destination,
        destroy_by_s=now + transfer.request.limits.drain_s,
        is_destroying=ending.is_peer_gone,
    )
    actions: list[DecodeAction] = [on.QuarantineBlocks(held.ref, held.blocks)]
    if ending.is_peer_gone:
        actions.append(on.DestroyEndpoint(held.ref, held.peer))
    if ending.kind is EndingKind.REJECTED:
        transfer = replace(transfer, ending=replace(ending, kind=EndingKind.RETRY))
    transfer = replace(transfer, destination=(), quarantined=(*transfer.quarantined, held))
    transfer, more = _continue(transfer, now)
    return transfer, (*actions, *more)


def _continue(transfer: DecodeTransfer, now: float) -> Outcome:
    """What the ending says, with all blocks given back: so that nobody waits for blocks while holding some."""
    ending = _ending(transfer)
    if ending.kind is EndingKind.CANCEL:
        return _end(transfer, DecodePhase.CANCELLED)
    if ending.kind is EndingKind.FAIL:
        return _end(transfer, DecodePhase.FAILED, on.ReportFailure(ending.error))
    if transfer.num_asked == len(transfer.request.candidates):
        return _fall_back(transfer, ending.error)
    given_back = _give_back(transfer)
    transfer = replace(
        transfer, phase=DecodePhase.MATCH, attempt=None, ending=None, matched=(), destination=(), spare=()
    )
    return transfer, (*given_back, on.MatchAndReserve())


def _fall_back(transfer: DecodeTransfer, error: TandemError) -> Outcome:
    if transfer.request.allow_local_prefill:
        return _end(transfer, DecodePhase.LOCAL, on.PrefillLocally(error))
    return _end(transfer, DecodePhase.FAILED, on.ReportFailure(error))


def _end(transfer: DecodeTransfer, phase: DecodePhase, *last: DecodeAction) -> Outcome:
    given_back = _give_back(transfer)
    transfer = replace(transfer, phase=phase, attempt=None, ending=None, matched=(), destination=(), spare=())
    return transfer, (*given_back, *last)


def _give_back(transfer: DecodeTransfer) -> tuple[DecodeAction, ...]:
    return (on.ReleaseBlocks(transfer.blocks),) if transfer.blocks else ()


def _release_late(transfer: DecodeTransfer, event: on.BlocksReserved, now: float) -> Outcome:
    """Granted in the same moment in which the request ended."""
    return transfer, (on.ReleaseBlocks(event.matched + event.destination + event.spare),)


# --- quarantine -------------------------------------------------------------------------------------------------------


def _quarantine_fence_closed(transfer: DecodeTransfer, event: on.FenceClosed, now: float) -> Outcome:
    held = _held(transfer, event.ref)
    if held is None or held.guarantee is CancelGuarantee.MUST_DRAIN:
        return transfer, ()  # a fence in front of a one-sided write stops nothing
    return _free(transfer, held)


def _quarantine_drained(transfer: DecodeTransfer, event: on.RankDrained, now: float) -> Outcome:
    held = _held(transfer, event.ref)
    if held is None or held.guarantee is CancelGuarantee.FENCED or not 0 <= event.rank < held.num_ranks:
        return transfer, ()
    drained = replace(held, drained_ranks=held.drained_ranks | {event.rank})
    if len(drained.drained_ranks) == held.num_ranks:
        return _free(transfer, held)
    return _replace_held(transfer, held, drained), ()


def _quarantine_destroyed(transfer: DecodeTransfer, event: on.EndpointDestroyed, now: float) -> Outcome:
    held = _held(transfer, event.ref)
    return (transfer, ()) if held is None else _free(transfer, held)


def _free(transfer: DecodeTransfer, held: QuarantinedAttempt) -> Outcome:
    rest = tuple(other for other in transfer.quarantined if other is not held)
    return replace(transfer, quarantined=rest), (on.FreeQuarantined(held.ref, held.blocks),)


def _held(transfer: DecodeTransfer, ref: TransferRef) -> QuarantinedAttempt | None:
    return next((held for held in transfer.quarantined if held.ref == ref), None)


def _replace_held(transfer: DecodeTransfer, old: QuarantinedAttempt, new: QuarantinedAttempt) -> DecodeTransfer:
    return replace(transfer, quarantined=tuple(new if held is old else held for held in transfer.quarantined))


# --- time -------------------------------------------------------------------------------------------------------------


def _tick(transfer: DecodeTransfer, now: float) -> Outcome:
    actions: list[DecodeAction] = []
    for held in transfer.quarantined:
        if now >= held.destroy_by_s and not held.is_destroying:
            transfer = _replace_held(transfer, held, replace(held, is_destroying=True))
            actions.append(on.DestroyEndpoint(held.ref, held.peer))
    transfer, more = _tick_phase(transfer, now)
    return transfer, (*actions, *more)


def _tick_phase(transfer: DecodeTransfer, now: float) -> Outcome:
    phase = transfer.phase
    if phase in ENDED or phase is DecodePhase.NEW:
        return transfer, ()
    if phase is DecodePhase.CANCELLING:
        return _quarantine(transfer, now) if now >= transfer.drain_by_s else (transfer, ())
    if now >= transfer.request.deadline_s:
        return _deadline_passed(transfer, now)
    if phase is DecodePhase.RESERVED and now >= transfer.connect_by_s:
        error = WorkerUnavailable(f"no handshake with {transfer.candidate.worker_id} in time", stage="prefill")
        return _peer_unavailable(transfer, on.PeerUnavailable(transfer.candidate, error), now)
    if phase in _AWAITING_PEER and now >= _attempt(transfer).answer_by_s:
        what = "did not answer" if phase is DecodePhase.REQUESTED else "made no progress"
        ending = _retry(f"prefill worker {_attempt(transfer).peer.worker_id} {what} in time", may_salvage=True)
        return _retire(transfer, ending, now)
    if phase is DecodePhase.SEALED:
        return _check_when_due(transfer, now)
    return transfer, ()


def _deadline_passed(transfer: DecodeTransfer, now: float) -> Outcome:
    error = DeadlineExceeded("the request's deadline passed during its KV transfer", stage="transfer")
    if transfer.phase in _AWAITING_PEER:
        return _retire(transfer, Ending(EndingKind.FAIL, error), now)
    if transfer.attempt is not None and transfer.attempt.is_admitting:
        return transfer, ()  # the engine has its own deadline
    leave = (on.CancelReservation(),) if transfer.phase is DecodePhase.MATCH else ()
    return _end(transfer, DecodePhase.FAILED, *leave, on.ReportFailure(error))


def _alive(transfer: DecodeTransfer, now: float) -> DecodeTransfer:
    """A sign of life: the idle timer starts anew."""
    attempt = replace(_attempt(transfer), answer_by_s=now + transfer.request.limits.idle_s)
    return replace(transfer, attempt=attempt)


def _retry(message: str, may_salvage: bool = False) -> Ending:
    return Ending(EndingKind.RETRY, KvTransferFailed(message, stage="transfer"), may_salvage)


def _attempt(transfer: DecodeTransfer) -> Attempt:
    if transfer.attempt is None:
        raise ProtocolViolation(f"no attempt in phase {transfer.phase.value}")
    return transfer.attempt


def _ending(transfer: DecodeTransfer) -> Ending:
    if transfer.ending is None:
        raise ProtocolViolation(f"no ending in phase {transfer.phase.value}")
    return transfer.ending


# Phases in which the peer owes us something.
_AWAITING_PEER = frozenset({DecodePhase.REQUESTED, DecodePhase.RECEIVING, DecodePhase.SEALED})


def _in(phases: frozenset[DecodePhase] | set[DecodePhase], event: type, handler: Handler) -> dict[Any, Handler]:
    return {(phase, event): handler for phase in phases}


_OPEN = {DecodePhase.REQUESTED, DecodePhase.RECEIVING}
_TRANSITIONS: dict[tuple[DecodePhase, type], Handler] = {
    (DecodePhase.NEW, on.TransferWanted): _start,
    (DecodePhase.MATCH, on.BlocksReserved): _reserved,
    (DecodePhase.MATCH, on.ReservationRefused): _reservation_refused,
    (DecodePhase.RESERVED, on.PeerReady): _peer_ready,
    (DecodePhase.RESERVED, on.PeerUnavailable): _peer_unavailable,
    (DecodePhase.RESERVED, on.PeerGone): _peer_unavailable,
    (DecodePhase.REQUESTED, on.Accepted): _accepted,
    **_in(_OPEN, on.Rejected, _rejected),
    **_in(_OPEN, on.ProgressMade, _progress),
    **_in(_OPEN, on.RankCommitted, _committed),
    **_in(_AWAITING_PEER, on.FramesLanded, _landed),
    **_in(_AWAITING_PEER, on.PeerListed, _listed),
    **_in(_AWAITING_PEER, on.PeerGone, _peer_of_attempt_gone),
    **_in(_AWAITING_PEER, on.LinkFailed, _link_failed),
    **_in(_AWAITING_PEER, on.RequestCancelled, _cancel_attempt),
    (DecodePhase.SEALED, on.ArrivalChecked): _checked,
    (DecodePhase.VERIFIED, on.FenceClosed): _fence_closed_on_success,
    (DecodePhase.VERIFIED, on.EngineAdmitted): _admitted,
    (DecodePhase.VERIFIED, on.EngineRefused): _engine_refused,
    (DecodePhase.VERIFIED, on.RequestCancelled): _cancel_verified,
    (DecodePhase.CANCELLING, on.FenceClosed): _fence_closed,
    (DecodePhase.CANCELLING, on.EndpointDestroyed): _endpoint_destroyed,
    (DecodePhase.CANCELLING, on.RequestCancelled): _cancel_again,
    **_in({DecodePhase.NEW, DecodePhase.MATCH, DecodePhase.RESERVED}, on.RequestCancelled, _cancel_before),
    **_in(ENDED, on.BlocksReserved, _release_late),
}
_IN_QUARANTINE: dict[type, Handler] = {
    on.FenceClosed: _quarantine_fence_closed,
    on.RankDrained: _quarantine_drained,
    on.EndpointDestroyed: _quarantine_destroyed,
}
