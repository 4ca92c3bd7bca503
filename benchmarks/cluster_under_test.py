"""A cluster that a benchmark starts for itself through `tandem serve`, and stops again whatever happens."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
HTTP_URL = re.compile(r"http://127\.0\.0\.1:\d+")


class ClusterError(RuntimeError):
    """The cluster under test did not start, or says nothing about itself."""


@contextmanager
def started_cluster(flags: Sequence[str], log_path: Path) -> Iterator[str]:
    """The URL of a ready cluster on free ports, for as long as the block lasts. Its log goes to `log_path`.

    Raises `ClusterError` with the end of the log when it does not become ready.
    """
    command = [sys.executable, "-c", "from deploy.cli import main; main()", "serve"]
    command += ["--port", "0", *flags]
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=_environment())
        try:
            yield _wait_until_ready(process, log_path)
        finally:
            _stop(process)


def _environment() -> dict[str, str]:
    """This process's own import path, so that an uninstalled tree serves itself."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _wait_until_ready(process: subprocess.Popen[str], log_path: Path) -> str:
    if process.stdout is None:
        raise ClusterError("standard output of `tandem serve` is not piped")
    deadline = time.monotonic() + READY_TIMEOUT_S
    printed = ""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (match := HTTP_URL.search(printed)) is None:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise ClusterError(f"`tandem serve` was not ready in {READY_TIMEOUT_S:g} s; its log: {log_path}")
            line = process.stdout.readline()
            if not line:
                tail = log_path.read_text(encoding="utf-8", errors="replace").strip()[-500:]
                raise ClusterError(f"`tandem serve` ended with {process.wait()}: {tail or printed.strip()}")
            printed += line
    return match.group(0)


def _stop(process: subprocess.Popen[str]) -> None:
    """SIGINT as Ctrl-C does; SIGKILL after a minute."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        if process.stdout is not None:
            process.stdout.close()
