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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cluster.byte_runs import MappedBytes
from cluster.errors import KvTransferFailed
from kv_transfer.frame import HEADER_BYTES, BadFrame, pack_header, parse_header
from kv_transfer.frame_copy import copy_frame
from kv_transfer.transport import PROBE_EPOCH, CancelGuarantee, FrameHeader, FrameSink, Posted
from kv_transfer.transports.connection_gate import ConnectionGate
from kv_transfer.transports.listener import Listener
from kv_transfer.transports.probing_sink import ProbingSink
from kv_transfer.transports.ring_stores import RingStores
from kv_transfer.transports.stream_io import read_exactly, read_next
from kv_transfer.transports.throttle import Throttle
from kv_transfer.transports.unix_socket import bind_unix, connect_unix

# Small, so that what the sender wrote is still in a cache when the receiver reads it: between two processes on Zen 4,
# 4 MiB move 3.2 GB/s where 16 MiB move 2.1.
RING_BYTES = 4 * 1024 * 1024
# The sender hears of free room this often: two frames of the largest kind, while it fills the other half.
TOLD_EVERY_BYTES = RING_BYTES // 2
MAX_FRAME_BYTES = RING_BYTES // 2
_U64 = struct.Struct("<Q")
_PLACE = struct.Struct("<QQ")  # where the frame starts in the ring; bytes of the ring that it takes
PROBE_RIGHT, PROBE_WRONG = 2**64 - 1, 2**64 - 2  # in place of what was consumed: a probe frame's verdict
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ShmReceiver:
    """A decode worker's listening end: a Unix socket in its private folder."""

    name = "shm"

    def __init__(self, path: Path, gate: ConnectionGate, sink: FrameSink) -> None:
        """Raises OSError when the socket cannot be made there."""
        server = bind_unix(path)
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
        self._connection = connect_unix(self.name, address, nonce)
        try:
            self._ring = self._share_ring()
        except OSError as error:
            self._connection.close()
            raise KvTransferFailed(f"cannot share a ring of {RING_BYTES} bytes: {error}", stage="transfer") from error
        self._written = self._consumed = 0  # bytes since the start, gaps at the ring's end included
        self._num_probes = self._num_verified = 0
        self._stores = RingStores(RING_BYTES)

    def push(self, header: FrameHeader, payload: Sequence[memoryview]) -> Posted:
        """Copies the frame into the ring, waiting for room; the source bytes are free when this returns."""
        self._throttle.pass_through(header.num_bytes)
        self._num_probes += header.epoch == PROBE_EPOCH
        try:
            start, taken = self._make_room(header.num_bytes)
            digest = self._write(payload, start, header.num_bytes)
            digest = header.digest or digest
            self._connection.sendall(pack_header(header, digest) + _PLACE.pack(start, taken))
        except OSError as error:
            self._break(error)
        return Posted(digest)

    def _write(self, payload: Sequence[memoryview], start: int, num_bytes: int) -> bytes:
        targets = self._ring.from_start(start, payload)
        started_s = time.perf_counter()
        digest = copy_frame(payload, targets, past_caches=self._stores.is_past_caches)
        self._stores.wrote(num_bytes, time.perf_counter() - started_s)
        return digest

    def poll(self) -> None:
        """Nothing is ever outstanding for the source."""

    def count_verified(self) -> int:
        try:
            while self._num_probes:
                self._read_answer()
        except OSError as error:
            self._break(error)
        verified, self._num_verified = self._num_verified, 0
        return verified

    def close(self) -> None:
        self._connection.close()
        self._ring = MappedBytes(memoryview(b""))  # the mapping goes with its last view

    def _break(self, error: Exception) -> NoReturn:
        self.close()
        raise KvTransferFailed(f"shm connection broke: {error}", stage="transfer") from error

    def _share_ring(self) -> MappedBytes:
        descriptor = os.memfd_create("tandem-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, RING_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(descriptor, RING_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            self._connection.sendmsg([_U64.pack(RING_BYTES)], rights)
        finally:
            os.close(descriptor)
        return MappedBytes(memoryview(mapping))

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
            self._read_answer()
        self._written += taken
        return (position + gap) % RING_BYTES, taken

    def _read_answer(self) -> None:
        buffer = memoryview(bytearray(_U64.size))
        if not read_exactly(self._connection, buffer):
            raise ConnectionError("the receiver is gone")
        (value,) = _U64.unpack(buffer)
        if value not in (PROBE_RIGHT, PROBE_WRONG):
            self._consumed = value
        elif self._num_probes:
            self._num_probes -= 1
            self._num_verified += value == PROBE_RIGHT


def serve_ring(connection: socket.socket, sink: FrameSink) -> None:
    """Takes the ring over and copies frames out of it until the stream ends. Raises OSError or BadFrame."""
    ring = _receive_ring(connection)
    sink = ProbingSink(sink, lambda is_right: connection.sendall(_U64.pack(PROBE_RIGHT if is_right else PROBE_WRONG)))
    message = memoryview(bytearray(HEADER_BYTES + _PLACE.size))
    consumed = told = 0  # bytes since the start
    while read_next(connection, message):
        header = parse_header(message[:HEADER_BYTES])
        start, taken = _PLACE.unpack(message[HEADER_BYTES:])
        if start + header.num_bytes > RING_BYTES or taken > RING_BYTES:
            raise BadFrame(f"a frame of {header.num_bytes} bytes at {start} lies outside the ring")
        runs = sink.open_frame(header)
        if runs is not None:
            _land(ring, start, header, runs, sink)
        consumed += taken
        # Not after every frame: the sender reads these only when it needs room, and a Unix socket holds few messages.
        if consumed - told >= TOLD_EVERY_BYTES:
            connection.sendall(_U64.pack(consumed))
            told = consumed


def _land(ring: MappedBytes, start: int, header: FrameHeader, runs: Sequence[memoryview], sink: FrameSink) -> None:
    arrived_digest = None
    try:
        # The pool is read by a later step, not by us: written past the caches, two cores move 1.3 times as much.
        arrived_digest = copy_frame(ring.from_start(start, runs), runs, past_caches=True)
    finally:
        sink.close_frame(header, arrived_digest)


def _receive_ring(connection: socket.socket) -> MappedBytes:
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
        return MappedBytes(memoryview(mmap.mmap(descriptors[0], size, prot=mmap.PROT_READ)))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
