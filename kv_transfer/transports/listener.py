"""The receiving end that stream transports share: accept, check the greeting, one thread a connection.

A connection that misbehaves is closed; the listener, its other connections and the process go on.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from kv_transfer.frame import BadFrame
from kv_transfer.transport import FrameSink
from kv_transfer.transports.connection_gate import ACCEPTED, ConnectionGate

MAX_CONNECTIONS = 256
# How long a peer may pause in the middle of a frame; between frames it may be silent for ever.
STALL_TIMEOUT_S = 10.0
# Out of descriptors: accepting fails at once, again and again, until one is free.
ACCEPT_PAUSE_S = 0.1

_log = logging.getLogger(__name__)

# Serves one connection until it ends. Raises OSError or BadFrame when it breaks.
ServeConnection = Callable[[socket.socket, FrameSink], None]


class Listener:
    """Owns a listening socket, its accepting thread and the threads of its connections."""

    def __init__(
        self,
        name: str,
        server: socket.socket,
        gate: ConnectionGate,
        sink: FrameSink,
        serve: ServeConnection,
        *,
        is_copying: bool = True,
    ) -> None:
        """`is_copying`: only this side writes into the pool, so that a connection can be broken at any time. Else the
        sender does, and only its own end says that it has stopped: a broken session asks it to close, and waits."""
        self._break_by = socket.SHUT_RDWR if is_copying else socket.SHUT_WR
        self._name = name
        self._server = server
        self._gate = gate
        self._sink = sink
        self._serve = serve
        self._connections: set[socket.socket] = set()
        # Also those whose connection has ended a moment ago: `close` waits for their last words.
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._close_wanted = threading.Event()
        server.listen(64)
        self._acceptor = threading.Thread(target=self._accept_for_ever, name=f"kv-{name}-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Ends every connection and waits for its thread: afterwards nothing writes into the pool."""
        with self._lock:
            self._is_closed = True
            self._close_wanted.set()
            connections = list(self._connections)
        for end in (self._server, *connections):
            _shut_down(end, socket.SHUT_RDWR)
        self._acceptor.join()
        for thread in self._threads:
            thread.join()
        self._server.close()

    def _accept_for_ever(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError as error:
                if self._is_closed:
                    return
                # Out of descriptors, or the peer was gone already: the next one may be fine.
                _log.warning("%s: cannot accept a connection: %s", self._name, error)
                if self._close_wanted.wait(ACCEPT_PAUSE_S):
                    return
                continue
            with self._lock:
                if self._is_closed or len(self._connections) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                thread = threading.Thread(
                    target=self._run_connection, args=(connection,), name=f"kv-{self._name}", daemon=True
                )
                self._connections.add(connection)
                self._threads = [*(known for known in self._threads if known.is_alive()), thread]
            thread.start()

    def _run_connection(self, connection: socket.socket) -> None:
        peer, reason = None, "closed by the peer"
        try:
            peer = self._gate.enter(connection, lambda: _shut_down(connection, self._break_by))
            if peer is None:
                reason = "no valid greeting"
                return
            connection.settimeout(STALL_TIMEOUT_S)
            connection.sendall(ACCEPTED)
            self._serve(connection, self._sink)
        except (OSError, BadFrame) as error:
            reason = str(error) or type(error).__name__
        finally:
            with self._lock:
                self._connections.discard(connection)
            self._gate.leave(connection)
            connection.close()
            if peer is None:
                _log.warning("%s: a connection was refused: %s", self._name, reason)
            else:
                self._sink.peer_gone(peer, reason)


def _shut_down(end: socket.socket, how: int) -> None:
    """Wakes whoever blocks on it, here or at the other end."""
    try:
        end.shutdown(how)
    except OSError:
        return  # not connected any more
