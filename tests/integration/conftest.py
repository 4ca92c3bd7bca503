"""A real cluster for a test module: `tandem serve` in a child process, and the means to ask it things."""

from __future__ import annotations

import http.client
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
# What comes normally comes at once; a shared machine may stand still for a while.
REACHED_TIMEOUT_S = 60.0
URL_LINE = re.compile(r"(http://127\.0\.0\.1:\d+)")
GRPC_LINE = re.compile(r"(127\.0\.0\.1:\d+)\S* \(gRPC\)|grpc[^0-9]*(127\.0\.0\.1:\d+)", re.IGNORECASE)


@dataclass
class RunningCluster:
    """One `tandem serve` with its URL."""

    process: subprocess.Popen[str]
    url: str
    grpc_address: str

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/statusz", timeout=30) as answer:  # noqa: S310
            status: dict[str, Any] = json.load(answer)
        return status

    def status_of_ready(self) -> dict[str, Any]:
        """Once every worker is ready and answers: one that has no time just now is listed without what it counts."""
        return self.wait_for(
            lambda status: all(worker["state"] == "ready" for worker in status["workers"]),
            REACHED_TIMEOUT_S,
            "every worker is ready and answers",
        )

    def wait_for(self, is_reached: Callable[[dict[str, Any]], bool], timeout_s: float, what: str) -> dict[str, Any]:
        """Polls the status until it is as wanted; fails the test with the last status otherwise.

        A router that does not answer (it was killed, or has no time) has not reached it yet.
        """
        deadline, last = time.monotonic() + timeout_s, "none"
        while time.monotonic() <= deadline:
            try:
                status = self.status()
            except (OSError, http.client.HTTPException) as error:
                last = repr(error)
            else:
                if is_reached(status):
                    return status
                last = json.dumps(status)[:3000]
            time.sleep(0.1)
        pytest.fail(f"not reached in {timeout_s} s: {what}; last status: {last}")


@pytest.fixture(scope="module")
def start_cluster(default_model_path: Path) -> Iterator[Callable[..., RunningCluster]]:
    """`start_cluster("--prefill", "1", ...)`: a ready cluster on free ports; all are stopped when the module ends."""
    with ExitStack() as stack:
        yield _starter(default_model_path, stack)


@pytest.fixture
def start_own_cluster(default_model_path: Path) -> Iterator[Callable[..., RunningCluster]]:
    """The same for one test: what has ended takes neither memory nor processor time from the tests after it."""
    with ExitStack() as stack:
        yield _starter(default_model_path, stack)


def _starter(model: Path, stack: ExitStack) -> Callable[..., RunningCluster]:
    def start(*flags: str) -> RunningCluster:
        cluster = _start(str(model), *flags)
        stack.callback(stop_cluster, cluster)
        cluster.status_of_ready()
        return cluster

    return start


def stop_cluster(cluster: RunningCluster) -> int:
    """SIGINT, as Ctrl-C does; the exit status."""
    if cluster.process.poll() is None:
        cluster.process.send_signal(signal.SIGINT)
    try:
        status = cluster.process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        cluster.process.kill()
        raise
    finally:
        if cluster.process.stdout is not None:
            cluster.process.stdout.close()
    return status


def tandem_command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from deploy.cli import main; main()", *arguments]


def tandem_environment() -> dict[str, str]:
    python_path = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "proto")))
    return {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}


def _start(model: str, *flags: str) -> RunningCluster:
    command = tandem_command("serve", "--model", model, "--port", "0", "--grpc-port", "0", *flags)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=tandem_environment(), cwd=REPOSITORY)
    printed = _read_until_ready(process)
    url, grpc_match = URL_LINE.search(printed), GRPC_LINE.search(printed)
    if url is None or grpc_match is None:
        process.kill()
        pytest.fail(f"`tandem serve` did not print its URLs, but: {printed!r}")
    return RunningCluster(process, url.group(1), grpc_match.group(1) or grpc_match.group(2))


def _read_until_ready(process: subprocess.Popen[str]) -> str:
    """What was printed up to the line with the URL; fails the test when the process ends or the time is over."""
    if process.stdout is None:
        raise RuntimeError("standard output is not piped")
    deadline = time.monotonic() + READY_TIMEOUT_S
    printed = ""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while URL_LINE.search(printed) is None:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                process.kill()
                pytest.fail(f"`tandem serve` was not ready in {READY_TIMEOUT_S} s; printed: {printed!r}")
            line = process.stdout.readline()
            if line == "":
                pytest.fail(f"`tandem serve` ended with {process.wait()}; printed: {printed!r}")
            printed += line
    return printed
