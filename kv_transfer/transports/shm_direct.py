"""One copy on one host: the sender writes straight into the receiver's pool, block by block, each write granted first.

    sender                                   receiver
      ── header ─────────────────────────────> asks its sink, pins the blocks
      <──────────── where it may write ─────── (nowhere: the frame is stale)
      copies its blocks into the mapped pool
      ── written, its digest ────────────────> takes the digest in place, unpins

The pool is a memfd that travels over the Unix socket. A granted write is pinned until the sender says that it is done,
or its end of the connection is closed, which a living sender does only between writes and a dead one at once: so a
closed fence means here as well that nothing can land any more. Whoever is granted one block can write into all of them:
use it only between workers that trust each other.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from cluster.byte_runs import EqualRuns, MappedBytes, addresses_of, sizes_of
from cluster.errors import KvTransferFailed, StartupError
from kv_transfer.frame import DIGEST_BYTES, HEADER_BYTES, BadFrame, digest_of, pack_header, parse_header
from kv_transfer.frame_copy import copy_frame
from kv_transfer.kv_memory import KvMemory
from kv_transfer.transport import PROBE_EPOCH, CancelGuarantee, FrameHeader, FrameSink
from kv_transfer.transports.byte_runs import cut
from kv_transfer.transports.connection_gate import ConnectionGate
from kv_transfer.transports.listener import Listener
from kv_transfer.transports.probing_sink import PROBE_BYTES, ProbingSink
from kv_transfer.transports.stream_io import read_exactly, read_next, wait_until_closed
from kv_transfer.transports.throttle import Throttle
from kv_transfer.transports.unix_socket import bind_unix, connect_unix

ASK, WRITTEN = b"A", b"W"
# Frames that are granted and not yet written: while one is being copied the grant of the next is on its way.
MAX_ASKED = 2
_MAPPING = struct.Struct("<QQQ")  # bytes of the memfd, the pool's offset in it, bytes of the pool
# Kind, and a header or a digest: one size for both, so that one read takes either.
_MESSAGE_BYTES = 1 + HEADER_BYTES
# Number of runs; where place 0 is in the pool (of a probe, in the probes' memory); bytes from place to place; bytes of
# each run, or 0: then its offset and its size follow for each run, else its place.
_GRANT = struct.Struct("<IQQQ")
_PLACE_BYTES = 8
MAX_RUNS = 65536
PROBE_RIGHT, PROBE_WRONG = 2**32 - 1, 2**32 - 2  # in place of a number of runs: a probe frame's verdict


class SharedKvMemory(KvMemory, Protocol):
    """A pool in a memfd (`engine.kv_memory.KvMemory` with `shareable`)."""

    memfd: int | None
    mapping_offset: int
    size_bytes: int

    @property
    def address(self) -> int: ...


class ShmDirectReceiver:
    """A decode worker's listening end: a Unix socket in its private folder, through which its pool is handed out."""

    name = "shm-direct"

    def __init__(self, path: Path, gate: ConnectionGate, sink: FrameSink, memory: SharedKvMemory) -> None:
        """Raises OSError when the socket cannot be made there, `StartupError` when the pool is no memfd."""
        if memory.memfd is None:
            raise StartupError("shm-direct needs a KV pool that can be shared", param="transports")
        server = bind_unix(path)
        self.address = str(path)
        self._path = path
        self._memory = memory
        self._listener = Listener(self.name, server, gate, sink, self._serve, is_copying=False)

    def close(self) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self, connection: socket.socket, sink: FrameSink) -> None:
        _GrantingConnection(connection, sink, self._memory).serve()


@dataclass(slots=True)
class _Grant:
    header: FrameHeader
    runs: Sequence[memoryview]


class _GrantingConnection:
    """The receiver's side of one connection. Owned by its thread."""

    def __init__(self, connection: socket.socket, sink: FrameSink, memory: SharedKvMemory) -> None:
        self._connection = connection
        self._memory = memory
        self._probes_memfd = os.memfd_create("tandem-probes", os.MFD_CLOEXEC)
        os.ftruncate(self._probes_memfd, PROBE_BYTES)
        self._probes = np.frombuffer(mmap.mmap(self._probes_memfd, PROBE_BYTES), np.uint8)
        self._sink = ProbingSink(sink, self._judge_probe, memoryview(self._probes.data))
        self._grants: deque[_Grant] = deque()  # the sender writes in the order in which it asked

    def serve(self) -> None:
        """Until the sender's end is closed. Raises OSError or BadFrame."""
        try:
            self._hand_out_pool()
            message = memoryview(bytearray(_MESSAGE_BYTES))
            while read_next(self._connection, message):
                self._answer(bytes(message[:1]), message[1:])
        except (OSError, BadFrame):
            # A sender that we do not understand may be in the middle of a granted write: only its own end says that it
            # is over.
            if self._grants:
                wait_until_closed(self._connection)
            raise
        finally:
            while self._grants:
                self._sink.close_frame(self._grants.popleft().header, None)
            os.close(self._probes_memfd)
            # This object and its sink know each other: the mapping, with a descriptor of its own, would wait for the
            # collector.
            del self._sink, self._probes

    def _hand_out_pool(self) -> None:
        memory = self._memory
        if memory.memfd is None:
            raise BadFrame("the pool is closed")
        size = os.fstat(memory.memfd).st_size
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [memory.memfd, self._probes_memfd]))]
        self._connection.sendmsg([_MAPPING.pack(size, memory.mapping_offset, memory.size_bytes)], rights)

    def _answer(self, kind: bytes, rest: memoryview) -> None:
        if kind == ASK:
            self._grant(parse_header(rest))
        elif kind == WRITTEN and self._grants:
            grant = self._grants.popleft()
            header = grant.header._replace(digest=bytes(rest[:DIGEST_BYTES]))
            self._sink.close_frame(header, digest_of(grant.runs))
        else:
            raise BadFrame(f"unexpected message {kind!r}")

    def _grant(self, header: FrameHeader) -> None:
        runs = self._sink.open_frame(header)
        if runs is None:
            self._connection.sendall(_GRANT.pack(0, 0, 0, 0))
            return
        self._grants.append(_Grant(header, runs))
        pool = int(self._probes.ctypes.data) if header.epoch == PROBE_EPOCH else self._memory.address
        if isinstance(runs, EqualRuns):
            first = runs.address - pool
            self._connection.sendall(_GRANT.pack(len(runs), first, runs.stride, runs.run_bytes) + runs.places.tobytes())
        else:
            places = np.stack((addresses_of(runs) - pool, sizes_of(runs)), axis=1)
            self._connection.sendall(_GRANT.pack(len(runs), 0, 1, 0) + places.tobytes())

    def _judge_probe(self, is_right: bool) -> None:
        self._connection.sendall(_GRANT.pack(PROBE_RIGHT if is_right else PROBE_WRONG, 0, 0, 0))


class DirectTicket:
    """A frame that waits for its grant, or is written."""

    def __init__(self, header: FrameHeader, payload: Sequence[memoryview]) -> None:
        self.done = False
        self.error = ""
        self.digest = header.digest
        self.header = header
        self.payload: Sequence[memoryview] = payload


class ShmDirectSender:
    """A prefill worker's connection to one decode worker on this host. Owned by its sending thread."""

    name = "shm-direct"
    cancel_guarantee = CancelGuarantee.FENCED

    def __init__(self, address: str, nonce: bytes, throttle_bytes_per_s: int = 0) -> None:
        """Raises `KvTransferFailed` when the peer does not answer or its pool cannot be mapped."""
        self._throttle = Throttle(throttle_bytes_per_s)
        self._connection = connect_unix(self.name, address, nonce)
        self._asked: deque[DirectTicket] = deque()
        self._num_probes = self._num_verified = 0
        try:
            self._pool, self._probes = _receive_memory(self._connection)
        except (OSError, BadFrame) as error:
            self._connection.close()
            raise KvTransferFailed(f"cannot map the pool of {address}: {error}", stage="transfer") from error

    def push(self, header: FrameHeader, payload: Sequence[memoryview]) -> DirectTicket:
        """Asks where the frame may go; it is written as soon as the answer is here."""
        ticket = DirectTicket(header, payload)
        self._num_probes += header.epoch == PROBE_EPOCH
        try:
            self._connection.sendall(ASK + pack_header(header))
            self._asked.append(ticket)
            while len(self._asked) > MAX_ASKED:
                self._write_next()
        except (OSError, BadFrame) as error:
            self._break(error)
        return ticket

    def poll(self) -> None:
        """Writes what was granted: the receiver answers every question within microseconds."""
        try:
            while self._asked:
                self._write_next()
        except (OSError, BadFrame) as error:
            self._break(error)

    def count_verified(self) -> int:
        self.poll()
        try:
            while self._num_probes:
                self._take_verdict(self._read_grant()[0])
        except (OSError, BadFrame) as error:
            self._break(error)
        verified, self._num_verified = self._num_verified, 0
        return verified

    def close(self) -> None:
        self._connection.close()
        self._pool = self._probes = MappedBytes(memoryview(b""))  # a mapping goes with its last view

    def _write_next(self) -> None:
        ticket = self._asked[0]
        while (grant := self._read_grant())[0] in (PROBE_RIGHT, PROBE_WRONG):
            self._take_verdict(grant[0])
        if grant[0]:
            targets = self._targets(ticket, *grant)
            self._throttle.pass_through(ticket.header.num_bytes)
            sources = cut(ticket.payload, targets)
            digest = copy_frame(sources, targets, past_caches=True)
            ticket.digest = ticket.digest or digest
            self._connection.sendall((WRITTEN + ticket.digest).ljust(_MESSAGE_BYTES, b"\0"))
        self._asked.popleft()
        ticket.payload = ()
        ticket.done = True

    def _read_grant(self) -> tuple[int, int, int, int]:
        """As `_GRANT` says."""
        num_runs, first, stride, run_bytes = _GRANT.unpack(_read(self._connection, _GRANT.size))
        return num_runs, first, stride, run_bytes

    def _take_verdict(self, value: int) -> None:
        if value not in (PROBE_RIGHT, PROBE_WRONG) or not self._num_probes:
            raise BadFrame(f"unexpected answer {value}")
        self._num_probes -= 1
        self._num_verified += value == PROBE_RIGHT

    def _targets(
        self, ticket: DirectTicket, num_runs: int, first: int, stride: int, run_bytes: int
    ) -> Sequence[memoryview]:
        """Where the frame is to be written. Raises `BadFrame` for what is not the pool's, or not the frame's size."""
        if num_runs > MAX_RUNS:
            raise BadFrame(f"{num_runs} runs for one frame")
        places = array("q", _read(self._connection, num_runs * (_PLACE_BYTES if run_bytes else 2 * _PLACE_BYTES)))
        memory = self._probes if ticket.header.epoch == PROBE_EPOCH else self._pool
        targets: Sequence[memoryview]
        try:
            if run_bytes:
                num_bytes, targets = num_runs * run_bytes, memory.strided(first, places, stride, run_bytes)
            else:
                sizes = places[1::2].tolist()
                num_bytes, targets = sum(sizes), memory.at(places[::2].tolist(), sizes)
        except IndexError as error:
            raise BadFrame(f"the granted places are not the pool's: {error}") from error
        if num_bytes != ticket.header.num_bytes:
            raise BadFrame("the granted places do not fit the frame")
        return targets

    def _break(self, error: Exception) -> None:
        self.close()
        raise KvTransferFailed(f"shm-direct connection broke: {error}", stage="transfer") from error


def _receive_memory(connection: socket.socket) -> tuple[MappedBytes, MappedBytes]:
    """The receiver's pool, and the memory of this connection's probe frames."""
    message, rights, _, _ = connection.recvmsg(_MAPPING.size, socket.CMSG_SPACE(2 * array("i").itemsize))
    descriptors = array("i")
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    try:
        if len(message) != _MAPPING.size or len(descriptors) != 2:
            raise BadFrame("the pool did not come with the greeting")
        size, offset, num_bytes = _MAPPING.unpack(message)
        if os.fstat(descriptors[0]).st_size != size or offset + num_bytes > size:
            raise BadFrame("the pool has another size than was said")
        pool = MappedBytes(memoryview(mmap.mmap(descriptors[0], size))[offset : offset + num_bytes])
        return pool, MappedBytes(memoryview(mmap.mmap(descriptors[1], PROBE_BYTES)))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    if num_bytes and not read_exactly(connection, memoryview(buffer)):
        raise ConnectionError("the peer is gone")
    return bytes(buffer)
