"""A private directory for one running cluster: sockets, secrets, logs. It goes when the cluster goes.

    <base>/.lock          held while a directory is made or cleaned up
    <base>/c-1a2b3c4d/    mode 0700; `.alive` in it is locked by the supervisor as long as it lives

A killed supervisor cannot clean up, but the kernel drops its lock: the next start removes directories nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import StartupError

PREFIX = "c-"


def default_base() -> Path:
    """`$TANDEM_RUNTIME_DIR`, else a directory of this user among temporary files: socket paths must be short."""
    given = os.environ.get("TANDEM_RUNTIME_DIR")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"tandem-{os.getuid()}"


class RuntimeDirectory:
    """One cluster's directory, made by `create` and given back by `remove`. The lock is held in between."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, base: Path) -> RuntimeDirectory:
        """A new directory; those of dead clusters are removed. Raises `StartupError` when `base` is not ours alone."""
        make_private(base)
        with _locked(base / ".lock"):
            remove_stale(base)
            path = base / f"{PREFIX}{secrets.token_hex(4)}"
            path.mkdir(mode=0o700)
            lock_fd = _try_lock(path)
        if lock_fd is None:
            raise StartupError(f"{path} was taken by another process while it was made")
        (path / "logs").mkdir(mode=0o700)
        return cls(path, lock_fd)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def remove(self) -> None:
        """Deletes all that is in it, then lets the lock go."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def remove_stale(base: Path) -> list[Path]:
    """Removes the directories that no living supervisor holds, and names them. Call with the base's lock held."""
    removed: list[Path] = []
    for path in sorted(base.glob(f"{PREFIX}*")):
        lock_fd = _try_lock(path)
        if lock_fd is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock_fd)
            removed.append(path)
    return removed


def _try_lock(directory: Path) -> int | None:
    """A descriptor that holds the directory's lock; None while somebody else does. Children do not inherit it."""
    try:
        lock_fd = os.open(directory / ".alive", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock_fd)
        return None
    return lock_fd


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock_fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX)  # held for milliseconds by whoever has it
        yield
    finally:
        os.close(lock_fd)


def make_private(base: Path) -> None:
    """Makes a directory of this user alone. Raises `StartupError` when it is somebody else's.

    Others may write where temporary files lie: a directory or link they put there is refused.
    """
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = base.lstat()
    except OSError as error:
        raise StartupError(f"cannot make the runtime directory {base}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StartupError(f"{base} is not a directory of this user alone: remove it, or set TANDEM_RUNTIME_DIR")
