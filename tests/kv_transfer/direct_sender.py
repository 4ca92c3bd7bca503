"""A transport without a wire: `push` lands at once, through the same gate as every other; faults go in between."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.frame import digest_of, pack_header, parse_header, with_digest
from kv_transfer.transport import CancelGuarantee, FrameHeader, FrameSink, Posted


class DirectSender:
    """Implements `Sender`."""

    name = "direct"
    cancel_guarantee = CancelGuarantee.FENCED

    def __init__(self, sink: FrameSink) -> None:
        self._sink = sink

    def push(self, header: FrameHeader, payload: Sequence[memoryview]) -> Posted:
        header = with_digest(header, payload)
        land(self._sink, pack_header(header), b"".join(payload))
        return Posted(header.digest)

    def poll(self) -> None:
        """Nothing is ever outstanding."""

    def count_verified(self) -> int:
        raise NotImplementedError("nobody measures a link without a wire")

    def close(self) -> None:
        """There is nothing to close."""


def land(sink: FrameSink, packed: bytes, payload: bytes) -> None:
    """What a receiving end does with a frame. Raises `BadFrame`."""
    header = parse_header(packed)
    runs = sink.open_frame(header)
    if runs is None:
        return
    offset, arrived = 0, None
    try:
        for run in runs:
            part = payload[offset : offset + run.nbytes]
            run[: len(part)] = part
            offset += run.nbytes
        if offset == len(payload):
            arrived = digest_of(list(runs))
    finally:
        sink.close_frame(header, arrived)
