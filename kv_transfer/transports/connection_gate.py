"""Who may connect to a receiving end: a peer that proves the nonce of its Hello before anything else is read."""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

GREETING_MAGIC = b"TKV-HELLO-1\0"
NONCE_BYTES = 32
GREETING_BYTES = len(GREETING_MAGIC) + NONCE_BYTES
GREETING_TIMEOUT_S = 5.0
ACCEPTED = b"+"


def greeting(nonce: bytes) -> bytes:
    """What a sender says first."""
    return GREETING_MAGIC + nonce


@dataclass(slots=True, eq=False)
class _Session:
    """One Hello's connections. `break_one` wakes whoever serves a connection."""

    peer: str
    nonce: bytes
    break_one: dict[socket.socket, Callable[[], None]] = field(default_factory=dict)
    on_silent: Callable[[], None] | None = None


class ConnectionGate:
    """The sessions that may connect now, and their connections. Thread-safe."""

    def __init__(self) -> None:
        self._sessions: list[_Session] = []
        self._lock = threading.Lock()

    def admit(self, peer: str, nonce: bytes) -> None:
        """Lets connections with this nonce in, under the peer's name. Raises ValueError for a nonce of another size."""
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
        with self._lock:
            self._sessions.append(_Session(peer, nonce))

    def end_session(self, nonce: bytes, on_silent: Callable[[], None] | None = None) -> None:
        """Lets nobody in with this nonce any more and breaks the connections that came in with it.

        `on_silent` is called, here or from the last connection's thread, when none is left: then nothing of the session
        can land any more.
        """
        with self._lock:
            session = next((session for session in self._sessions if session.nonce == nonce), None)
            breaks = list(session.break_one.values()) if session is not None else []
            if session is not None and breaks:
                session.on_silent, session.nonce = on_silent, b""
            elif session is not None:
                self._sessions.remove(session)
        for break_one in breaks:
            break_one()
        if not breaks and on_silent is not None:
            on_silent()

    def enter(self, connection: socket.socket, break_one: Callable[[], None]) -> str | None:
        """Reads a greeting within the deadline; the peer's name, or None for anything else. Pair it with `leave`."""
        connection.settimeout(GREETING_TIMEOUT_S)
        said = _read_greeting(connection)
        if said is None:
            return None
        found: _Session | None = None
        with self._lock:
            for session in self._sessions:  # all of them, whatever matches: the time says nothing
                if hmac.compare_digest(session.nonce, said):
                    found = session
            if found is None:
                return None
            found.break_one[connection] = break_one
        return found.peer

    def leave(self, connection: socket.socket) -> None:
        """The connection's thread has let go of everything that it held."""
        on_silent = None
        with self._lock:
            session = next((session for session in self._sessions if connection in session.break_one), None)
            if session is None:
                return
            del session.break_one[connection]
            if not session.nonce and not session.break_one:
                self._sessions.remove(session)
                on_silent = session.on_silent
        if on_silent is not None:
            on_silent()


def _read_greeting(connection: socket.socket) -> bytes | None:
    """The nonce that was said."""
    data = bytearray()
    while len(data) < GREETING_BYTES:
        part = connection.recv(GREETING_BYTES - len(data))
        if not part:
            return None
        data += part
    if not hmac.compare_digest(bytes(data[: len(GREETING_MAGIC)]), GREETING_MAGIC):
        return None
    return bytes(data[len(GREETING_MAGIC) :])
