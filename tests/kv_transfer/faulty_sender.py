"""A real transport's sender that lies, breaks, spoils or delays one of its frames."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from cluster.errors import KvTransferFailed
from cluster.identity import TransferId
from kv_transfer.frame import with_digest
from kv_transfer.transport import FrameHeader, Posted, Sender, SendTicket


class Fault(enum.Enum):
    NONE = "none"
    POST_FAILS = "post fails"
    LIES = "says done and sends nothing"
    NEVER_COMPLETES = "never completes"
    LATE = "arrives after the blocks were given away"
    REPEATED = "arrives twice"
    PAYLOAD_BIT = "payload bit flipped"
    STALE_PAYLOAD = "told before the data is there"
    CUT = "payload shorter than announced"
    WRONG_LENGTH = "length field"
    WRONG_BLOCK = "block field"
    WRONG_LAYER = "layer field"
    WRONG_HEADS = "head field"
    WRONG_EPOCH = "epoch field"
    WRONG_TRANSFER = "transfer field"
    WRONG_DIGEST = "digest field"


class NeverDone:
    """A ticket of an operation that hangs."""

    done = False
    error = ""
    digest = bytes(16)


class FaultySender:
    """Implements `Sender`. `arm` chooses what happens to the n-th frame from now on."""

    def __init__(self, sender: Sender) -> None:
        self.name = sender.name
        self.cancel_guarantee = sender.cancel_guarantee
        self._sender = sender
        self._fault = Fault.NONE
        self._frames_before = 0
        self._held: list[tuple[FrameHeader, list[memoryview]]] = []
        self._late: list[tuple[FrameHeader, list[memoryview]]] = []
        self.hanging: list[NeverDone] = []

    def arm(self, fault: Fault, frames_before: int) -> None:
        self._fault, self._frames_before = fault, frames_before

    def push(self, header: FrameHeader, payload: Sequence[memoryview]) -> SendTicket:
        late, self._late = self._late, []
        for frame in late:
            self._sender.push(*frame)
        self._frames_before -= 1
        if self._frames_before >= 0 or self._fault is Fault.NONE:
            return self._sender.push(header, payload)
        fault, self._fault = self._fault, Fault.NONE
        # What is spoilt below was right when its digest was taken.
        return self._do(fault, with_digest(header, payload), [memoryview(bytes(run)) for run in payload])

    def release_late(self) -> None:
        """What was held back arrives before the next frame: a sender belongs to its own thread, not to the caller."""
        self._late, self._held = self._held, []

    def poll(self) -> None:
        self._sender.poll()

    def count_verified(self) -> int:
        return self._sender.count_verified()

    def close(self) -> None:
        self._sender.close()

    def _do(self, fault: Fault, header: FrameHeader, payload: list[memoryview]) -> SendTicket:
        match fault:
            case Fault.POST_FAILS:
                raise KvTransferFailed("the post failed", stage="transfer")
            case Fault.LIES:
                return Posted(header.digest)
            case Fault.NEVER_COMPLETES:
                self.hanging.append(NeverDone())
                return self.hanging[-1]
            case Fault.LATE:
                self._held.append((header, payload))
                return Posted(header.digest)
            case Fault.REPEATED:
                self._sender.push(header, payload)
                return self._sender.push(header, payload)
            case Fault.CUT:
                short = b"".join(payload)[:-8]
                return self._sender.push(header._replace(num_bytes=len(short)), [memoryview(short)])
        return self._sender.push(*_spoilt(fault, header, payload))


def _spoilt(fault: Fault, header: FrameHeader, payload: list[memoryview]) -> tuple[FrameHeader, list[memoryview]]:
    whole = bytearray(b"".join(payload))
    match fault:
        case Fault.PAYLOAD_BIT:
            whole[header.seq * 7919 % len(whole)] ^= 1 << (header.seq % 8)
        case Fault.STALE_PAYLOAD:
            whole[len(whole) // 2 :] = bytes(len(whole) - len(whole) // 2)
        case Fault.WRONG_LENGTH:
            whole = whole[: len(whole) // 2]
            header = header._replace(num_bytes=len(whole))
        case Fault.WRONG_BLOCK:
            header = header._replace(first_block=header.first_block + 1)
        case Fault.WRONG_LAYER:
            header = header._replace(first_layer=header.first_layer ^ 1)
        case Fault.WRONG_HEADS:
            header = header._replace(first_head=1, num_heads=1)
        case Fault.WRONG_EPOCH:
            header = header._replace(epoch=header.epoch + 1)
        case Fault.WRONG_TRANSFER:
            header = header._replace(transfer_id=TransferId(bytes(16)))
        case Fault.WRONG_DIGEST:
            header = header._replace(digest=bytes(16))
    return header, [memoryview(whole)]
