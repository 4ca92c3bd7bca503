"""How a Tandem process starts and ends: one thread for maths unless told, ends with its parent, SIGTERM drains.

    def main() -> NoReturn:
        run_process("decode_worker", start)        # start(arguments) -> coroutine

A `StartupError` becomes one line on stderr and exit status 2; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

from cluster.errors import StartupError
from cluster.guarded_exec import kill_me_with_parent

EXIT_STARTUP_ERROR = 2
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def run_process(
    program: str,
    start: Callable[[Sequence[str]], Coroutine[Any, Any, None]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> NoReturn:
    """Runs `start` with the command line's arguments to its end, then exits with its status."""
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(start(sys.argv[1:]))
    except StartupError as error:
        sys.stderr.write(f"{program}: {error.message}\n")
        sys.exit(EXIT_STARTUP_ERROR)
    sys.exit(0)


def limit_threads(num_threads: int) -> None:
    """Bounds the pools of numeric libraries. Works only before they are imported: raises RuntimeError afterwards."""
    if "torch" in sys.modules:
        raise RuntimeError("limit_threads must run before torch is imported")
    os.environ.update(thread_environment(num_threads))


def thread_environment(num_threads: int) -> dict[str, str]:
    """The environment of a process whose numeric libraries use `num_threads` threads."""
    # Idle OpenMP threads sleep at once instead of spinning on a core that another process needs.
    return {**dict.fromkeys(_THREAD_VARIABLES, str(num_threads)), "OMP_WAIT_POLICY": "PASSIVE"}


def die_with_parent(parent_pid: int) -> None:
    """Ties this process to its parent (0: to none): no worker outlives a killed supervisor."""
    if parent_pid:
        kill_me_with_parent(parent_pid)


class StopSignals:
    """SIGTERM and SIGINT as two events: the first asks to drain, a second one to stop now."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.stop_now = asyncio.Event()

    def install(self) -> None:
        """Takes the signals over on the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.signalled)

    def remove(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def signalled(self) -> None:
        if self.drain.is_set():
            self.stop_now.set()
        self.drain.set()
