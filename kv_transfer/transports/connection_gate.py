"""Who may connect to a receiving end: a peer that proves the nonce of its Hello before anything else is read."""

from __future__ import annotations

import hmac
import socket
import threading
from dataclasses import dataclass

GREETING_MAGIC = b"TKV-HELLO-1\0"
NONCE_BYTES = 32
GREETING_BYTES = len(GREETING_MAGIC) + NONCE_BYTES
GREETING_TIMEOUT_S = 5.0
ACCEPTED = b"+"


def greeting(nonce: bytes) -> bytes:
    """What a sender says first."""
    return GREETING_MAGIC + nonce


@dataclass(frozen=True, slots=True)
class Admission:
    peer: str
    nonce: bytes


class ConnectionGate:
    """The nonces that are good now. Thread-safe."""

    def __init__(self) -> None:
        self._admissions: list[Admission] = []
        self._lock = threading.Lock()

    def admit(self, peer: str, nonce: bytes) -> None:
        """Lets connections with this nonce in, under the peer's name. Raises ValueError for a nonce of another size."""
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
        with self._lock:
            self._admissions.append(Admission(peer, nonce))

    def revoke(self, nonce: bytes) -> None:
        with self._lock:
            self._admissions = [admission for admission in self._admissions if admission.nonce != nonce]

    def check(self, connection: socket.socket) -> str | None:
        """Reads a greeting within the deadline; the peer's name, or None for anything else."""
        connection.settimeout(GREETING_TIMEOUT_S)
        data = bytearray()
        while len(data) < GREETING_BYTES:
            part = connection.recv(GREETING_BYTES - len(data))
            if not part:
                return None
            data += part
        if not hmac.compare_digest(bytes(data[: len(GREETING_MAGIC)]), GREETING_MAGIC):
            return None
        said = bytes(data[len(GREETING_MAGIC) :])
        with self._lock:
            admissions = list(self._admissions)
        found = None
        for admission in admissions:  # all of them, whatever matches: the time says nothing
            if hmac.compare_digest(admission.nonce, said):
                found = admission.peer
        return found
