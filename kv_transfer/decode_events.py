"""What a decode worker's transfer hears (events) and asks for (actions); `decode_transfer` is the machine.

An event that speaks of an attempt carries its `TransferRef`; one of an attempt that is over changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from cluster.errors import TandemError
from cluster.identity import BlockRef, Incarnation, WorkerId
from kv_transfer.coverage import CellRange
from kv_transfer.transfer_ref import TransferRef
from kv_transfer.transport import CancelGuarantee


@dataclass(frozen=True, slots=True)
class PeerRef:
    """One process start of one prefill worker."""

    worker_id: WorkerId
    incarnation: Incarnation


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransferWanted:
    """The request is here."""


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    """Everything the request needs, taken in one step."""

    matched: tuple[BlockRef, ...]  # a cached prefix, shared
    destination: tuple[BlockRef, ...]  # the rest of the prompt
    spare: tuple[BlockRef, ...]  # look-ahead and at least one decode block; no peer ever hears of them


@dataclass(frozen=True, slots=True)
class ReservationRefused:
    """The queue for blocks is full, or admission is stopped."""

    error: TandemError


@dataclass(frozen=True, slots=True)
class PeerReady:
    """The handshake with the candidate stands."""

    peer: PeerRef
    guarantee: CancelGuarantee
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class PeerUnavailable:
    """Nothing was asked of the candidate, and nothing can be."""

    peer: PeerRef
    error: TandemError


@dataclass(frozen=True, slots=True)
class Accepted:
    ref: TransferRef


@dataclass(frozen=True, slots=True)
class Rejected:
    """P took nothing on: it never wrote and never will."""

    ref: TransferRef
    error: TandemError


@dataclass(frozen=True, slots=True)
class ProgressMade:
    ref: TransferRef


@dataclass(frozen=True, slots=True)
class FramesLanded:
    """Totals of one attempt up to now, so that a late or repeated event changes nothing."""

    ref: TransferRef
    num_verified: int  # frames
    num_bad: int  # frames whose digest differs
    num_bytes: int  # of both


@dataclass(frozen=True, slots=True)
class RankCommitted:
    """One rank of P sent everything. `failure` is set when P failed: no byte of the attempt may be used."""

    ref: TransferRef
    rank: int
    num_frames: int  # that count: without those that a resend replaced
    num_resends: int = 0  # that P had heard of
    failure: TandemError | None = None
    num_bytes: int = 0  # of those frames


@dataclass(frozen=True, slots=True)
class ArrivalChecked:
    """What `CheckArrival` found."""

    ref: TransferRef
    missing: tuple[CellRange, ...]
    missing_bytes: int
    digests_match: bool  # the root digest of what verified is the one that was committed
    generations_match: bool  # every destination block is still ours


@dataclass(frozen=True, slots=True)
class FenceClosed:
    """The receiver lets no frame of the attempt in any more and none is in the middle of landing."""

    ref: TransferRef
    num_complete_blocks: int = 0  # of the destination, from its first on: every cell verified


@dataclass(frozen=True, slots=True)
class RankDrained:
    """One rank of P promises that nothing of the attempt will be written any more."""

    ref: TransferRef
    rank: int


@dataclass(frozen=True, slots=True)
class EndpointDestroyed:
    """The connection that the attempt's writes came in on is gone, with all that was posted on it."""

    ref: TransferRef


@dataclass(frozen=True, slots=True)
class PeerGone:
    """Socket reset, missed pings, or another incarnation in its place."""

    peer: PeerRef
    error: TandemError


@dataclass(frozen=True, slots=True)
class PeerListed:
    """P's own list of live attempts, from its Pong."""

    ref: TransferRef
    is_listed: bool


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """The attempt's data connection broke while the peer lives."""

    ref: TransferRef
    error: TandemError


@dataclass(frozen=True, slots=True)
class EngineAdmitted:
    """The engine owns the blocks now."""


@dataclass(frozen=True, slots=True)
class EngineRefused:
    error: TandemError


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client went away, or the worker stops."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; the only event that times anything out."""


DecodeEvent: TypeAlias = (
    TransferWanted
    | BlocksReserved
    | ReservationRefused
    | PeerReady
    | PeerUnavailable
    | Accepted
    | Rejected
    | ProgressMade
    | FramesLanded
    | RankCommitted
    | ArrivalChecked
    | FenceClosed
    | RankDrained
    | EndpointDestroyed
    | PeerGone
    | PeerListed
    | LinkFailed
    | EngineAdmitted
    | EngineRefused
    | RequestCancelled
    | Tick
)


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MatchAndReserve:
    """Look in the prefix cache and the tiers, then take all that is missing or nothing; answer `BlocksReserved`."""


@dataclass(frozen=True, slots=True)
class CancelReservation:
    """Leave the queue; blocks that were granted meanwhile go back."""


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Answer `PeerReady` or `PeerUnavailable`."""

    peer: PeerRef


@dataclass(frozen=True, slots=True)
class OpenLanding:
    """Let frames of this attempt into these blocks; the first is the prompt's block `first_block`."""

    ref: TransferRef
    destination: tuple[BlockRef, ...]
    first_block: int


@dataclass(frozen=True, slots=True)
class SendPrefill:
    ref: TransferRef
    peer: PeerRef
    destination: tuple[BlockRef, ...]
    num_have_blocks: int
    credit_bytes: int
    deadline_s: float  # from now


@dataclass(frozen=True, slots=True)
class SendCredit:
    ref: TransferRef
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SendResend:
    ref: TransferRef
    ranges: tuple[CellRange, ...]
    tries_left: int


@dataclass(frozen=True, slots=True)
class SendCommitAck:
    """The last word on an attempt that committed: P gives its blocks back, whatever the outcome."""

    ref: TransferRef
    is_ok: bool
    ranges: tuple[CellRange, ...] = ()


@dataclass(frozen=True, slots=True)
class SendCancel:
    ref: TransferRef
    reason: str


@dataclass(frozen=True, slots=True)
class CheckArrival:
    """Coverage, root digest and generations of what landed; answer `ArrivalChecked`."""

    ref: TransferRef


@dataclass(frozen=True, slots=True)
class Fence:
    """Let no further frame in; answer `FenceClosed` once none is in the middle of landing."""

    ref: TransferRef


@dataclass(frozen=True, slots=True)
class DestroyEndpoint:
    """The peer did not drain in time: tear the session down, its stream as well as its link, so that neither a write
    nor a request on its way can still arrive; answer `EndpointDestroyed`."""

    ref: TransferRef
    peer: PeerRef


@dataclass(frozen=True, slots=True)
class PublishPrefix:
    """The prompt's first `num_blocks` blocks verified: their full ones may enter the prefix cache."""

    blocks: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    blocks: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class QuarantineBlocks:
    """Somebody may still write into these: out of use until `FreeQuarantined`."""

    ref: TransferRef
    blocks: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class FreeQuarantined:
    ref: TransferRef
    blocks: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class AdmitToEngine:
    """The prompt has landed; ownership of the blocks passes with `EngineAdmitted`."""

    ref: TransferRef
    blocks: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class PrefillLocally:
    """No prefill worker is left: this worker computes the prompt; `failure` says why."""

    failure: TandemError


@dataclass(frozen=True, slots=True)
class ReportFailure:
    error: TandemError


DecodeAction: TypeAlias = (
    MatchAndReserve
    | CancelReservation
    | ConnectPeer
    | OpenLanding
    | SendPrefill
    | SendCredit
    | SendResend
    | SendCommitAck
    | SendCancel
    | CheckArrival
    | Fence
    | DestroyEndpoint
    | PublishPrefix
    | ReleaseBlocks
    | QuarantineBlocks
    | FreeQuarantined
    | AdmitToEngine
    | PrefillLocally
    | ReportFailure
)
