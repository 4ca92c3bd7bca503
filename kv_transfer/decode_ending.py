"""How an attempt ends without its KV, and what follows: the next candidate, this worker itself, or an error.

A candidate whose link broke is there, and has the prompt computed or in its cache: it is asked once more, over a new
link, when all others have been.

    attempt ──retire──> CANCELLING ──fence closed, endpoint destroyed──────────────> MATCH | LOCAL | FAILED | CANCELLED
                            └──not silent in time, or a one-sided writer: its blocks ─> quarantine, then the same

Pure, as `decode_transfer`, whose edges these are. Nobody waits for blocks while holding some: what an attempt held is
given back, or left in quarantine, before the next one asks for its own.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.errors import KvLinkBroken, KvTransferFailed, TandemError
from kv_transfer import decode_events as on
from kv_transfer import decode_quarantine as quarantine
from kv_transfer.decode_events import DecodeAction
from kv_transfer.decode_state import DecodePhase, DecodeTransfer, Ending, EndingKind, Outcome
from kv_transfer.transport import CancelGuarantee


def retire(transfer: DecodeTransfer, ending: Ending, now: float, *first: DecodeAction) -> Outcome:
    """Stops the attempt. Where the receiver copies, the fence says within one frame's time that all is silent; else the
    blocks go to quarantine at once and the transfer goes on without them."""
    attempt = transfer.live_attempt
    limits = transfer.request.limits
    is_to_relink = isinstance(ending.error, KvLinkBroken) and attempt.peer not in transfer.relinked
    transfer = replace(
        transfer,
        relinked=(*transfer.relinked, attempt.peer) if is_to_relink else transfer.relinked,
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
    transfer, more = leave_behind(transfer, now)
    return transfer, (*actions, *more)


def fence_closed(transfer: DecodeTransfer, event: on.FenceClosed, now: float) -> Outcome:
    """Every possible writer is silent: what verified may be kept, the rest goes back."""
    ending = transfer.current_ending
    keep: tuple[DecodeAction, ...] = ()
    if ending.may_salvage and event.num_complete_blocks:
        keep = (on.PublishPrefix(transfer.matched + transfer.destination[: event.num_complete_blocks]),)
    transfer, more = _go_on(transfer)
    return transfer, (*keep, *more)


def endpoint_destroyed(transfer: DecodeTransfer, event: on.EndpointDestroyed, now: float) -> Outcome:
    return _go_on(transfer)


def leave_behind(transfer: DecodeTransfer, now: float) -> Outcome:
    """The attempt's blocks go to quarantine; everything else goes on without them."""
    transfer, held = quarantine.hold(transfer, now)
    if transfer.current_ending.kind is EndingKind.REJECTED:
        transfer = replace(transfer, ending=replace(transfer.current_ending, kind=EndingKind.RETRY))
    transfer, more = _go_on(transfer)
    return transfer, (*held, *more)


def _go_on(transfer: DecodeTransfer) -> Outcome:
    """What the ending says, with all blocks given back: so that nobody waits for blocks while holding some."""
    ending = transfer.current_ending
    if ending.kind is EndingKind.CANCEL:
        return end(transfer, DecodePhase.CANCELLED)
    if ending.kind is EndingKind.FAIL:
        return end(transfer, DecodePhase.FAILED, on.ReportFailure(ending.error))
    if not transfer.has_candidate:
        return fall_back(transfer, ending.error)
    given_back = _give_back(transfer)
    transfer = replace(
        transfer, phase=DecodePhase.MATCH, attempt=None, ending=None, matched=(), destination=(), spare=()
    )
    return transfer, (*given_back, on.MatchAndReserve())


def fall_back(transfer: DecodeTransfer, error: TandemError) -> Outcome:
    if transfer.request.allow_local_prefill:
        return end(transfer, DecodePhase.LOCAL, on.PrefillLocally(error))
    return end(transfer, DecodePhase.FAILED, on.ReportFailure(error))


def end(transfer: DecodeTransfer, phase: DecodePhase, *last: DecodeAction) -> Outcome:
    given_back = _give_back(transfer)
    transfer = replace(transfer, phase=phase, attempt=None, ending=None, matched=(), destination=(), spare=())
    return transfer, (*given_back, *last)


def _give_back(transfer: DecodeTransfer) -> tuple[DecodeAction, ...]:
    return (on.ReleaseBlocks(transfer.blocks),) if transfer.blocks else ()


def release_late(transfer: DecodeTransfer, event: on.BlocksReserved, now: float) -> Outcome:
    """Granted in the same moment in which the request ended."""
    return transfer, (on.ReleaseBlocks(event.matched + event.destination + event.spare),)


def retry(message: str, may_salvage: bool = False) -> Ending:
    return Ending(EndingKind.RETRY, KvTransferFailed(message, stage="transfer"), may_salvage)


# --- reasons ----------------------------------------------------------------------------------------------------------


def rejected(transfer: DecodeTransfer, event: on.Rejected, now: float) -> Outcome:
    is_untouched = transfer.phase is DecodePhase.REQUESTED and transfer.live_attempt.landed_bytes == 0
    return retire(transfer, Ending(EndingKind.REJECTED if is_untouched else EndingKind.RETRY, event.error), now)


def peer_of_attempt_gone(transfer: DecodeTransfer, event: on.PeerGone, now: float) -> Outcome:
    attempt = transfer.live_attempt
    if event.peer != attempt.peer:
        return transfer, ()
    if transfer.phase is DecodePhase.SEALED and attempt.is_checking:
        return replace(transfer, attempt=replace(attempt, is_peer_gone=True)), ()  # all it had to say is here
    return retire(transfer, Ending(EndingKind.RETRY, event.error, may_salvage=True, is_peer_gone=True), now)


def link_failed(transfer: DecodeTransfer, event: on.LinkFailed, now: float) -> Outcome:
    return retire(transfer, Ending(EndingKind.RETRY, event.error, may_salvage=True), now)


def cancel_attempt(transfer: DecodeTransfer, event: on.RequestCancelled, now: float) -> Outcome:
    return retire(transfer, Ending(EndingKind.CANCEL, KvTransferFailed("the request was cancelled")), now)


def cancel_before(transfer: DecodeTransfer, event: on.RequestCancelled, now: float) -> Outcome:
    leave = (on.CancelReservation(),) if transfer.phase is DecodePhase.MATCH else ()
    return end(transfer, DecodePhase.CANCELLED, *leave)


def cancel_verified(transfer: DecodeTransfer, event: on.RequestCancelled, now: float) -> Outcome:
    """Offered blocks are the engine's or ours as soon as it answers: until then nobody may release them."""
    if transfer.live_attempt.is_admitting:
        return transfer, ()
    return end(transfer, DecodePhase.CANCELLED)


def cancel_again(transfer: DecodeTransfer, event: on.RequestCancelled, now: float) -> Outcome:
    ending = transfer.ending
    if ending is None or ending.kind is EndingKind.CANCEL:
        return transfer, ()
    return replace(transfer, ending=replace(ending, kind=EndingKind.CANCEL, may_salvage=False)), ()
