"""Exact reads and gathered writes on a blocking socket; the interpreter's lock is free while bytes move."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from kv_transfer.frame import HEADER_BYTES, parse_header
from kv_transfer.transport import FrameHeader

# Linux refuses more buffers in one call (IOV_MAX).
MAX_BUFFERS = 1024
SCRATCH_BYTES = 256 * 1024


def read_exactly(connection: socket.socket, into: memoryview) -> bool:
    """Fills `into`. False when the stream ends before its first byte; raises ConnectionError in the middle."""
    filled = 0
    while filled < into.nbytes:
        count = connection.recv_into(into[filled:])
        if count == 0:
            if filled == 0:
                return False
            raise ConnectionError("the stream ended in the middle of a message")
        filled += count
    return True


def read_header(connection: socket.socket, buffer: memoryview) -> FrameHeader | None:
    """The next frame's header; None at the end of the stream. Raises OSError or BadFrame."""
    return parse_header(buffer[:HEADER_BYTES]) if read_next(connection, buffer[:HEADER_BYTES]) else None


def read_next(connection: socket.socket, into: memoryview) -> bool:
    """The next message; False at the end of the stream. A peer may be silent between messages for ever."""
    while True:
        try:
            count = connection.recv_into(into)
        except TimeoutError:
            continue
        if count == 0:
            return False
        if count < into.nbytes and not read_exactly(connection, into[count:]):
            raise ConnectionError("the stream ended in the middle of a message")
        return True


def wait_for_byte(connection: socket.socket) -> bool:
    """Waits, for ever, until there is something to read; False at the end of the stream."""
    while True:
        try:
            return bool(connection.recv(1, socket.MSG_PEEK))
        except TimeoutError:
            continue


def wait_until_closed(connection: socket.socket) -> None:
    """Says that nothing more will be answered, and waits, for ever, until the other end is closed."""
    with suppress(OSError):  # closed already
        connection.shutdown(socket.SHUT_WR)
        while wait_for_byte(connection):
            connection.recv(SCRATCH_BYTES)


def drain(connection: socket.socket, num_bytes: int) -> None:
    """Reads and forgets."""
    scratch = memoryview(bytearray(min(num_bytes, SCRATCH_BYTES)))
    while num_bytes > 0:
        part = scratch[: min(num_bytes, len(scratch))]
        if not read_exactly(connection, part):
            raise ConnectionError("the stream ended in the middle of a frame")
        num_bytes -= part.nbytes


def send_gathered(connection: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Sends all buffers in order without joining them."""
    pending = [buffer for buffer in buffers if buffer.nbytes]
    start = 0
    while start < len(pending):
        sent = connection.sendmsg(pending[start : start + MAX_BUFFERS])
        while sent:
            if sent >= pending[start].nbytes:
                sent -= pending[start].nbytes
                start += 1
            else:
                pending[start] = pending[start][sent:]
                sent = 0
