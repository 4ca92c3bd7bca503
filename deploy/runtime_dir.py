"""A private directory for one running cluster: sockets, secrets, logs. It goes when the cluster goes.

    <base>/.lock          held while a directory is made, joined or cleaned up
    <base>/c-1a2b3c4d/    mode 0700; `.alive` in it is locked by everybody who needs it, as long as they live

A killed supervisor cannot clean up, but the kernel drops its lock: the next start removes directories nobody holds.
Processes that outlive their supervisor (deploy/ray_process_host.py) hold it too, so that the next one finds it again.
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
    """One cluster's directory, from `create` or `join` to `remove` or `leave`. Its lock is shared in between."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, base: Path, run: str = "") -> RuntimeDirectory:
        """A new directory, or the one of this `run` where somebody still holds it; those of dead clusters are removed.

        Raises `StartupError` when `base` is not ours alone.
        """
        make_private(base)
        with _locked(base / ".lock"):
            remove_stale(base)
            path = base / f"{PREFIX}{run or new_run()}"
            path.mkdir(mode=0o700, exist_ok=bool(run))
            (path / "logs").mkdir(mode=0o700, exist_ok=bool(run))
            return cls(path, _share(path, os.O_CREAT))

    @classmethod
    def join(cls, path: Path) -> RuntimeDirectory:
        """A directory that somebody holds, held from now on by us as well. Raises OSError when it is not there."""
        with _locked(path.parent / ".lock", 0):
            return cls(path, _share(path))

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def remove(self) -> None:
        """Deletes all that is in it, then lets the lock go."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)

    def leave(self) -> None:
        """Lets the lock go; the last one to leave deletes what is in it."""
        with _locked(self.path.parent / ".lock"):
            os.close(self._lock_fd)
            _remove_unheld(self.path)


def new_run() -> str:
    """Names one run of a cluster among all others on this machine."""
    return secrets.token_hex(4)


def remove_stale(base: Path) -> list[Path]:
    """Removes the directories that nobody holds, and names them. Call with the base's lock held."""
    return [path for path in sorted(base.glob(f"{PREFIX}*")) if _remove_unheld(path)]


def _remove_unheld(directory: Path) -> bool:
    try:
        lock_fd = os.open(directory / ".alive", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return False
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        shutil.rmtree(directory, ignore_errors=True)
        return True
    finally:
        os.close(lock_fd)


def _share(directory: Path, flags: int = 0) -> int:
    """A descriptor that holds the directory's lock beside others. Children do not inherit it."""
    lock_fd = os.open(directory / ".alive", os.O_RDWR | flags, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_SH)  # whoever takes it alone has the base's lock, as we have now
    return lock_fd


@contextmanager
def _locked(path: Path, flags: int = os.O_CREAT) -> Iterator[None]:
    lock_fd = os.open(path, os.O_RDWR | flags, 0o600)
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
