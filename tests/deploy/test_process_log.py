"""A child that writes without end fills no disk, and its last words are found all the same."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from deploy.launcher import LocalLauncher
from deploy.process_log import ProcessLog
from deploy.process_spec import ProcessSpec, Stage

MAX_BYTES = 1000
TIMEOUT_S = 60.0


@pytest.fixture
def log(tmp_path: Path) -> ProcessLog:
    (tmp_path / "decode-0.log").write_text("an earlier run\n")
    return ProcessLog(tmp_path / "decode-0.log", MAX_BYTES)


def test_a_large_log_is_cut_once_copied_and_the_child_goes_on_at_its_beginning(log: ProcessLog) -> None:
    child = os.open(log.path, os.O_WRONLY | os.O_APPEND)
    try:
        for number in range(300):
            os.write(child, f"line {number}\n".encode())
            log.bound()
            assert log.path.stat().st_size <= MAX_BYTES
    finally:
        os.close(child)
    assert log.last_lines(1) == ["line 299"]
    assert b"\0" not in log.path.read_bytes(), "no hole where the cut part was"
    kept = log.path.with_suffix(".log.1").read_text().splitlines() + log.path.read_text().splitlines()
    assert kept == [f"line {number}" for number in range(300 - len(kept), 300)], "the two hold the end without a gap"


def test_the_last_lines_are_those_of_this_run(log: ProcessLog) -> None:
    assert log.last_lines(5) == []
    with log.path.open("a") as child:
        child.write("one\ntwo\n")
    log.bound()
    assert log.last_lines(5) == ["one", "two"]


async def test_a_log_is_watched_until_the_process_ends(log: ProcessLog) -> None:
    exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    watching = asyncio.create_task(log.keep_bounded(exited, interval_s=0.001))
    with log.path.open("a") as child:
        child.write("x" * 2 * MAX_BYTES)
    async with asyncio.timeout(TIMEOUT_S):
        while log.path.stat().st_size > MAX_BYTES:  # noqa: ASYNC110  a file
            await asyncio.sleep(0.001)
        exited.set_result(None)
        await watching


async def test_a_launched_process_has_its_log_watched_and_nothing_is_left_running(runtime_dir: Path) -> None:
    spec = ProcessSpec("worker", Stage.WORKER, (sys.executable, "-c", "print('hello')"), _never_asked)
    process = await LocalLauncher(runtime_dir / "logs").launch(spec)
    assert [task.get_name() for task in asyncio.all_tasks() if "bound-" in task.get_name()] == ["bound-worker.log"]
    assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0
    assert process.last_lines(1) == ["hello"]
    assert [task for task in asyncio.all_tasks() if "bound-" in task.get_name()] == []


async def _never_asked() -> bool:
    raise AssertionError("only a supervisor asks")
