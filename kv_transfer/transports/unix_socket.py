"""Both ends of a Unix socket for KV frames: a private file to listen on, and a greeted connection to it."""

from __future__ import annotations

import socket
from pathlib import Path

from cluster.errors import KvTransferFailed
from kv_transfer.transports.connection_gate import GREETING_TIMEOUT_S
from kv_transfer.transports.tcp import introduce


def bind_unix(path: Path) -> socket.socket:
    """A socket at `path` that only this user may open; a file that was there is replaced. Raises OSError."""
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    path.chmod(0o600)
    return server


def connect_unix(transport: str, address: str, nonce: bytes) -> socket.socket:
    """A connection that the receiver has let in. Raises `KvTransferFailed`, and leaves nothing open then."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(GREETING_TIMEOUT_S)
    try:
        connection.connect(address)
    except OSError as error:
        connection.close()
        raise KvTransferFailed(f"cannot connect to {address} over {transport}: {error}", stage="transfer") from error
    introduce(connection, nonce)
    return connection
