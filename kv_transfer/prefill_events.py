"""What a prefill worker's transfer hears (events) and asks for (actions); `prefill_transfer` is the machine.

Events reach the machine of the attempt that they speak of: a stale epoch has no machine any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from cluster.errors import TandemError
from kv_transfer.coverage import CellRange

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillAsked:
    """The request passed every check of this worker."""


@dataclass(frozen=True, slots=True)
class EngineQueued:
    """The engine took the prompt into its queue."""


@dataclass(frozen=True, slots=True)
class EngineRefused:
    """The engine's queue is full, or the prompt can never fit: nothing has begun."""

    error: TandemError


@dataclass(frozen=True, slots=True)
class ComputeStarted:
    """The prompt's blocks are allocated; cells leave from now on."""


@dataclass(frozen=True, slots=True)
class ComputeEnded:
    """Every layer of the prompt is written and the first token is known."""


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    error: TandemError


@dataclass(frozen=True, slots=True)
class EngineLetGo:
    """The engine neither reads nor writes the prompt's blocks any more."""


@dataclass(frozen=True, slots=True)
class PushSealed:
    """Every cell is posted and no posted operation reads its source any more."""

    num_frames: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PushFailed:
    error: TandemError


@dataclass(frozen=True, slots=True)
class PushDrained:
    """Posting has stopped and every posted operation has ended."""

    num_frames: int


@dataclass(frozen=True, slots=True)
class CreditGranted:
    num_bytes: int
    posted_bytes: int  # so far


@dataclass(frozen=True, slots=True)
class ResendAsked:
    ranges: tuple[CellRange, ...]
    tries_left: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """D's last word: it has verified the KV, or given the attempt up."""

    is_ok: bool


@dataclass(frozen=True, slots=True)
class CancelAsked:
    reason: str


@dataclass(frozen=True, slots=True)
class DecodeWorkerGone:
    """Its stream broke, it missed its pings, or another incarnation took its place."""


@dataclass(frozen=True, slots=True)
class DecodeWorkerListed:
    """Whether D's own list of live attempts, from its Ping, has this one."""

    is_listed: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; the only event that times anything out."""


PrefillEvent: TypeAlias = (
    PrefillAsked
    | EngineQueued
    | EngineRefused
    | ComputeStarted
    | ComputeEnded
    | ComputeFailed
    | EngineLetGo
    | PushSealed
    | PushFailed
    | PushDrained
    | CreditGranted
    | ResendAsked
    | Acknowledged
    | CancelAsked
    | DecodeWorkerGone
    | DecodeWorkerListed
    | Tick
)


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubmitToEngine:
    """Answer `EngineQueued` or `EngineRefused`."""


@dataclass(frozen=True, slots=True)
class SendAccept:
    pass


@dataclass(frozen=True, slots=True)
class SendReject:
    error: TandemError


@dataclass(frozen=True, slots=True)
class SendProgress:
    pass


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Frames and bytes that count (a resend replaces what it repeats), how many resends that includes; the root digest
    comes from the pusher."""

    num_frames: int
    num_bytes: int
    num_resends: int


@dataclass(frozen=True, slots=True)
class SendFailedCommit:
    """P failed: no byte of this attempt may be used."""

    error: TandemError


@dataclass(frozen=True, slots=True)
class SendDrained:
    """Nothing of this attempt will be written any more."""

    num_frames: int


@dataclass(frozen=True, slots=True)
class AddPushCredit:
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ResendCells:
    ranges: tuple[CellRange, ...]


@dataclass(frozen=True, slots=True)
class CancelPush:
    """Post nothing more; answer `PushDrained` once what was posted has ended."""


@dataclass(frozen=True, slots=True)
class CancelCompute:
    """Answer `EngineLetGo`, at once when the engine has let go before."""


@dataclass(frozen=True, slots=True)
class DestroyEndpoint:
    """A posted operation does not end: tear the connection down, so that `PushDrained` can be answered."""


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """Nobody reads or writes the source blocks any more."""


PrefillAction: TypeAlias = (
    SubmitToEngine
    | SendAccept
    | SendReject
    | SendProgress
    | SendCommit
    | SendFailedCommit
    | SendDrained
    | AddPushCredit
    | ResendCells
    | CancelPush
    | CancelCompute
    | DestroyEndpoint
    | ReleaseBlocks
)
