"""The log file that a child writes to by itself: bounded, with the part before kept once beside it.

The child holds the file open and knows of nothing: it is copied and cut, not renamed. What it writes between the two is
lost from the copy; it appends, so after the cut it goes on at the beginning.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable
from pathlib import Path

# Twice this for each process at most, and some seconds' worth of what a child writes that has gone wild.
MAX_LOG_BYTES = 8 * 2**20
CHECK_INTERVAL_S = 5.0
TAIL_BYTES = 64 * 1024


class ProcessLog:
    """The log of one run of a process. Earlier runs may have written to the same file."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._start_of_run = path.stat().st_size if path.exists() else 0

    def open(self) -> int:
        """A descriptor for the child, which the caller closes."""
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def keep_bounded(self, exit_: Awaitable[object], interval_s: float = CHECK_INTERVAL_S) -> None:
        """Until the process's exit."""
        ended = asyncio.ensure_future(exit_)
        while not (await asyncio.wait((ended,), timeout=interval_s))[0]:
            await asyncio.to_thread(self.bound)
        await ended

    def bound(self) -> None:
        """Cuts the file when it has grown too large."""
        if self.path.stat().st_size <= self._max_bytes:
            return
        shutil.copyfile(self.path, self.path.with_suffix(".log.1"))
        os.truncate(self.path, 0)
        self._start_of_run = 0

    def last_lines(self, count: int) -> list[str]:
        """The end of what was written in this run."""
        with self.path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._start_of_run, end - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
