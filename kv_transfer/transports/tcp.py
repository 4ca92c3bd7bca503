"""Frames over TCP: gathered from the source's blocks, received straight into the destination's.

The receiver reads a header, asks its sink where the payload may land, and lets the kernel write it there; the digest is
then taken of the bytes as they lie in the pool. A refused payload is read and dropped, so a cancelled push can never
write late (FENCED).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NoReturn

from cluster.errors import KvTransferFailed
from kv_transfer.frame import HEADER_BYTES, digest_of, pack_header, with_digest
from kv_transfer.transport import PROBE_EPOCH, CancelGuarantee, FrameHeader, FrameSink, Posted
from kv_transfer.transports.connection_gate import ACCEPTED, GREETING_TIMEOUT_S, ConnectionGate, greeting
from kv_transfer.transports.listener import STALL_TIMEOUT_S, Listener
from kv_transfer.transports.probing_sink import ProbingSink
from kv_transfer.transports.stream_io import drain, read_exactly, read_header, send_gathered
from kv_transfer.transports.throttle import Throttle

SOCKET_BUFFER_BYTES = 4 * 1024 * 1024
RIGHT, WRONG = b"+", b"-"  # a probe frame's verdict, the only thing that a receiver says


class TcpReceiver:
    """A decode worker's listening end."""

    name = "tcp"

    def __init__(self, host: str, gate: ConnectionGate, sink: FrameSink) -> None:
        """Listens on a free port of `host`. Raises OSError when that address is not ours."""
        server = socket.create_server((host, 0))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        self.address = f"{host}:{server.getsockname()[1]}"
        self._listener = Listener(self.name, server, gate, sink, serve_frames)

    def close(self) -> None:
        self._listener.close()


class TcpSender:
    """A prefill worker's connection to one decode worker. Owned by its sending thread."""

    name = "tcp"
    cancel_guarantee = CancelGuarantee.FENCED

    def __init__(self, address: str, nonce: bytes, throttle_bytes_per_s: int = 0) -> None:
        """Raises `KvTransferFailed` when the peer does not answer or does not know the nonce."""
        host, _, port = address.rpartition(":")
        try:
            self._connection = socket.create_connection((host, int(port)), GREETING_TIMEOUT_S)
        except (OSError, ValueError) as error:
            raise KvTransferFailed(f"cannot connect to {address} over tcp: {error}", stage="transfer") from error
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self._throttle = Throttle(throttle_bytes_per_s)
        introduce(self._connection, nonce)
        self._num_probes = 0  # without a verdict yet

    def push(self, header: FrameHeader, payload: Sequence[memoryview]) -> Posted:
        """Sends the frame; the source bytes are free when this returns. Raises `KvTransferFailed`."""
        self._throttle.pass_through(header.num_bytes)
        self._num_probes += header.epoch == PROBE_EPOCH
        header = with_digest(header, payload)
        try:
            send_gathered(self._connection, [memoryview(pack_header(header)), *payload])
        except OSError as error:
            self._break(error)
        return Posted(header.digest)

    def poll(self) -> None:
        """Nothing is ever outstanding."""

    def count_verified(self) -> int:
        verdicts = memoryview(bytearray(self._num_probes))
        try:
            if self._num_probes and not read_exactly(self._connection, verdicts):
                raise ConnectionError("the receiver is gone")
        except OSError as error:
            self._break(error)
        self._num_probes = 0
        return bytes(verdicts).count(RIGHT)

    def close(self) -> None:
        self._connection.close()

    def _break(self, error: Exception) -> NoReturn:
        self.close()
        raise KvTransferFailed(f"tcp connection broke: {error}", stage="transfer") from error


def introduce(connection: socket.socket, nonce: bytes) -> None:
    """Says the nonce and waits for the answer. Raises `KvTransferFailed`; the connection is closed then."""
    try:
        connection.sendall(greeting(nonce))
        answer = connection.recv(len(ACCEPTED))
        connection.settimeout(STALL_TIMEOUT_S)
    except OSError as error:
        connection.close()
        raise KvTransferFailed(f"the peer did not answer the greeting: {error}", stage="transfer") from error
    if answer != ACCEPTED:
        connection.close()
        raise KvTransferFailed("the peer does not know this session's nonce", stage="transfer")


def serve_frames(connection: socket.socket, sink: FrameSink) -> None:
    """Receives frames until the stream ends. Raises OSError or BadFrame."""
    sink = ProbingSink(sink, lambda is_right: connection.sendall(RIGHT if is_right else WRONG))
    buffer = memoryview(bytearray(HEADER_BYTES))
    while (header := read_header(connection, buffer)) is not None:
        runs = sink.open_frame(header)
        if runs is None:
            drain(connection, header.num_bytes)
            continue
        arrived_digest = None
        try:
            for run in runs:
                if not read_exactly(connection, run):
                    raise ConnectionError("the stream ended in the middle of a frame")
            arrived_digest = digest_of(runs)
        finally:
            sink.close_frame(header, arrived_digest)
