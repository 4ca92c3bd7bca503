"""The state of one transfer on its decode worker, and what always holds of it; `decode_transfer` changes it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from cluster.errors import TandemError
from cluster.identity import BlockRef, TransferId
from kv_transfer.decode_events import DecodeAction, PeerRef
from kv_transfer.protocol_limits import MAX_RESENDS, ProtocolLimits, ProtocolViolation
from kv_transfer.transfer_ref import TransferRef
from kv_transfer.transport import CancelGuarantee


class DecodePhase(enum.Enum):
    NEW = "new"
    MATCH = "match"
    RESERVED = "reserved"
    REQUESTED = "requested"
    RECEIVING = "receiving"
    SEALED = "sealed"
    VERIFIED = "verified"
    CANCELLING = "cancelling"
    RUNNABLE = "runnable"
    LOCAL = "local"
    FAILED = "failed"
    CANCELLED = "cancelled"


IN_ATTEMPT = frozenset(
    {
        DecodePhase.REQUESTED,
        DecodePhase.RECEIVING,
        DecodePhase.SEALED,
        DecodePhase.VERIFIED,
        DecodePhase.CANCELLING,
    }
)
ENDED = frozenset({DecodePhase.RUNNABLE, DecodePhase.LOCAL, DecodePhase.FAILED, DecodePhase.CANCELLED})


class EndingKind(enum.Enum):
    """What follows an attempt that did not verify."""

    REJECTED = "rejected"  # nobody wrote: the next candidate gets the same blocks
    RETRY = "retry"
    FAIL = "fail"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Ending:
    kind: EndingKind
    error: TandemError
    may_salvage: bool = False  # P did not say that what it computed is wrong
    is_peer_gone: bool = False  # nobody is left who could say Drained


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """What stays the same over all attempts."""

    transfer_id: TransferId
    candidates: tuple[PeerRef, ...]  # in order of preference, each is asked once, and once more if its link breaks
    allow_local_prefill: bool
    deadline_s: float  # on the caller's clock
    credit_bytes: int  # how much P may send ahead of what has landed: our Hello's limit at most
    limits: ProtocolLimits = field(default_factory=ProtocolLimits)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One epoch with one prefill worker."""

    ref: TransferRef
    peer: PeerRef
    guarantee: CancelGuarantee
    num_ranks: int
    answer_by_s: float  # Accept, then the next sign of life
    granted_bytes: int
    landed_bytes: int = 0
    asked_again_bytes: int = 0  # by all resends
    written_off_bytes: int = 0  # sent before the last resend, and lost
    num_verified: int = 0
    num_bad: int = 0
    num_bad_before: int = 0  # at the last resend
    committed_frames: tuple[tuple[int, int], ...] = ()  # (rank, frames)
    committed_bytes: int = 0  # of all ranks
    check_by_s: float = 0.0  # after all commits: check then, whatever has arrived
    is_checking: bool = False
    is_verified: bool = False
    is_admitting: bool = False
    is_peer_gone: bool = False
    tries_left: int = MAX_RESENDS
    num_missed_listings: int = 0

    @property
    def unspent_bytes(self) -> int:
        """Of the credit: what may be on its way, or still be sent."""
        return self.granted_bytes - self.landed_bytes - self.written_off_bytes

    @property
    def num_resends(self) -> int:
        return MAX_RESENDS - self.tries_left

    @property
    def is_committed(self) -> bool:
        return len(self.committed_frames) == self.num_ranks

    @property
    def has_all_frames(self) -> bool:
        sent = sum(num_frames for _, num_frames in self.committed_frames)
        return self.num_verified + self.num_bad - self.num_bad_before >= sent


@dataclass(frozen=True, slots=True)
class QuarantinedAttempt:
    """Blocks that a writer may still reach, and who must fall silent."""

    ref: TransferRef
    peer: PeerRef
    guarantee: CancelGuarantee
    num_ranks: int
    blocks: tuple[BlockRef, ...]
    destroy_by_s: float
    drained_ranks: frozenset[int] = frozenset()
    is_destroying: bool = False


@dataclass(frozen=True, slots=True)
class DecodeTransfer:
    """The whole state. `is_over`: nothing is held and nothing is awaited any more."""

    request: TransferRequest
    phase: DecodePhase = DecodePhase.NEW
    epoch: int = 0
    num_asked: int = 0  # candidates
    relinked: tuple[PeerRef, ...] = ()  # to be asked once more, over a new link, after all others
    connect_by_s: float = 0.0
    matched: tuple[BlockRef, ...] = ()
    destination: tuple[BlockRef, ...] = ()
    spare: tuple[BlockRef, ...] = ()
    attempt: Attempt | None = None
    ending: Ending | None = None
    drain_by_s: float = 0.0
    quarantined: tuple[QuarantinedAttempt, ...] = ()
    last_error: TandemError | None = None

    @property
    def is_over(self) -> bool:
        return self.phase in ENDED and not self.quarantined

    @property
    def candidate(self) -> PeerRef:
        return (*self.request.candidates, *self.relinked)[self.num_asked]

    @property
    def has_candidate(self) -> bool:
        return self.num_asked < len(self.request.candidates) + len(self.relinked)

    @property
    def live_attempt(self) -> Attempt:
        """Raises `ProtocolViolation` where there is none."""
        if self.attempt is None:
            raise ProtocolViolation(f"no attempt in phase {self.phase.value}")
        return self.attempt

    @property
    def current_ending(self) -> Ending:
        """Raises `ProtocolViolation` where there is none."""
        if self.ending is None:
            raise ProtocolViolation(f"no ending in phase {self.phase.value}")
        return self.ending

    @property
    def blocks(self) -> tuple[BlockRef, ...]:
        """All that the transfer owns outside quarantine, prompt first."""
        return self.matched + self.destination + self.spare


# What an event leads to: the transfer after it, and what is to be done, in order.
Outcome: TypeAlias = tuple[DecodeTransfer, tuple[DecodeAction, ...]]
Handler: TypeAlias = Callable[[DecodeTransfer, Any, float], Outcome]


def check_invariants(before: DecodeTransfer, after: DecodeTransfer) -> None:
    """What holds after every event. Raises `ProtocolViolation`."""
    if after.epoch < before.epoch or after.epoch > before.epoch + 1:
        raise ProtocolViolation(f"the epoch went from {before.epoch} to {after.epoch}")
    if (after.phase in IN_ATTEMPT) != (after.attempt is not None) and after.phase is not DecodePhase.RUNNABLE:
        raise ProtocolViolation(f"phase {after.phase.value} with attempt {after.attempt is not None}")
    if after.phase in ENDED and after.blocks:
        raise ProtocolViolation(f"phase {after.phase.value} holds {len(after.blocks)} blocks")
    attempt = after.attempt
    if after.phase in (DecodePhase.VERIFIED, DecodePhase.RUNNABLE) and (attempt is None or not attempt.is_verified):
        raise ProtocolViolation("bytes would be used that no commit verified")
    if attempt is not None and attempt.unspent_bytes > after.request.credit_bytes:
        raise ProtocolViolation(
            f"{attempt.unspent_bytes} bytes may be on their way, {after.request.credit_bytes} may be"
        )
    if attempt is not None and attempt.ref.epoch != after.epoch:
        raise ProtocolViolation(f"epoch {attempt.ref.epoch} runs while {after.epoch} is the newest")
    if after.destination is not before.destination or after.quarantined is not before.quarantined:
        _check_blocks_apart(after)


def _check_blocks_apart(transfer: DecodeTransfer) -> None:
    blocks = [*transfer.blocks, *(block for held in transfer.quarantined for block in held.blocks)]
    if len({ref.block for ref in blocks}) != len(blocks):
        raise ProtocolViolation("a block is held twice: owned and in quarantine, or in two places of one prompt")
