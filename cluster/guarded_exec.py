"""Runs a program that dies with its parent: `python -I -S guarded_exec.py PARENT_PID PROGRAM ARGUMENTS...`.

The kernel kills the process when its parent ends, even by SIGKILL; the request survives exec. This file stands alone
(it is run by its path, before any package is importable) so that starting it costs a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def kill_me_with_parent(parent_pid: int) -> None:
    """From now on this process is killed when its parent ends. Ends it at once when the parent has ended already."""
    if sys.platform != "linux":
        raise OSError("only Linux can tie a process to its parent")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def guarded_command(parent_pid: int, command: tuple[str, ...]) -> tuple[str, ...]:
    """The command behind this guard, for a child of `parent_pid` that cannot ask for it itself."""
    return (sys.executable, "-I", "-S", os.path.abspath(__file__), str(parent_pid), *command)


if __name__ == "__main__":
    kill_me_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  no shell is the point
