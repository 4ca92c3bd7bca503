"""How processes end: with their parent, by a signal, or with one line when they cannot start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from cluster.guarded_exec import guarded_command
from cluster.process_guard import StopSignals

pytestmark = pytest.mark.cluster

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
TIMEOUT_S = 60


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def test_startup_error_is_one_line_and_status_2() -> None:
    ended = run_python(
        "from cluster.errors import StartupError\n"
        "from cluster.process_guard import run_process\n"
        "async def start(arguments): raise StartupError('port 80 is busy: choose another')\n"
        "run_process('router', start)\n"
    )
    assert (ended.returncode, ended.stderr) == (2, "router: port 80 is busy: choose another\n")


def test_process_that_ends_well_has_status_0() -> None:
    ended = run_python(
        "from cluster.process_guard import run_process\n"
        "async def start(arguments): pass\n"
        "run_process('router', start)\n"
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_child_dies_when_its_parent_is_killed() -> None:
    program = (
        "import os, subprocess, sys\n"
        "code = f'import time; from cluster.process_guard import die_with_parent; die_with_parent({os.getpid()}); '"
        "       'print(1, flush=True); time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], env=ENVIRONMENT, stdout=subprocess.PIPE) as parent:
        if parent.stdout is None:
            raise RuntimeError("no pipe")
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait(TIMEOUT_S)
        _, alive = psutil.wait_procs([child], timeout=TIMEOUT_S)
    assert not alive


def test_child_whose_parent_is_gone_already_ends_at_once() -> None:
    nobody = 2**22 + 1  # above the kernel's largest pid
    ended = subprocess.run(guarded_command(nobody, (sys.executable, "-c", "print(1)")), timeout=TIMEOUT_S, check=False)
    assert ended.returncode == -signal.SIGKILL


def test_guarded_command_hands_arguments_and_status_through() -> None:
    command = guarded_command(os.getpid(), (sys.executable, "-c", "import sys; sys.exit(int(sys.argv[1]))", "7"))
    assert subprocess.run(command, timeout=TIMEOUT_S, check=False).returncode == 7


async def test_first_signal_drains_and_the_second_stops() -> None:
    signals = StopSignals()
    signals.install()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(signals.drain.wait(), TIMEOUT_S)
        assert not signals.stop_now.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(signals.stop_now.wait(), TIMEOUT_S)
    finally:
        signals.remove()


def test_threads_are_limited_before_torch_or_not_at_all() -> None:
    ended = run_python(
        "import os, sys\n"
        "from cluster.process_guard import limit_threads\n"
        "limit_threads(3); print(os.environ['OMP_NUM_THREADS'])\n"
        "sys.modules['torch'] = os\n"
        "limit_threads(1)\n"
    )
    assert ended.stdout == "3\n"
    assert "before torch" in ended.stderr
