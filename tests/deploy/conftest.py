"""Short private directories, and stand-ins for the processes of a cluster: small programs that behave as told."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.process_spec import ProcessSpec, Stage

# Tells that it runs by a file; ends on SIGTERM unless told otherwise.
PROGRAM = """
import os, pathlib, signal, sys, time
mode, marker = sys.argv[1], pathlib.Path(sys.argv[2])
with marker.with_suffix(".pids").open("a") as pids:
    pids.write(f"{os.getpid()}\\n")
if mode == "refuses":
    sys.stderr.write("no such model: give another one\\n")
    sys.exit(2)
if mode == "crashes":
    sys.stderr.write("it broke\\n")
    sys.exit(1)
if mode == "never-ready":
    time.sleep(600)
if mode == "has-child":
    if os.fork() == 0:
        time.sleep(600)
def end(number, frame):
    if mode != "ignores-sigterm":
        marker.unlink(missing_ok=True)
        sys.exit(0)
signal.signal(signal.SIGTERM, end)
marker.write_text(str(os.getpid()))
while True:
    time.sleep(600)
"""


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A short private path: pytest's own are too long for a socket's address."""
    path = Path(tempfile.mkdtemp(prefix="tandem-test-"))
    (path / "logs").mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def stand_in(runtime_dir: Path) -> Callable[..., ProcessSpec]:
    """`stand_in(name, mode, stage)`: a program of this file, ready when its marker file is there."""

    def make(
        name: str,
        mode: str = "serves",
        stage: Stage = Stage.WORKER,
        needed_as: str = "",
        start_timeout_s: float = 60.0,
        stop_timeout_s: float = 30.0,
    ) -> ProcessSpec:
        marker = runtime_dir / name

        async def probe() -> bool:
            # A marker of an earlier incarnation does not count.
            pids = marker.with_suffix(".pids")
            return marker.exists() and pids.read_text().split()[-1] == marker.read_text()

        return ProcessSpec(
            name=name,
            stage=stage,
            command=(sys.executable, "-c", PROGRAM, mode, str(marker)),
            probe=probe,
            start_timeout_s=start_timeout_s,
            stop_timeout_s=stop_timeout_s,
            needed_as=needed_as,
        )

    return make
