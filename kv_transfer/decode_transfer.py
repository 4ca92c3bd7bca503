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

Here are the way through and the table; `decode_receiving`, `decode_ending` and `decode_quarantine` have their edges.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.errors import DeadlineExceeded, NoWorkersAvailable, WorkerUnavailable
from kv_transfer import decode_ending as ending
from kv_transfer import decode_events as on
from kv_transfer import decode_quarantine as quarantine
from kv_transfer import decode_receiving as receiving
from kv_transfer.decode_events import DecodeAction, DecodeEvent
from kv_transfer.decode_state import (
    ENDED,
    Attempt,
    DecodePhase,
    DecodeTransfer,
    Ending,
    EndingKind,
    Handler,
    Outcome,
    check_invariants,
)
from kv_transfer.protocol_limits import ProtocolViolation
from kv_transfer.transfer_ref import TransferRef


def apply(transfer: DecodeTransfer, event: DecodeEvent, now: float) -> Outcome:
    """The transfer after the event, and what is to be done, in order. Raises `ProtocolViolation` for our own bugs."""
    ref = getattr(event, "ref", None)
    if ref is not None and (transfer.attempt is None or ref != transfer.attempt.ref):
        return _checked_after(transfer, *quarantine.apply(transfer, event, now))
    if isinstance(event, on.Tick):
        return _checked_after(transfer, *_tick(transfer, now))
    if isinstance(event, on.PeerGone):
        return _checked_after(transfer, *_peer_gone(transfer, event, now))
    handler = _TRANSITIONS.get((transfer.phase, type(event)))
    if handler is None:
        return transfer, ()
    return _checked_after(transfer, *handler(transfer, event, now))


def _checked_after(before: DecodeTransfer, after: DecodeTransfer, actions: tuple[DecodeAction, ...]) -> Outcome:
    check_invariants(before, after)
    return after, actions


def next_tick_s(transfer: DecodeTransfer) -> float | None:
    """When `Tick` can change something at the earliest; None: never."""
    held_s = quarantine.next_tick_s(transfer)
    times = [held_s] if held_s is not None else []
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
        return ending.fall_back(transfer, NoWorkersAvailable("no prefill worker was named", stage="prefill"))
    return replace(transfer, phase=DecodePhase.MATCH), (on.MatchAndReserve(),)


def _reserved(transfer: DecodeTransfer, event: on.BlocksReserved, now: float) -> Outcome:
    transfer = replace(transfer, matched=event.matched, destination=event.destination, spare=event.spare)
    return _connect(transfer, now)


def _reservation_refused(transfer: DecodeTransfer, event: on.ReservationRefused, now: float) -> Outcome:
    return ending.end(transfer, DecodePhase.FAILED, on.ReportFailure(event.error))


def _connect(transfer: DecodeTransfer, now: float) -> Outcome:
    """Turns to the next candidate; the blocks that we hold are good for it."""
    if not transfer.has_candidate:
        return ending.fall_back(transfer, transfer.last_error or NoWorkersAvailable("no prefill worker was left"))
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


# --- run --------------------------------------------------------------------------------------------------------------


def _fence_closed_on_success(transfer: DecodeTransfer, event: on.FenceClosed, now: float) -> Outcome:
    """Nothing can land any more: only now the blocks are somebody else's to read."""
    attempt = transfer.live_attempt
    if attempt.is_admitting:
        return transfer, ()
    transfer = replace(transfer, attempt=replace(attempt, is_admitting=True))
    return transfer, (on.AdmitToEngine(attempt.ref, transfer.blocks),)


def _admitted(transfer: DecodeTransfer, event: on.EngineAdmitted, now: float) -> Outcome:
    if not transfer.live_attempt.is_admitting:
        raise ProtocolViolation("the engine took blocks that were not offered")
    return replace(transfer, phase=DecodePhase.RUNNABLE, matched=(), destination=(), spare=()), ()


def _engine_refused(transfer: DecodeTransfer, event: on.EngineRefused, now: float) -> Outcome:
    return ending.end(transfer, DecodePhase.FAILED, on.ReportFailure(event.error))


# --- end an attempt ---------------------------------------------------------------------------------------------------


def _peer_gone(transfer: DecodeTransfer, event: on.PeerGone, now: float) -> Outcome:
    """Ends the attempt with that peer; its earlier ones, in quarantine, will never hear Drained."""
    transfer, actions = quarantine.peer_gone(transfer, event.peer)
    handler = _TRANSITIONS.get((transfer.phase, on.PeerGone))
    if handler is None:
        return transfer, actions
    transfer, more = handler(transfer, event, now)
    return transfer, (*actions, *more)


def _fence_closed(transfer: DecodeTransfer, event: on.FenceClosed, now: float) -> Outcome:
    if transfer.current_ending.kind is EndingKind.REJECTED:
        return _connect(transfer, now)
    return ending.fence_closed(transfer, event, now)


# --- time -------------------------------------------------------------------------------------------------------------


def _tick(transfer: DecodeTransfer, now: float) -> Outcome:
    transfer, actions = quarantine.tick(transfer, now)
    transfer, more = _tick_phase(transfer, now)
    return transfer, (*actions, *more)


def _tick_phase(transfer: DecodeTransfer, now: float) -> Outcome:
    phase = transfer.phase
    if phase in ENDED or phase is DecodePhase.NEW:
        return transfer, ()
    if phase is DecodePhase.CANCELLING:
        return ending.leave_behind(transfer, now) if now >= transfer.drain_by_s else (transfer, ())
    if now >= transfer.request.deadline_s:
        return _deadline_passed(transfer, now)
    if phase is DecodePhase.RESERVED and now >= transfer.connect_by_s:
        error = WorkerUnavailable(f"no handshake with {transfer.candidate.worker_id} in time", stage="prefill")
        return _peer_unavailable(transfer, on.PeerUnavailable(transfer.candidate, error), now)
    if phase in _AWAITING_PEER and now >= transfer.live_attempt.answer_by_s:
        what = "did not answer" if phase is DecodePhase.REQUESTED else "made no progress"
        idle = ending.retry(f"prefill worker {transfer.live_attempt.peer.worker_id} {what} in time", may_salvage=True)
        return ending.retire(transfer, idle, now)
    if phase is DecodePhase.SEALED:
        return receiving.check_when_due(transfer, now)
    return transfer, ()


def _deadline_passed(transfer: DecodeTransfer, now: float) -> Outcome:
    error = DeadlineExceeded("the request's deadline passed during its KV transfer", stage="transfer")
    if transfer.phase in _AWAITING_PEER:
        return ending.retire(transfer, Ending(EndingKind.FAIL, error), now)
    if transfer.attempt is not None and transfer.attempt.is_admitting:
        return transfer, ()  # the engine has its own deadline
    leave = (on.CancelReservation(),) if transfer.phase is DecodePhase.MATCH else ()
    return ending.end(transfer, DecodePhase.FAILED, *leave, on.ReportFailure(error))


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
    (DecodePhase.REQUESTED, on.Accepted): receiving.accepted,
    **_in(_OPEN, on.Rejected, ending.rejected),
    **_in(_OPEN, on.ProgressMade, receiving.progress),
    **_in(_OPEN, on.RankCommitted, receiving.committed),
    **_in(_AWAITING_PEER, on.FramesLanded, receiving.landed),
    **_in(_AWAITING_PEER, on.PeerListed, receiving.listed),
    **_in(_AWAITING_PEER, on.PeerGone, ending.peer_of_attempt_gone),
    **_in(_AWAITING_PEER, on.LinkFailed, ending.link_failed),
    **_in(_AWAITING_PEER, on.RequestCancelled, ending.cancel_attempt),
    (DecodePhase.SEALED, on.ArrivalChecked): receiving.checked,
    (DecodePhase.VERIFIED, on.FenceClosed): _fence_closed_on_success,
    (DecodePhase.VERIFIED, on.EngineAdmitted): _admitted,
    (DecodePhase.VERIFIED, on.EngineRefused): _engine_refused,
    (DecodePhase.VERIFIED, on.RequestCancelled): ending.cancel_verified,
    (DecodePhase.CANCELLING, on.FenceClosed): _fence_closed,
    (DecodePhase.CANCELLING, on.EndpointDestroyed): ending.endpoint_destroyed,
    (DecodePhase.CANCELLING, on.RequestCancelled): ending.cancel_again,
    **_in({DecodePhase.NEW, DecodePhase.MATCH, DecodePhase.RESERVED}, on.RequestCancelled, ending.cancel_before),
    **_in(ENDED, on.BlocksReserved, ending.release_late),
}
