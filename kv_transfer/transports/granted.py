"""Frames whose every write is granted first, moved by a communication library; what both sides say goes over TCP.

    sender                                   receiver
      <───────── how to reach its endpoint ── opens the library's endpoint for this connection alone
      ── header ─────────────────────────────> asks its sink, pins the blocks, makes its endpoint expect them
      <── granted: where it may write ──────── (or refused: the frame is stale, nothing is written)
      ══ payload, through the library ═══════> straight into the blocks
      <── verdict ──────────────────────────── takes the digest in place, unpins

A granted write is pinned until it has landed or both endpoints of the connection are gone: the sender closes its own
before the connection, the receiver before it unpins. So a closed fence means here as well that nothing can land any
more. `kv_transfer.transports.ucx` and `nixl` are the libraries; this file knows neither.

A library moves on only where it is polled, and what has landed may still owe its sender an end that the receiver's
progress brings. So the receiver looks after its library for a while after the last frame, more and more seldom, and a
sender for which nothing moves for `STALL_TIMEOUT_S` breaks its connection: no frame is waited for without end.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from cluster.byte_runs import Offsets, addresses_of, sizes_of
from cluster.errors import KvTransferFailed
from kv_transfer.frame import HEADER_BYTES, BadFrame, digest_of, pack_header, with_digest
from kv_transfer.transport import CancelGuarantee, FrameHeader, FrameSink
from kv_transfer.transports.byte_runs import cut_to
from kv_transfer.transports.connection_gate import GREETING_TIMEOUT_S, ConnectionGate
from kv_transfer.transports.listener import STALL_TIMEOUT_S, Listener
from kv_transfer.transports.probing_sink import PROBE_BYTES, ProbingSink
from kv_transfer.transports.stream_io import read_exactly, read_header, send_gathered, wait_until_closed
from kv_transfer.transports.tcp import introduce
from kv_transfer.transports.throttle import Throttle

# Frames that are asked for and not yet written: while one is on its way the grant of the next arrives.
MAX_OUTSTANDING = 4
# A sender that asks for more without writing any is not one of ours.
MAX_GRANTS = 64
MAX_RUNS = 65536
MAX_INTRODUCTION_BYTES = 1024 * 1024
# The receiver's pauses between looks at its library while nothing is granted: after their sum it sleeps until the next
# message. Twice the sender's patience, so that the first to give up is the one that has lost something by it.
LINGERING_MS = (*(1 << exponent for exponent in range(8)), *[256] * int(2 * STALL_TIMEOUT_S * 1000 / 256))
# How long a closing sender waits for what it wrote to land.
FLUSH_TIMEOUT_S = 5.0
GRANTED, REFUSED, VERDICT = 1, 2, 3
_ANSWER = struct.Struct("<BII")  # kind; number of the grant; runs that follow, or whether the digest was right
_LENGTH = struct.Struct("<I")
_SPINS = 200
_LONGEST_PAUSE_S = 0.001


class Place(NamedTuple):
    """Where one run goes, in the receiver's address space."""

    address: int
    num_bytes: int


class LandingEndpoint(Protocol):
    """A library's receiving half of one connection. Owned by the connection's thread.

    `is_fence`: once it is closed nothing can land, whatever the sender does.
    """

    is_fence: bool

    def introduction(self) -> bytes:
        """What the sender's half needs to reach this one."""
        ...

    def expect(self, number: int, runs: Sequence[memoryview]) -> None:
        """The payload of this grant may arrive from now on. Raises OSError."""
        ...

    def landed(self) -> list[int]:
        """Moves on without waiting; the grants whose payload is complete since the last call. Raises OSError."""
        ...

    def close(self) -> None: ...


class WritingEndpoint(Protocol):
    """A library's sending half of one connection. Owned by the sending thread."""

    def write(self, number: int, sources: Sequence[memoryview], places: Sequence[Place]) -> None:
        """Starts moving sources to places of equal sizes. Raises OSError."""
        ...

    def written(self) -> list[int]:
        """Moves on without waiting; the grants whose sources are free since the last call. Raises OSError."""
        ...

    def close(self) -> None:
        """Afterwards no source is read and nothing is written any more."""
        ...


class GrantedReceiver:
    """A decode worker's listening end for one library."""

    def __init__(
        self,
        name: str,
        host: str,
        gate: ConnectionGate,
        sink: FrameSink,
        open_endpoint: Callable[[memoryview], LandingEndpoint],
    ) -> None:
        """`open_endpoint` gets the memory that this connection's probe frames land in.

        Listens on a free port of `host`. Raises OSError when that address is not ours.
        """
        server = socket.create_server((host, 0))
        self.name = name
        self.address = f"{host}:{server.getsockname()[1]}"
        self._open_endpoint = open_endpoint
        self._listener = Listener(name, server, gate, sink, self._serve, is_copying=False)

    def close(self) -> None:
        self._listener.close()

    def _serve(self, connection: socket.socket, sink: FrameSink) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        scratch = memoryview(bytearray(PROBE_BYTES))
        probing = ProbingSink(sink, lambda _: None, scratch)  # every frame gets its verdict
        _GrantingConnection(connection, probing, self._open_endpoint(scratch)).serve()


@dataclass(frozen=True, slots=True)
class _Grant:
    header: FrameHeader
    runs: Sequence[memoryview]


class _GrantingConnection:
    """The receiver's side of one connection. Owned by its thread."""

    def __init__(self, connection: socket.socket, sink: FrameSink, endpoint: LandingEndpoint) -> None:
        self._connection = connection
        self._sink = sink
        self._endpoint = endpoint
        self._grants: dict[int, _Grant] = {}
        self._number = 0

    def serve(self) -> None:
        """Until the sender's end is closed. Raises OSError or BadFrame."""
        buffer = memoryview(bytearray(HEADER_BYTES))
        try:
            introduction = self._endpoint.introduction()
            self._connection.sendall(_LENGTH.pack(len(introduction)) + introduction)
            self._wait_for_message()
            while (header := read_header(self._connection, buffer)) is not None:
                self._answer(header)
                self._wait_for_message()
        except (OSError, BadFrame):
            if self._grants and not self._endpoint.is_fence:
                wait_until_closed(self._connection)
            raise
        finally:
            self._endpoint.close()
            while self._grants:
                self._sink.close_frame(self._grants.popitem()[1].header, None)

    def _wait_for_message(self) -> None:
        """Lands what was granted until there is something to read; later for what has landed. Raises OSError."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while self._grants:
            for _ in pauses("nothing of what was granted was written"):
                if poll.poll(0):
                    return
                if self._take_landed():
                    break
        for pause_ms in LINGERING_MS:
            if poll.poll(pause_ms):
                return
            self._take_landed()

    def _take_landed(self) -> bool:
        landed = self._endpoint.landed()
        for number in landed:
            grant = self._grants.pop(number, None)
            if grant is None:
                raise BadFrame(f"a payload for grant {number}, which is not open")
            digest = digest_of(grant.runs)
            self._sink.close_frame(grant.header, digest)
            self._connection.sendall(_ANSWER.pack(VERDICT, number, digest == grant.header.digest))
        return bool(landed)

    def _answer(self, header: FrameHeader) -> None:
        if len(self._grants) >= MAX_GRANTS:
            raise BadFrame(f"{MAX_GRANTS} frames are granted and not written")
        runs = self._sink.open_frame(header)
        if runs is None:
            self._connection.sendall(_ANSWER.pack(REFUSED, 0, 0))
            return
        self._number = (self._number + 1) % 2**24
        self._grants[self._number] = _Grant(header, runs)
        self._endpoint.expect(self._number, runs)
        places = np.stack((addresses_of(runs), sizes_of(runs)), axis=1)
        self._connection.sendall(_ANSWER.pack(GRANTED, self._number, len(runs)) + places.tobytes())


class GrantedTicket:
    """A frame that waits for its grant, is being written, or is written."""

    def __init__(self, header: FrameHeader, payload: Sequence[memoryview]) -> None:
        self.done = False
        self.error = ""
        self.header = header
        self.payload = payload

    @property
    def digest(self) -> bytes:
        return self.header.digest


class GrantedSender:
    """A prefill worker's connection to one decode worker. Owned by its sending thread."""

    cancel_guarantee = CancelGuarantee.FENCED

    def __init__(
        self,
        name: str,
        address: str,
        nonce: bytes,
        throttle_bytes_per_s: int,
        open_endpoint: Callable[[bytes], WritingEndpoint],
    ) -> None:
        """`open_endpoint` gets the receiver's introduction.

        Raises `KvTransferFailed` when the peer does not answer, does not know the nonce or cannot be reached.
        """
        self.name = name
        self._throttle = Throttle(throttle_bytes_per_s)
        self._asked: deque[GrantedTicket] = deque()
        self._granted: dict[int, GrantedTicket] = {}
        self._unwritten: set[int] = set()
        self._unjudged: set[int] = set()
        self._num_verified = 0
        self._moved_at = time.monotonic()
        host, _, port = address.rpartition(":")
        try:
            self._connection = socket.create_connection((host, int(port)), GREETING_TIMEOUT_S)
        except (OSError, ValueError) as error:
            raise KvTransferFailed(f"cannot connect to {address} over {name}: {error}", stage="transfer") from error
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        introduce(self._connection, nonce)
        try:
            (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
            if size > MAX_INTRODUCTION_BYTES:
                raise BadFrame(f"an introduction of {size} bytes")
            self._endpoint = open_endpoint(self._read(size))
        except (OSError, BadFrame) as error:
            self._connection.close()
            raise KvTransferFailed(f"{name} does not reach {address}: {error}", stage="transfer") from error
        self._poll = select.poll()
        self._poll.register(self._connection, select.POLLIN)

    def push(self, header: FrameHeader, payload: Sequence[memoryview]) -> GrantedTicket:
        """Asks where the frame may go; it is written as soon as the answer is here. Raises `KvTransferFailed`."""
        ticket = GrantedTicket(with_digest(header, payload), payload)
        try:
            send_gathered(self._connection, [memoryview(pack_header(ticket.header))])
            if not self._is_owed:
                self._moved_at = time.monotonic()
            self._asked.append(ticket)
            self._advance_until(lambda: len(self._asked) + len(self._granted) < MAX_OUTSTANDING)
        except (OSError, BadFrame) as error:
            self._break(error)
        return ticket

    def poll(self) -> None:
        """Moves on what was granted and what is being written. Raises `KvTransferFailed`, also when nothing does."""
        try:
            while self._advance():
                pass
            if self._is_owed and time.monotonic() - self._moved_at > STALL_TIMEOUT_S:
                raise TimeoutError(f"no frame moved on for {STALL_TIMEOUT_S:g} s: {self._standing()}")
        except (OSError, BadFrame) as error:
            self._break(error)

    def count_verified(self) -> int:
        """Of probes and all others."""
        try:
            self._advance_until(lambda: not self._is_owed)
        except (OSError, BadFrame) as error:
            self._break(error)
        verified, self._num_verified = self._num_verified, 0
        return verified

    def close(self) -> None:
        """Waits a while for what was written to land, then ends both; what is left is dropped by the receiver."""
        with suppress(OSError, BadFrame):
            self._advance_until(lambda: not self._is_owed, FLUSH_TIMEOUT_S)
        self._destroy()

    @property
    def _is_owed(self) -> bool:
        """Frames are waiting for their grants, or are granted and have not ended."""
        return bool(self._asked or self._granted)

    def _standing(self) -> str:
        return f"{len(self._asked)} not granted, {len(self._unwritten)} not written, {len(self._unjudged)} not landed"

    def _advance_until(self, is_reached: Callable[[], bool], timeout_s: float = STALL_TIMEOUT_S) -> None:
        """Raises OSError when nothing moves for that long."""
        while not is_reached():
            for _ in pauses("the receiver does not answer", timeout_s):
                if self._advance():
                    break

    def _advance(self) -> bool:
        """One step of whatever can move; False when nothing could."""
        has_moved = False
        while self._poll.poll(0):
            self._take_answer()
            has_moved = True
        for number in self._endpoint.written() if self._granted else ():
            self._unwritten.discard(number)
            self._end(number)
            has_moved = True
        if has_moved:
            self._moved_at = time.monotonic()
        return has_moved

    def _take_answer(self) -> None:
        kind, number, value = _ANSWER.unpack(self._read(_ANSWER.size))
        if kind == VERDICT and number in self._unjudged:
            self._unjudged.discard(number)
            self._num_verified += value
            self._end(number)
        elif kind == REFUSED and self._asked:
            self._asked.popleft().done = True
        elif kind == GRANTED and self._asked and 0 < value <= MAX_RUNS:
            places = np.frombuffer(self._read(value * 16), np.int64).reshape(-1, 2)
            self._write(number, places)
        else:
            raise BadFrame(f"unexpected answer {kind} for grant {number}")

    def _write(self, number: int, places: Offsets) -> None:
        """`places [runs, 2]`: address and bytes of each."""
        ticket = self._asked.popleft()
        if int(places[:, 1].min()) < 0 or int(places[:, 1].sum()) != ticket.header.num_bytes:
            raise BadFrame("the granted places do not fit the frame")
        self._throttle.pass_through(ticket.header.num_bytes)
        # Kept until it is written: a piece across two runs is a copy that nobody else holds.
        ticket.payload = sources = cut_to(ticket.payload, places[:, 1].tolist())
        self._granted[number] = ticket
        self._unwritten.add(number)
        self._unjudged.add(number)
        self._endpoint.write(number, sources, [Place(*place) for place in places.tolist()])

    def _end(self, number: int) -> None:
        """Done is what is not read here any more and has landed there: until then both libraries want to be polled."""
        if number not in self._unwritten and number not in self._unjudged:
            self._granted.pop(number).done = True

    def _read(self, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        if num_bytes and not read_exactly(self._connection, memoryview(buffer)):
            raise ConnectionError("the receiver is gone")
        return bytes(buffer)

    def _break(self, error: Exception) -> None:
        self._destroy()
        raise KvTransferFailed(f"{self.name} connection broke: {error}", stage="transfer") from error

    def _destroy(self) -> None:
        """The endpoint first: while the connection stands the receiver keeps what was granted pinned."""
        self._endpoint.close()
        self._connection.close()
        self._asked.clear()
        self._granted.clear()


def pauses(what: str, timeout_s: float = STALL_TIMEOUT_S) -> Iterator[None]:
    """Tries worth making, longer and longer apart. Raises TimeoutError with `what` when they have lasted too long."""
    started, pause_s = time.monotonic(), 0.0
    for count in range(1 << 62):
        yield
        if count > _SPINS:
            pause_s = min(_LONGEST_PAUSE_S, pause_s + 10e-6)
            if time.monotonic() - started > timeout_s:
                raise TimeoutError(f"{what} for {timeout_s:g} s")
        time.sleep(pause_s)
