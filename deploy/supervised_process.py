"""One process under supervision: started, watched until ready, started again when it crashes, stopped when asked.

STARTING ──ready──> READY ──crash──> BACKING_OFF ──> STARTING ...
    └──────────────── crash loop, or it refuses to start ────> FAILED
READY ──ends well, told to by somebody──> BACKING_OFF: a drain is no crash
any ──stop()──> STOPPED
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable

from cluster.ended_tasks import end_tasks
from cluster.errors import StartupError
from cluster.process_guard import EXIT_STARTUP_ERROR
from deploy.launcher import LaunchedProcess, Launcher
from deploy.process_spec import ProcessSpec
from deploy.restart_policy import CrashHistory, GiveUp, RestartLimits, after_crash

PROBE_INTERVAL_S = 0.1
PROBE_TIMEOUT_S = 2.0
# After SIGKILL the kernel may still be writing pages back.
KILL_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class ProcessState(enum.Enum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing off"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"


class SupervisedProcess:
    """Owns one process over all its incarnations. `start` once, `stop` once; both on the same event loop."""

    def __init__(
        self,
        spec: ProcessSpec,
        launcher: Launcher,
        on_change: Callable[[SupervisedProcess], None],
        limits: RestartLimits | None = None,
    ) -> None:
        self.spec = spec
        self.state = ProcessState.WAITING
        self.restarts = 0
        self.last_exit = ""  # how the incarnation before ended
        self.failure = ""  # one line, when FAILED
        self.ready_after_s = 0.0
        self._launcher = launcher
        self._on_change = on_change
        self._limits = limits or RestartLimits()
        self._history = CrashHistory()
        self._process: LaunchedProcess | None = None
        self._was_ready = False
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def last_lines(self, count: int) -> list[str]:
        return self._process.last_lines(count) if self._process is not None else []

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"supervise-{self.spec.name}")

    async def stop(self) -> None:
        """Drains the process, kills it (with its children) after `stop_timeout_s`, and waits for its end."""
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None
        if self._process is not None:
            if self.state is not ProcessState.FAILED:
                self._enter(ProcessState.STOPPING)
            await self._end(self._process)
        self._enter(ProcessState.STOPPED)

    def kill(self) -> None:
        """Ends it now; `stop`, already waiting or called next, returns at once."""
        if self._process is not None:
            self._process.kill()

    async def _run(self) -> None:
        try:
            while await self._run_once():
                self.restarts += 1
        except StartupError as error:
            self._fail(error.message)
        except Exception:
            _log.exception("supervision failed", extra={"child": self.spec.name})
            self._fail(f"{self.spec.name}: its supervision failed, see the log")

    async def _run_once(self) -> bool:
        """One incarnation from start to unasked end; whether there shall be another."""
        started_s = time.monotonic()
        self._enter(ProcessState.STARTING)
        self._process = process = await self._launcher.launch(self.spec)
        exited = asyncio.create_task(process.wait(), name=f"wait-{self.spec.name}")
        is_hung = is_ready = False
        try:
            if is_ready := await self._wait_until_ready(exited):
                self.ready_after_s = time.monotonic() - started_s
                self._was_ready = True
                self._enter(ProcessState.READY)
            elif not exited.done():
                is_hung = True
                process.kill()
            status = await exited
        finally:
            exited.cancel()
        process.kill()  # what it left behind in its group
        self.last_exit = describe_status(status)
        if is_ready and status == 0:
            # Somebody told it to end, `tandem drain` say: by itself it does not end well. Nothing has crashed.
            return await self._again_after(self._limits.first_delay_s)
        return await self._after_exit(status, time.monotonic() - started_s, is_hung)

    async def _wait_until_ready(self, exited: asyncio.Task[int]) -> bool:
        deadline_s = time.monotonic() + self.spec.start_timeout_s
        while not exited.done() and time.monotonic() < deadline_s:
            if await self._is_ready():
                return True
            await asyncio.wait((exited,), timeout=PROBE_INTERVAL_S)
        return False

    async def _is_ready(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await self.spec.probe()
        except (OSError, TimeoutError):
            return False

    async def _after_exit(self, status: int, ran_s: float, is_hung: bool) -> bool:
        if not self._was_ready and (status == EXIT_STARTUP_ERROR or is_hung):
            # It says itself that it cannot start, or it hung: the next attempt would end the same way.
            reason = f"was not ready within {self.spec.start_timeout_s:.0f} s" if is_hung else "cannot start"
            self._fail(self._with_last_line(f"{self.spec.name} {reason}"))
            return False
        self._history, decision = after_crash(self._history, ran_s, time.monotonic(), self._limits)
        if isinstance(decision, GiveUp):
            times = f"{decision.crashes} times within {decision.within_s:.0f} s"
            self._fail(self._with_last_line(f"{self.spec.name} crashed {times} (last {self.last_exit})"))
            return False
        return await self._again_after(decision.after_s)

    async def _again_after(self, delay_s: float) -> bool:
        self._enter(ProcessState.BACKING_OFF)
        await asyncio.sleep(delay_s)
        return True

    async def _end(self, process: LaunchedProcess) -> None:
        process.terminate()
        try:
            async with asyncio.timeout(self.spec.stop_timeout_s):
                await process.wait()
        except TimeoutError:
            _log.warning("did not end when asked, killing it", extra={"child": self.spec.name})
        process.kill()
        async with asyncio.timeout(KILL_TIMEOUT_S):
            await process.wait()

    def _with_last_line(self, what: str) -> str:
        lines = [line for line in self.last_lines(5) if line.strip()]
        return f"{what}: {lines[-1].strip()}" if lines else f"{what}; it wrote nothing"

    def _fail(self, failure: str) -> None:
        self.failure = failure
        self._enter(ProcessState.FAILED)

    def _enter(self, state: ProcessState) -> None:
        if state is not self.state:
            self.state = state
            self._on_change(self)


def describe_status(status: int) -> str:
    """`status 1`, or `signal 9` for a process that was killed."""
    return f"signal {-status}" if status < 0 else f"status {status}"
