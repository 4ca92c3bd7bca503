"""Real child processes under supervision: order, crashes, crash loops, refusals, stops that leave nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cluster.errors import StartupError
from deploy.launcher import LocalLauncher
from deploy.process_spec import ProcessSpec, Stage
from deploy.restart_policy import RestartLimits
from deploy.supervised_process import ProcessState, SupervisedProcess
from deploy.supervisor import Supervisor

pytestmark = pytest.mark.cluster

MakeSpec = Callable[..., ProcessSpec]
QUICK = RestartLimits(first_delay_s=0.01, max_delay_s=0.05, max_crashes=3)
TIMEOUT_S = 60.0


class History:
    """Every change of state, in order."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, ProcessState]] = []

    def add(self, process: SupervisedProcess) -> None:
        self.changes.append((process.spec.name, process.state))

    def index(self, name: str, state: ProcessState) -> int:
        return self.changes.index((name, state))


@asynccontextmanager
async def supervising(
    runtime_dir: Path, *specs: ProcessSpec, limits: RestartLimits = QUICK
) -> AsyncIterator[tuple[Supervisor, History]]:
    history = History()
    supervisor = Supervisor(specs, LocalLauncher(runtime_dir / "logs"), history.add, limits)
    try:
        yield supervisor, history
    finally:
        await supervisor.stop()


async def until(is_reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_reached():
        if time.monotonic() > deadline_s:
            pytest.fail("not reached in time")
        await asyncio.sleep(0.01)


def pids_of(runtime_dir: Path, name: str) -> list[int]:
    return [int(pid) for pid in (runtime_dir / f"{name}.pids").read_text().split()]


async def test_processes_start_and_stop_in_order(runtime_dir: Path, stand_in: MakeSpec) -> None:
    specs = [stand_in("router", stage=Stage.ROUTER), stand_in("decode-0"), stand_in("redis", stage=Stage.REDIS)]
    async with supervising(runtime_dir, *specs) as (supervisor, history):
        await asyncio.wait_for(supervisor.start(), TIMEOUT_S)
        assert history.index("redis", ProcessState.READY) < history.index("decode-0", ProcessState.STARTING)
    assert history.index("router", ProcessState.STOPPED) < history.index("decode-0", ProcessState.STOPPING)
    assert history.index("decode-0", ProcessState.STOPPED) < history.index("redis", ProcessState.STOPPING)
    # Each ended by its own SIGTERM handler, which removes the marker.
    assert not any((runtime_dir / spec.name).exists() for spec in specs)


async def test_a_resumed_cluster_waits_for_nobody_and_one_that_cannot_start_does_not_end_it(
    runtime_dir: Path, stand_in: MakeSpec
) -> None:
    specs = [stand_in("decode-0", "refuses", needed_as="decode"), stand_in("decode-1", needed_as="decode")]
    async with supervising(runtime_dir, *specs) as (supervisor, _):
        supervisor.resume()
        failure = asyncio.create_task(supervisor.wait_for_failure())
        refusing, serving = supervisor.processes
        await until(lambda: refusing.state is ProcessState.FAILED and serving.state is ProcessState.READY)
        assert not failure.done()
        os.kill(pids_of(runtime_dir, "decode-1")[0], signal.SIGKILL)
        await until(lambda: serving.restarts == 1 and serving.state is ProcessState.READY)
        failure.cancel()


async def test_killed_process_comes_back_under_its_name(runtime_dir: Path, stand_in: MakeSpec) -> None:
    async with supervising(runtime_dir, stand_in("decode-0")) as (supervisor, history):
        await asyncio.wait_for(supervisor.start(), TIMEOUT_S)
        (process,) = supervisor.processes
        first_pid = process.pid
        os.kill(pids_of(runtime_dir, "decode-0")[0], signal.SIGKILL)
        await until(lambda: ("decode-0", ProcessState.BACKING_OFF) in history.changes)
        await until(lambda: process.state is ProcessState.READY)
        assert process.pid != first_pid
        assert process.restarts == 1


async def test_a_drained_worker_comes_back_however_often_and_only_crashes_count(
    runtime_dir: Path, stand_in: MakeSpec
) -> None:
    async with supervising(runtime_dir, stand_in("decode-0")) as (supervisor, _):
        await asyncio.wait_for(supervisor.start(), TIMEOUT_S)
        (process,) = supervisor.processes

        async def end(number: signal.Signals, restarts: int) -> None:
            await until(lambda: process.state is ProcessState.READY and process.restarts == restarts)
            assert process.pid is not None
            os.kill(process.pid, number)

        for drains in range(2 * QUICK.max_crashes):
            await end(signal.SIGTERM, drains)
        for crashes in range(QUICK.max_crashes):
            await end(signal.SIGKILL, 2 * QUICK.max_crashes + crashes)
        await until(lambda: process.state is ProcessState.FAILED)
        assert f"crashed {QUICK.max_crashes} times" in process.failure


async def test_crash_loop_of_the_only_one_is_an_error_with_its_last_words(
    runtime_dir: Path, stand_in: MakeSpec
) -> None:
    async with supervising(runtime_dir, stand_in("decode-0", "crashes", needed_as="decode")) as (supervisor, _):
        with pytest.raises(StartupError, match=r"decode-0 crashed 3 times .*status 1\): it broke"):
            await asyncio.wait_for(supervisor.start(), TIMEOUT_S)
    assert len(pids_of(runtime_dir, "decode-0")) == QUICK.max_crashes


async def test_crash_loop_while_serving_ends_the_cluster_only_when_nobody_else_serves(
    runtime_dir: Path, stand_in: MakeSpec
) -> None:
    limits = replace(QUICK, max_crashes=1)
    specs = [stand_in(name, needed_as="decode") for name in ("decode-0", "decode-1")]
    async with supervising(runtime_dir, *specs, limits=limits) as (supervisor, _):
        await asyncio.wait_for(supervisor.start(), TIMEOUT_S)
        failure = asyncio.create_task(supervisor.wait_for_failure())
        os.kill(pids_of(runtime_dir, "decode-0")[0], signal.SIGKILL)
        await until(lambda: supervisor.processes[0].state is ProcessState.FAILED)
        assert not failure.done()
        os.kill(pids_of(runtime_dir, "decode-1")[0], signal.SIGKILL)
        assert "decode" in await asyncio.wait_for(failure, TIMEOUT_S)


async def test_process_that_refuses_to_start_is_not_tried_again(runtime_dir: Path, stand_in: MakeSpec) -> None:
    async with supervising(runtime_dir, stand_in("decode-0", "refuses"), stand_in("decode-1")) as (supervisor, _):
        with pytest.raises(StartupError, match="decode-0 cannot start: no such model: give another one"):
            await asyncio.wait_for(supervisor.start(), TIMEOUT_S)
    assert len(pids_of(runtime_dir, "decode-0")) == 1


async def test_process_that_is_never_ready_is_an_error_after_its_time(runtime_dir: Path, stand_in: MakeSpec) -> None:
    spec = stand_in("decode-0", "never-ready", start_timeout_s=0.5)
    async with supervising(runtime_dir, spec) as (supervisor, _):
        with pytest.raises(StartupError, match="not ready within"):
            await asyncio.wait_for(supervisor.start(), TIMEOUT_S)


async def test_program_that_does_not_exist_is_a_startup_error(runtime_dir: Path, stand_in: MakeSpec) -> None:
    spec = replace(stand_in("decode-0"), command=(str(runtime_dir / "none"),))
    async with supervising(runtime_dir, spec) as (supervisor, _):
        with pytest.raises(StartupError, match="decode-0"):
            await asyncio.wait_for(supervisor.start(), TIMEOUT_S)


async def test_process_that_ignores_sigterm_is_killed(runtime_dir: Path, stand_in: MakeSpec) -> None:
    async with supervising(runtime_dir, stand_in("decode-0", "ignores-sigterm", stop_timeout_s=0.2)) as (supervisor, _):
        await asyncio.wait_for(supervisor.start(), TIMEOUT_S)
    assert not psutil.pid_exists(pids_of(runtime_dir, "decode-0")[0])


async def test_grandchildren_go_with_their_process(runtime_dir: Path, stand_in: MakeSpec) -> None:
    async with supervising(runtime_dir, stand_in("decode-0", "has-child")) as (supervisor, _):
        await asyncio.wait_for(supervisor.start(), TIMEOUT_S)
        (grandchild,) = psutil.Process(pids_of(runtime_dir, "decode-0")[0]).children()
    _, alive = psutil.wait_procs([grandchild], timeout=TIMEOUT_S)
    assert not alive


async def test_stop_while_starting_leaves_no_process(runtime_dir: Path, stand_in: MakeSpec) -> None:
    async with supervising(runtime_dir, stand_in("decode-0", "never-ready")) as (supervisor, history):
        start = asyncio.create_task(supervisor.start())
        await until(lambda: (runtime_dir / "decode-0.pids").exists() and bool(pids_of(runtime_dir, "decode-0")))
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
    assert not psutil.pid_exists(pids_of(runtime_dir, "decode-0")[0])
    assert history.changes[-1] == ("decode-0", ProcessState.STOPPED)


async def test_kill_ends_a_long_drain(runtime_dir: Path, stand_in: MakeSpec) -> None:
    spec = stand_in("decode-0", "ignores-sigterm", stop_timeout_s=600)
    async with supervising(runtime_dir, spec) as (supervisor, history):
        await asyncio.wait_for(supervisor.start(), TIMEOUT_S)
        stop = asyncio.create_task(supervisor.stop())
        await until(lambda: ("decode-0", ProcessState.STOPPING) in history.changes)
        supervisor.kill()
        await asyncio.wait_for(stop, TIMEOUT_S)
