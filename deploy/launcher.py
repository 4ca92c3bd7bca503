"""Starting processes somewhere: here as children of this process. A launcher for other machines has the same interface.

A launched process dies with its launcher (SIGKILL included), has its own process group, so that Ctrl-C in a terminal
reaches the supervisor alone, and writes its output to a file of bounded size.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Protocol

from cluster.errors import StartupError
from cluster.guarded_exec import guarded_command
from cluster.python_modules import module_environment
from deploy.log_stream import FollowedLog, LogStream
from deploy.process_log import ProcessLog
from deploy.process_spec import ProcessSpec


class LaunchedProcess(Protocol):
    """A process that runs, or ran."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Its exit status, negative for a signal."""
        ...

    def terminate(self) -> None:
        """Asks it to drain and end. Nothing happens when it has ended."""
        ...

    def kill(self) -> None:
        """Ends it and all its children now."""
        ...

    def last_lines(self, count: int) -> list[str]:
        """The end of what it wrote in this run."""
        ...


class Launcher(Protocol):
    """Implementations: `LocalLauncher`; `deploy/ray_launcher.py` runs the same specs as actors."""

    async def find_running(self) -> frozenset[str]:
        """Names of what an earlier supervisor of this cluster left running; `launch` gives each of it back, once."""
        ...

    async def launch(self, spec: ProcessSpec) -> LaunchedProcess:
        """Raises `StartupError` when the program cannot be started at all."""
        ...


class LocalLauncher:
    """Children of this process. Must be used from the main thread: a child dies with the thread that made it."""

    def __init__(self, log_directory: Path, log_stream: LogStream | None = None) -> None:
        """`log_stream`: where their logs go beside the files; None: nowhere."""
        self._log_directory = log_directory
        self._log_stream = log_stream

    async def find_running(self) -> frozenset[str]:
        """None: they died with it."""
        return frozenset()

    async def launch(self, spec: ProcessSpec) -> LaunchedProcess:
        log = ProcessLog(self._log_directory / f"{spec.name}.log")
        followed = None if self._log_stream is None else FollowedLog(log.path, spec.name, self._log_stream)
        log_fd = log.open()
        try:
            process = await asyncio.create_subprocess_exec(
                *guarded_command(os.getpid(), spec.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                env={**module_environment(), **spec.environment},
                start_new_session=True,
            )
        except OSError as error:
            raise StartupError(f"cannot start {spec.name} ({spec.command[0]}): {error.strerror}") from None
        finally:
            os.close(log_fd)
        return _LocalProcess(process, log, followed)


class _LocalProcess:
    def __init__(self, process: asyncio.subprocess.Process, log: ProcessLog, followed: FollowedLog | None) -> None:
        self._process = process
        self._log = log
        self._following = None
        if followed is not None:
            self._following = asyncio.create_task(followed.follow(process.wait()), name=f"follow-{log.path.name}")
        self._bounding = asyncio.create_task(log.keep_bounded(process.wait()), name=f"bound-{log.path.name}")
        self._is_group_gone = False

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        await asyncio.shield(self._bounding)
        if self._following is not None:
            await asyncio.shield(self._following)
        return await self._process.wait()

    def terminate(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        # A group outlives its leader as long as a grandchild does. Once both are gone its id may be somebody else's.
        if self._is_group_gone:
            return
        self._is_group_gone = self._process.returncode is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def last_lines(self, count: int) -> list[str]:
        return self._log.last_lines(count)
