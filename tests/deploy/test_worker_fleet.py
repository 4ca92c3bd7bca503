"""A supervisor's real processes as a fleet: started, drained, given up, flipped one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.autoscaler.fleet import FleetState
from deploy.autoscaler.signals import Pool
from deploy.launcher import LocalLauncher
from deploy.process_spec import ProcessSpec
from deploy.supervisor import Supervisor
from deploy.worker_fleet import WorkerFleet

pytestmark = pytest.mark.cluster

MakeSpec = Callable[..., ProcessSpec]
TIMEOUT_S = 60.0


@asynccontextmanager
async def running(
    runtime_dir: Path, stand_in: MakeSpec, mode_of_new: str = "serves"
) -> AsyncIterator[tuple[WorkerFleet, Supervisor]]:
    specs = [stand_in("prefill-0"), stand_in("decode-0", needed_as="decode"), stand_in("decode-1", needed_as="decode")]
    supervisor = Supervisor(specs, LocalLauncher(runtime_dir / "logs"), lambda _: None)
    try:
        await asyncio.wait_for(supervisor.start(), TIMEOUT_S)
        fleet = WorkerFleet(supervisor, lambda _, name: stand_in(name, mode_of_new))
        try:
            yield fleet, supervisor
        finally:
            await fleet.close()
    finally:
        await supervisor.stop()


def states(fleet: WorkerFleet) -> dict[str, FleetState]:
    return {worker.worker_id: worker.state for worker in fleet.workers()}


async def until(is_reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_reached():
        if time.monotonic() > deadline_s:
            pytest.fail("not reached in time")
        await asyncio.sleep(0.01)


async def test_a_worker_is_started_under_a_new_name_and_its_start_up_is_measured(
    runtime_dir: Path, stand_in: MakeSpec
) -> None:
    async with running(runtime_dir, stand_in) as (fleet, _):
        assert fleet.start(Pool.DECODE) == "decode-2"
        assert states(fleet)["decode-2"] is FleetState.STARTING
        await until(lambda: states(fleet)["decode-2"] is FleetState.READY)
        took_s = fleet.start_up_s(Pool.DECODE)
        assert took_s is not None
        assert 0 < took_s < TIMEOUT_S


async def test_a_drained_worker_leaves_the_fleet_and_its_name_is_not_used_again(
    runtime_dir: Path, stand_in: MakeSpec
) -> None:
    async with running(runtime_dir, stand_in) as (fleet, supervisor):
        fleet.stop("decode-1")
        assert states(fleet)["decode-1"] is FleetState.DRAINING
        fleet.stop("decode-1")  # twice changes nothing
        await until(lambda: "decode-1" not in states(fleet))
        assert [process.spec.name for process in supervisor.processes] == ["prefill-0", "decode-0"]
        assert fleet.start(Pool.DECODE) == "decode-2"


async def test_rt45_a_starting_worker_is_given_up_at_once(runtime_dir: Path, stand_in: MakeSpec) -> None:
    async with running(runtime_dir, stand_in, "never-ready") as (fleet, _):
        name = fleet.start(Pool.PREFILL)
        await until(lambda: (runtime_dir / f"{name}.pids").exists())
        fleet.stop(name)
        await until(lambda: name not in states(fleet))


async def test_a_flip_frees_the_place_first_and_counts_as_starting_all_the_while(
    runtime_dir: Path, stand_in: MakeSpec
) -> None:
    async with running(runtime_dir, stand_in) as (fleet, supervisor):
        name = fleet.flip("decode-1", Pool.PREFILL)
        assert name == "prefill-1"
        assert states(fleet)[name] is FleetState.STARTING
        assert name not in [process.spec.name for process in supervisor.processes]
        await until(lambda: states(fleet)[name] is FleetState.READY)
        assert not (runtime_dir / "decode-1").exists(), "it had ended"
        assert sorted(states(fleet)) == ["decode-0", "prefill-0", "prefill-1"]


async def test_a_flip_that_is_no_longer_wanted_drains_and_starts_nothing(runtime_dir: Path, stand_in: MakeSpec) -> None:
    async with running(runtime_dir, stand_in) as (fleet, supervisor):
        name = fleet.flip("decode-1", Pool.PREFILL)
        await asyncio.sleep(0)
        fleet.stop(name)
        await until(lambda: len(supervisor.processes) == 2)
        assert sorted(states(fleet)) == ["decode-0", "prefill-0"]


async def test_stopping_the_supervisor_waits_for_a_drain_and_leaves_nothing(
    runtime_dir: Path, stand_in: MakeSpec
) -> None:
    async with running(runtime_dir, stand_in) as (fleet, supervisor):
        fleet.stop("decode-1")
        await fleet.close()
        await supervisor.stop()
        assert not any((runtime_dir / name).exists() for name in ("prefill-0", "decode-0", "decode-1"))
