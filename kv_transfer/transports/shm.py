"""Frames through a ring in shared memory, for workers on one host: the sender copies in, the receiver copies out.

    sender's pool ──copy──> ring (memfd) ──copy──> receiver's pool
                  ──header + offset over the Unix socket──>
                  <──────── bytes consumed ──────────────

The ring is a memfd that travels over the Unix socket: it has no name, so nothing is left behind when both are killed.
The receiver copies after its sink's check, so a late frame writes nothing (FENCED). The socket orders, wakes and tells
of death.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.errors import KvTransferFailed
from kv_transfer.frame import HEADER_BYTES, BadFrame, digest_of, pack_header
from kv_transfer.transport import CancelGuarantee, FrameHeader, FrameSink, Posted
from kv_transfer.transports.connection_gate import GREETING_TIMEOUT_S, ConnectionGate
from kv_transfer.transports.listener import Listener
from kv_transfer.transports.stream_io import read_exactly, read_header, send_gathered
from kv_transfer.transports.tcp import introduce
from kv_transfer.transports.throttle import Throttle

# Small, so that what the sender wrote is still in a cache when the receiver reads it: between two processes on Zen 4,
# 4 MiB move 3.2 GB/s where 16 MiB move 2.1.
RING_BYTES = 4 * 1024 * 1024
# The sender hears of free room this often, so that filling and emptying overlap.
TOLD_EVERY_BYTES = RING_BYTES // 4
MAX_FRAME_BYTES = RING_BYTES // 2
_U64 = struct.Struct("<Q")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
ByteArray = npt.NDArray[np.uint8]


class ShmReceiver:
    """A decode worker's listening end: a Unix socket in its private folder."""

    name = "shm"

    def __init__(self, path: Path, gate: ConnectionGate, sink: FrameSink) -> None:
        """Raises OSError when the socket cannot be made there."""
        path.unlink(missing_ok=True)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(str(path))
        path.chmod(0o600)
        self.address = str(path)
        self._path = path
        self._listener = Listener(self.name, server, gate, sink, serve_ring)

    def close(self) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)


class ShmSender:
    """A prefill worker's connection to one decode worker on this host. Owned by its sending thread."""

    name = "shm"
    cancel_guarantee = CancelGuarantee.FENCED

    def __init__(self, address: str, nonce: bytes, throttle_bytes_per_s: int = 0) -> None:
        """Raises `KvTransferFailed` when the peer does not answer, or memory for the ring is not to be had."""
        self._throttle = Throttle(throttle_bytes_per_s)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(GREETING_TIMEOUT_S)
        try:
            self._connection.connect(address)
        except OSError as error:
            self._connection.close()
            raise KvTransferFailed(f"cannot connect to {address} over shm: {error}", stage="transfer") from error
        introduce(self._connection, nonce)
        try:
            self._ring = self._share_ring()
        except OSError as error:
            self._connection.close()
            raise KvTransferFailed(f"cannot share a ring of {RING_BYTES} bytes: {error}", stage="transfer") from error
        self._written = self._consumed = 0  # bytes since the start, gaps at the ring's end included

    def push(self, header: FrameHeader, payload: Sequence[memoryview]) -> Posted:
        """Copies the frame into the ring, waiting for room; the source bytes are free when this returns."""
        self._throttle.pass_through(header.num_bytes)
        try:
            offset, taken = self._make_room(header.num_bytes)
            for run in payload:
                self._ring[offset : offset + run.nbytes] = np.frombuffer(run, np.uint8)
                offset += run.nbytes
            start = offset - header.num_bytes
            message = pack_header(header) + _U64.pack(start) + _U64.pack(taken)
            send_gathered(self._connection, [memoryview(message)])
        except OSError as error:
            self.close()
            raise KvTransferFailed(f"shm connection broke: {error}", stage="transfer") from error
        return Posted()

    def poll(self) -> None:
        """Nothing is ever outstanding for the source."""

    def close(self) -> None:
        self._connection.close()
        self._ring = np.empty(0, np.uint8)  # the mapping goes with its last view

    def _share_ring(self) -> ByteArray:
        descriptor = os.memfd_create("tandem-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, RING_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(descriptor, RING_BYTES)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            self._connection.sendmsg([_U64.pack(RING_BYTES)], rights)
        finally:
            os.close(descriptor)
        return np.frombuffer(mapping, np.uint8)

    def _make_room(self, num_bytes: int) -> tuple[int, int]:
        """Where the frame goes, and how many bytes of the ring it takes with the gap before it."""
        if num_bytes > MAX_FRAME_BYTES:
            raise KvTransferFailed(
                f"a frame of {num_bytes} bytes is larger than {MAX_FRAME_BYTES}: use smaller blocks, or tcp",
                stage="transfer",
            )
        position = self._written % RING_BYTES
        gap = RING_BYTES - position if position + num_bytes > RING_BYTES else 0
        taken = gap + num_bytes
        while self._written + taken - self._consumed > RING_BYTES:
            self._read_consumed()
        self._written += taken
        return (position + gap) % RING_BYTES, taken

    def _read_consumed(self) -> None:
        buffer = memoryview(bytearray(_U64.size))
        if not read_exactly(self._connection, buffer):
            raise ConnectionError("the receiver is gone")
        (self._consumed,) = _U64.unpack(buffer)


def serve_ring(connection: socket.socket, sink: FrameSink) -> None:
    """Takes the ring over and copies frames out of it until the stream ends. Raises OSError or BadFrame."""
    ring = _receive_ring(connection)
    buffer = memoryview(bytearray(HEADER_BYTES))
    place = memoryview(bytearray(2 * _U64.size))
    consumed = told = 0  # bytes since the start
    while (header := read_header(connection, buffer)) is not None:
        if not read_exactly(connection, place):
            raise ConnectionError("the stream ended in the middle of a message")
        start, taken = _U64.unpack(place[:8])[0], _U64.unpack(place[8:])[0]
        if start + header.num_bytes > ring.size or taken > ring.size:
            raise BadFrame(f"a frame of {header.num_bytes} bytes at {start} lies outside the ring")
        runs = sink.open_frame(header)
        if runs is not None:
            _copy_out(ring, start, header, list(runs), sink)
        consumed += taken
        # Not after every frame: the sender reads these only when it needs room, and a Unix socket holds few messages.
        if consumed - told >= TOLD_EVERY_BYTES:
            connection.sendall(_U64.pack(consumed))
            told = consumed


def _copy_out(ring: ByteArray, start: int, header: FrameHeader, runs: list[memoryview], sink: FrameSink) -> None:
    arrived_digest = None
    try:
        for run in runs:
            # numpy copies without the interpreter's lock: the engine's thread goes on.
            np.frombuffer(run, np.uint8)[:] = ring[start : start + run.nbytes]
            start += run.nbytes
        arrived_digest = digest_of(runs)
    finally:
        sink.close_frame(header, arrived_digest)


def _receive_ring(connection: socket.socket) -> ByteArray:
    message, rights, _, _ = connection.recvmsg(_U64.size, socket.CMSG_SPACE(array.array("i").itemsize))
    descriptors = array.array("i")
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    try:
        if len(message) != _U64.size or len(descriptors) != 1:
            raise BadFrame("the ring did not come with the greeting")
        (size,) = _U64.unpack(message)
        # Sealed against shrinking: reading it can never fault.
        is_sealed = fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if size != RING_BYTES or not is_sealed or os.fstat(descriptors[0]).st_size != size:
            raise BadFrame("the ring has another size, or may be made smaller")
        return np.frombuffer(mmap.mmap(descriptors[0], size, prot=mmap.PROT_READ), np.uint8)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
