"""What a KV transport is: a `Sender` on the prefill worker, a `Receiver` on the decode worker, frames between them.

A transport moves bytes and knows nothing of requests. The receiver asks its `FrameSink` where a frame may land: the
sink checks transfer id, epoch and block generations (the fence) and refuses what is stale; refused bytes are drained
and dropped. So a late frame never touches a block that was given away.

    P: LayerPusher ──push()──> Sender ══frames══> Receiver ──open_frame()/close_frame()──> D: FrameSink
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cluster.identity import TransferId

# Frames that measure the link belong to no attempt: attempts count from 1.
PROBE_EPOCH = 0
NO_DIGEST = b""


class CancelGuarantee(enum.Enum):
    """What a cancelled push can still do on the receiver."""

    FENCED = "fenced"  # the receiver copies, and drops a late frame by its epoch
    MUST_DRAIN = "must_drain"  # bytes may land until the sender says Drained


class FrameHeader(NamedTuple):  # and no dataclass: one is made for every frame, in a third of the time
    """What travels in front of a frame's bytes (`kv_transfer/frame.py` packs it).

    A frame covers whole (block, layer) cells: layers [first_layer, first_layer + num_layers) of the destination's
    logical blocks [first_block, first_block + num_blocks), counted from the start of the prompt, of heads
    [first_head, first_head + num_heads). Bytes are laid as in the receiver's pool: block by block, in each block layer
    by layer, keys before values, head by head.
    """

    transfer_id: TransferId
    epoch: int
    src_rank: int
    seq: int
    first_layer: int
    num_layers: int
    first_block: int
    num_blocks: int
    num_bytes: int
    digest: bytes  # xxh3-128 of the payload, 16 bytes; NO_DIGEST: the sender takes it while it reads the payload
    first_head: int = 0
    num_heads: int = 0  # 0: all heads that the receiver's pool has


class FrameSink(Protocol):
    """The decode side's gate. Called from a transport's receiving thread; must be quick."""

    def open_frame(self, header: FrameHeader) -> Sequence[memoryview] | None:
        """Where the payload goes, in order (views into the KV pool, pinned until `close_frame`); None: drop it."""
        ...

    def close_frame(self, header: FrameHeader, arrived_digest: bytes | None) -> None:
        """The payload is in place with this digest, or (None) the connection broke before it was complete."""
        ...

    def peer_gone(self, peer: str, reason: str) -> None:
        """A connection ended; no further frame of it can arrive."""
        ...


@dataclass(frozen=True, slots=True)
class Posted:
    """The ticket of a frame whose source bytes are free already: the transport copied or sent them."""

    digest: bytes
    done: bool = True
    error: str = ""


class SendTicket(Protocol):
    """One posted frame."""

    @property
    def done(self) -> bool:
        """Whether the source bytes are no longer read by the transport."""
        ...

    @property
    def error(self) -> str:
        """Empty while all is well."""
        ...

    @property
    def digest(self) -> bytes:
        """Of the payload as it was sent; there once it is done."""
        ...


class Sender(Protocol):
    """A connection from a prefill worker to one decode worker. Owned by one sending thread."""

    name: str
    cancel_guarantee: CancelGuarantee

    def push(self, header: FrameHeader, payload: Sequence[memoryview]) -> SendTicket:
        """Posts one frame. Raises `KvTransferFailed` when the connection is broken."""
        ...

    def poll(self) -> None:
        """Moves posted frames on; never blocks."""
        ...

    def count_verified(self) -> int:
        """Waits until every probe frame has its verdict; how many were right since the last call. Raises
        `KvTransferFailed`."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """A decode worker's listening end of one transport."""

    name: str

    @property
    def address(self) -> str:
        """What goes into Hello's TransportOffer."""
        ...

    def close(self) -> None: ...
