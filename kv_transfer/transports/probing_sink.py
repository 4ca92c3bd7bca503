"""Frames that measure a link land in memory of their connection, and their sender hears whether they arrived right.

They carry epoch 0, which no attempt has, and never reach the landing table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kv_transfer.transport import PROBE_EPOCH, FrameHeader, FrameSink

PROBE_BYTES = 1024 * 1024


class ProbingSink:
    """Implements `FrameSink` for one connection, in front of the worker's own."""

    def __init__(self, sink: FrameSink, answer: Callable[[bool], None], scratch: memoryview | None = None) -> None:
        """`answer` tells the sender whether a probe was right. `scratch`: memory that the sender can write into, where
        it cannot be any."""
        self._sink = sink
        self._answer = answer
        self._scratch = scratch

    def open_frame(self, header: FrameHeader) -> Sequence[memoryview] | None:
        if header.epoch != PROBE_EPOCH:
            return self._sink.open_frame(header)
        if header.num_bytes > PROBE_BYTES:
            return None
        if self._scratch is None:
            self._scratch = memoryview(bytearray(PROBE_BYTES))
        return [self._scratch[: header.num_bytes]]

    def close_frame(self, header: FrameHeader, arrived_digest: bytes | None) -> None:
        if header.epoch != PROBE_EPOCH:
            self._sink.close_frame(header, arrived_digest)
        elif arrived_digest is not None:
            self._answer(arrived_digest == header.digest)

    def peer_gone(self, peer: str, reason: str) -> None:
        self._sink.peer_gone(peer, reason)
