"""Blocks of attempts that ended while somebody could still write into them: what brings each of them back.

    held ──closed fence, where the receiver copies | Drained from each rank | the endpoint destroyed──> free
      └──peer gone, or not drained in time──> its endpoint is destroyed

Pure. A transfer goes on with other blocks meanwhile; events of attempts that are not held change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kv_transfer import decode_events as on
from kv_transfer.decode_events import DecodeAction, DecodeEvent, PeerRef
from kv_transfer.decode_state import DecodeTransfer, Handler, Outcome, QuarantinedAttempt
from kv_transfer.transfer_ref import TransferRef
from kv_transfer.transport import CancelGuarantee


def hold(transfer: DecodeTransfer, now: float) -> Outcome:
    """The live attempt's blocks stay behind until its writers are silent."""
    attempt, is_peer_gone = transfer.live_attempt, transfer.current_ending.is_peer_gone
    held = QuarantinedAttempt(
        ref=attempt.ref,
        peer=attempt.peer,
        guarantee=attempt.guarantee,
        num_ranks=attempt.num_ranks,
        blocks=transfer.destination,
        destroy_by_s=now + transfer.request.limits.drain_s,
        is_destroying=is_peer_gone,
    )
    actions: list[DecodeAction] = [on.QuarantineBlocks(held.ref, held.blocks)]
    if is_peer_gone:
        actions.append(on.DestroyEndpoint(held.ref, held.peer))
    return replace(transfer, destination=(), quarantined=(*transfer.quarantined, held)), tuple(actions)


def apply(transfer: DecodeTransfer, event: DecodeEvent, now: float) -> Outcome:
    """What an event of an attempt that is not the live one changes."""
    handler = _HANDLERS.get(type(event))
    return handler(transfer, event, now) if handler is not None else (transfer, ())


def peer_gone(transfer: DecodeTransfer, peer: PeerRef) -> Outcome:
    """It will never say Drained."""
    return _destroy(transfer, lambda held: held.peer == peer)


def tick(transfer: DecodeTransfer, now: float) -> Outcome:
    return _destroy(transfer, lambda held: now >= held.destroy_by_s)


def next_tick_s(transfer: DecodeTransfer) -> float | None:
    """When `tick` can change something at the earliest; None: never."""
    return min((held.destroy_by_s for held in transfer.quarantined if not held.is_destroying), default=None)


def _destroy(transfer: DecodeTransfer, is_due: Callable[[QuarantinedAttempt], bool]) -> Outcome:
    actions: list[DecodeAction] = []
    for held in transfer.quarantined:
        if is_due(held) and not held.is_destroying:
            transfer = _replace_held(transfer, held, replace(held, is_destroying=True))
            actions.append(on.DestroyEndpoint(held.ref, held.peer))
    return transfer, tuple(actions)


def _fence_closed(transfer: DecodeTransfer, event: on.FenceClosed, now: float) -> Outcome:
    held = _held(transfer, event.ref)
    if held is None or held.guarantee is CancelGuarantee.MUST_DRAIN:
        return transfer, ()  # a fence in front of a one-sided write stops nothing
    return _free(transfer, held)


def _drained(transfer: DecodeTransfer, event: on.RankDrained, now: float) -> Outcome:
    held = _held(transfer, event.ref)
    if held is None or held.guarantee is CancelGuarantee.FENCED or not 0 <= event.rank < held.num_ranks:
        return transfer, ()
    drained = replace(held, drained_ranks=held.drained_ranks | {event.rank})
    if len(drained.drained_ranks) == held.num_ranks:
        return _free(transfer, held)
    return _replace_held(transfer, held, drained), ()


def _destroyed(transfer: DecodeTransfer, event: on.EndpointDestroyed, now: float) -> Outcome:
    held = _held(transfer, event.ref)
    return (transfer, ()) if held is None else _free(transfer, held)


def _free(transfer: DecodeTransfer, held: QuarantinedAttempt) -> Outcome:
    rest = tuple(other for other in transfer.quarantined if other is not held)
    return replace(transfer, quarantined=rest), (on.FreeQuarantined(held.ref, held.blocks),)


def _held(transfer: DecodeTransfer, ref: TransferRef) -> QuarantinedAttempt | None:
    return next((held for held in transfer.quarantined if held.ref == ref), None)


def _replace_held(transfer: DecodeTransfer, old: QuarantinedAttempt, new: QuarantinedAttempt) -> DecodeTransfer:
    return replace(transfer, quarantined=tuple(new if held is old else held for held in transfer.quarantined))


_HANDLERS: dict[type, Handler] = {
    on.FenceClosed: _fence_closed,
    on.RankDrained: _drained,
    on.EndpointDestroyed: _destroyed,
}
