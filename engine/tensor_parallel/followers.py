"""Rank 0's side of its followers: starts them, sends them steps, notices when one is gone, ends them.

    rank 0 ──control socket──> follower 1, 2, ...     steps, and "end" by closing it
           ──cells socket────>                        a device's KV (`engine.tensor_parallel.rank_cells`)
           <──exit status────                         a thread each waits for it: whatever the engine does meanwhile

A worker is all of its ranks: when one is lost no step can be computed any more, and a step under way waits for a sum
that never comes. So the loss ends the worker's process at once, as a crash does that peers, routers and launchers know
how to heal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from cluster.errors import StartupError
from cluster.process_guard import thread_environment
from cluster.python_modules import module_environment, python_command
from cluster.settings_flags import settings_to_arguments
from engine.step import StepInput
from engine.tensor_parallel.follower import GO, HERE, READY, FollowerSettings
from engine.tensor_parallel.step_message import send_step

# A process that imports torch on a busy machine; then weights from a slow disk. One that ends is noticed at once.
IMPORT_TIMEOUT_S = 300.0
LOAD_TIMEOUT_S = 1800.0
SEND_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0
# From a broken connection to the exit status that says why.
REASON_TIMEOUT_S = 1.0
EXIT_RANK_LOST = 3
MAX_REFUSAL_BYTES = 4096

OnLost = Callable[[str], None]

logger = logging.getLogger(__name__)


def end_process(reason: str) -> NoReturn:
    """Ends this process as a crash would: other ranks and the kernel give back what it held."""
    logger.critical("a rank is lost, the worker ends", extra={"reason": reason})
    logging.shutdown()
    os._exit(EXIT_RANK_LOST)


class Follower:
    """One follower process with its control socket."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], control: socket.socket, cells: socket.socket
    ) -> None:
        self.rank = rank
        self.process = process
        self.control = control
        self.cells = cells  # where it serves cells of its pool, if they are not in one that all ranks map

    def expect(self, expected: bytes, timeout_s: float) -> None:
        """Waits for its next message. Raises `StartupError` with what it says instead."""
        self.control.settimeout(timeout_s)
        try:
            said = self.control.recv(MAX_REFUSAL_BYTES)
        except TimeoutError:
            raise StartupError(f"rank {self.rank} is not ready after {timeout_s:.0f} s") from None
        except OSError:
            said = b""
        if said == expected:
            return
        if said:
            raise StartupError(f"rank {self.rank}: {said.decode(errors='replace')}")
        raise StartupError(f"{self.how_it_ended()}: its log is with this one's")

    def how_it_ended(self) -> str:
        """Its exit in words; it has ended, or does so within a moment."""
        try:
            status = self.process.wait(REASON_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"rank {self.rank} (process {self.process.pid}) does not answer"
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"rank {self.rank} (process {self.process.pid}) {how}"


class Followers:
    """All ranks but this one. Owned by the worker's engine; `close` ends them."""

    def __init__(self, settings: Sequence[FollowerSettings], private_folder: Path, on_lost: OnLost) -> None:
        """Starts them from the calling thread, with which they die, and returns when all of them are about to connect.

        Their descriptors and `rendezvous` are filled in here. `on_lost` may be called from any thread, once.
        Raises `StartupError`.
        """
        self._on_lost = on_lost
        self._is_over = threading.Lock()  # taken by who ends them first: a loss, or `close`
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=private_folder))
        self.rendezvous = self._folder / "rendezvous"
        self._followers: list[Follower] = []
        self._watchers: list[threading.Thread] = []
        try:
            for one in settings:
                self._followers.append(_start(one.model_copy(update={"rendezvous": self.rendezvous})))
            for follower in self._followers:
                follower.expect(HERE, IMPORT_TIMEOUT_S)
            for follower in self._followers:
                follower.control.sendall(GO)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [follower.process.pid for follower in self._followers]

    @property
    def cells(self) -> list[socket.socket]:
        """Where they serve cells, in order of rank: closed with them."""
        return [follower.cells for follower in self._followers]

    def wait_until_ready(self) -> None:
        """Until they have loaded their parts; from then on a lost one is told. Raises `StartupError`, after `close`."""
        try:
            for follower in self._followers:
                follower.expect(READY, LOAD_TIMEOUT_S)
                follower.control.settimeout(SEND_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        shutil.rmtree(self._folder, ignore_errors=True)
        for follower in self._followers:
            watcher = threading.Thread(
                target=self._watch, args=(follower,), name=f"rank-{follower.rank}-watcher", daemon=True
            )
            self._watchers.append(watcher)
            watcher.start()

    def send(self, step: StepInput) -> None:
        """Raises OSError for a follower that is gone or takes nothing."""
        for follower in self._followers:
            send_step(follower.control, step)

    def lost(self, error: Exception) -> None:
        """A step could not be computed together."""
        ended = [follower.how_it_ended() for follower in self._followers if not _runs_on(follower)]
        self._tell(ended[0] if ended else f"a step failed between the ranks: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Ends them: idle ones by themselves, others by force. Idempotent."""
        self._is_over.acquire(blocking=False)
        for follower in self._followers:
            follower.control.close()
            follower.cells.close()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for follower in self._followers:
            try:
                follower.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                follower.process.kill()
                follower.process.wait()
        for watcher in self._watchers:
            if watcher is not threading.current_thread():
                watcher.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self, follower: Follower) -> None:
        follower.process.wait()
        self._tell(follower.how_it_ended())

    def _tell(self, reason: str) -> None:
        if self._is_over.acquire(blocking=False):
            self._on_lost(reason)


def _start(settings: FollowerSettings) -> Follower:
    """Raises `StartupError` when there is no process to be had."""
    control, their_control = socket.socketpair()
    cells, their_cells = socket.socketpair()
    with their_control, their_cells:
        fds = {"control_fd": their_control.fileno(), "cells_fd": their_cells.fileno()}
        settings = settings.model_copy(update=fds)
        try:
            process = subprocess.Popen(
                python_command("engine.tensor_parallel.follower", *settings_to_arguments(settings)),
                stdin=subprocess.DEVNULL,
                env={**module_environment(), **thread_environment(settings.num_threads)},
                pass_fds=(*fds.values(), *((settings.pool_fd,) if settings.pool_fd >= 0 else ())),
            )
        except OSError as error:
            control.close()
            cells.close()
            raise StartupError(f"rank {settings.rank} cannot be started: {error.strerror}") from None
    cells.settimeout(SEND_TIMEOUT_S)
    return Follower(settings.rank, process, control, cells)


def _runs_on(follower: Follower) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        follower.process.wait(REASON_TIMEOUT_S)
    return follower.process.poll() is None
