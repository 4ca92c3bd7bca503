"""A process that gives way: what the kernel says of its threads and of its session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.worker_settings import PREFILL_NICE, parse_arguments

SAY = """
import json, os, sys, threading
from pathlib import Path
from cluster.process_priority import give_way
before = os.getpriority(os.PRIO_PROCESS, 0)
give_way(int(sys.argv[1]), Path(sys.argv[2]))
later = []
thread = threading.Thread(target=lambda: later.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
thread.start(); thread.join()
print(json.dumps([os.getpriority(os.PRIO_PROCESS, 0) - before, later[0] - before]))
"""


def say(steps: int, group: Path, *, leads_its_session: bool) -> Any:
    command = [sys.executable, "-c", SAY, str(steps), str(group)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    output = subprocess.run(
        command, capture_output=True, check=True, env=environment, start_new_session=leads_its_session
    ).stdout
    return json.loads(output)


def test_a_process_and_the_threads_it_makes_give_way(tmp_path: Path) -> None:
    assert say(3, tmp_path / "group", leads_its_session=True) == [3, 3]
    assert say(0, tmp_path / "group", leads_its_session=True) == [0, 0]


def test_a_session_gives_way_with_the_process_that_leads_it_and_with_no_other(tmp_path: Path) -> None:
    say(3, tmp_path / "led", leads_its_session=True)
    assert (tmp_path / "led").read_text() == "3"
    say(3, tmp_path / "of a shell", leads_its_session=False)
    say(0, tmp_path / "not at all", leads_its_session=True)
    assert [path.name for path in tmp_path.iterdir()] == ["led"]


def test_a_kernel_that_does_not_group_sessions_is_no_error(tmp_path: Path) -> None:
    assert say(3, tmp_path / "no such directory" / "group", leads_its_session=True) == [3, 3]


@pytest.mark.parametrize(
    ("role", "nice", "steps"),
    [("prefill", [], PREFILL_NICE), ("decode", [], 0), ("prefill", [0], 0), ("decode", [2], 2)],
)
def test_prompts_give_way_to_streams_unless_the_operator_says_otherwise(role: str, nice: list[int], steps: int) -> None:
    needed = ["--worker-id=w", "--model=m", "--listen=unix:/x", "--runtime-dir=/r", "--cluster-token-file=/t"]
    flags = [*needed, f"--role={role}", *(f"--nice={value}" for value in nice)]
    assert parse_arguments("worker", flags).steps_of_nice == steps
