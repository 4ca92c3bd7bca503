"""What an attempt hears while its KV arrives: signs of life, frames, commits; and whether all of it is here and right.

    REQUESTED ─> RECEIVING ─all ranks committed─> SEALED ─all frames here, or none came─> checked ─> VERIFIED
                     ^                                                                     │
                     └──── cells are missing, tries are left: they are sent again ─────────┘

Pure, as `decode_transfer`, whose edges these are. Credit is topped up as frames land, so no byte is on its way that was
not paid for.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.errors import KvLinkBroken
from kv_transfer import decode_events as on
from kv_transfer.decode_ending import retire, retry
from kv_transfer.decode_state import DecodePhase, DecodeTransfer, Ending, EndingKind, Outcome
from kv_transfer.protocol_limits import MAX_MISSED_LISTINGS


def accepted(transfer: DecodeTransfer, event: on.Accepted, now: float) -> Outcome:
    return _alive(replace(transfer, phase=DecodePhase.RECEIVING), now), ()


def progress(transfer: DecodeTransfer, event: on.ProgressMade, now: float) -> Outcome:
    return _alive(transfer, now), ()


def landed(transfer: DecodeTransfer, event: on.FramesLanded, now: float) -> Outcome:
    """Frames and messages travel on two ways, so a frame may be here before Accept."""
    attempt = transfer.live_attempt
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
        return retire(transfer, retry("the peer sent more than its credit", may_salvage=True), now)
    transfer, credit = _grant(transfer)
    transfer, check = check_when_due(transfer, now)
    return transfer, (*credit, *check)


def committed(transfer: DecodeTransfer, event: on.RankCommitted, now: float) -> Outcome:
    if event.failure is not None:
        is_link = isinstance(event.failure, KvLinkBroken)  # what was computed is right, and so is what has verified
        return retire(transfer, Ending(EndingKind.RETRY, event.failure, may_salvage=is_link), now)
    attempt = transfer.live_attempt
    if event.rank in dict(attempt.committed_frames) or event.num_resends != attempt.num_resends:
        return transfer, ()
    if not 0 <= event.rank < attempt.num_ranks:
        return retire(transfer, retry(f"rank {event.rank} of {attempt.num_ranks} committed"), now)
    attempt = replace(
        attempt,
        committed_frames=(*attempt.committed_frames, (event.rank, event.num_frames)),
        committed_bytes=attempt.committed_bytes + event.num_bytes,
        check_by_s=now + transfer.request.limits.arrival_grace_s,
    )
    phase = DecodePhase.SEALED if attempt.is_committed else DecodePhase.RECEIVING
    return check_when_due(_alive(replace(transfer, phase=phase, attempt=attempt), now), now)


def check_when_due(transfer: DecodeTransfer, now: float) -> Outcome:
    """Once all ranks committed: when all frames are here, or none came for the grace period."""
    attempt = transfer.live_attempt
    if transfer.phase is not DecodePhase.SEALED or attempt.is_checking:
        return transfer, ()
    if not attempt.has_all_frames and now < attempt.check_by_s:
        return transfer, ()
    return replace(transfer, attempt=replace(attempt, is_checking=True)), (on.CheckArrival(attempt.ref),)


def checked(transfer: DecodeTransfer, event: on.ArrivalChecked, now: float) -> Outcome:
    attempt = transfer.live_attempt
    if not attempt.is_checking:
        return transfer, ()
    ack = on.SendCommitAck(attempt.ref, False, event.missing)
    if not event.generations_match:
        return retire(transfer, retry("a destination block changed hands"), now, ack)
    if event.missing:
        if attempt.tries_left == 0 or attempt.is_peer_gone:
            return retire(transfer, retry("KV is missing after every try", may_salvage=True), now, ack)
        return _resend(transfer, event, now)
    if not event.digests_match:
        return retire(transfer, retry("the root digest is not the one that was committed"), now, ack)
    verified = replace(attempt, is_checking=False, is_verified=True)
    transfer = replace(transfer, phase=DecodePhase.VERIFIED, attempt=verified)
    return transfer, (on.SendCommitAck(attempt.ref, True), on.Fence(attempt.ref))


def _resend(transfer: DecodeTransfer, event: on.ArrivalChecked, now: float) -> Outcome:
    attempt = transfer.live_attempt
    # All that was committed was sent: what of it is not here used its credit up. A peer cannot send more than it was
    # granted, whatever it commits.
    sent_bytes = min(attempt.granted_bytes, attempt.committed_bytes + attempt.asked_again_bytes)
    attempt = replace(
        attempt,
        is_checking=False,
        committed_frames=(),
        committed_bytes=0,
        num_bad_before=attempt.num_bad,
        tries_left=attempt.tries_left - 1,
        asked_again_bytes=attempt.asked_again_bytes + event.missing_bytes,
        written_off_bytes=max(attempt.written_off_bytes, sent_bytes - attempt.landed_bytes),
    )
    transfer, credit = _top_up(_alive(replace(transfer, phase=DecodePhase.RECEIVING, attempt=attempt), now))
    return transfer, (*credit, on.SendResend(attempt.ref, event.missing, attempt.tries_left))


def _grant(transfer: DecodeTransfer) -> Outcome:
    """Tops the credit up when half of the window is used, so that a message pays for many frames."""
    unspent_bytes = transfer.live_attempt.unspent_bytes
    if transfer.phase is DecodePhase.SEALED or 2 * unspent_bytes > transfer.request.credit_bytes:
        return transfer, ()
    return _top_up(transfer)


def _top_up(transfer: DecodeTransfer) -> Outcome:
    """To a whole window: never more than that may be on its way."""
    attempt = transfer.live_attempt
    grant = transfer.request.credit_bytes - attempt.unspent_bytes
    if grant <= 0:
        return transfer, ()
    attempt = replace(attempt, granted_bytes=attempt.granted_bytes + grant)
    return replace(transfer, attempt=attempt), (on.SendCredit(attempt.ref, grant),)


def listed(transfer: DecodeTransfer, event: on.PeerListed, now: float) -> Outcome:
    attempt = transfer.live_attempt
    missed = 0 if event.is_listed else attempt.num_missed_listings + 1
    transfer = replace(transfer, attempt=replace(attempt, num_missed_listings=missed))
    if missed < MAX_MISSED_LISTINGS:
        return transfer, ()
    return retire(transfer, retry("the prefill worker does not know this transfer", may_salvage=True), now)


def _alive(transfer: DecodeTransfer, now: float) -> DecodeTransfer:
    """A sign of life: the idle timer starts anew."""
    attempt = replace(transfer.live_attempt, answer_by_s=now + transfer.request.limits.idle_s)
    return replace(transfer, attempt=attempt)
