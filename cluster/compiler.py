"""This machine's C++ compiler and how it is called; knows nothing of what is compiled."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

COMPILE_TIMEOUT_S = 600


class BuildError(Exception):
    """The library could not be built; the message says what to do."""


def find_compiler() -> list[str]:
    """The command of the C++ compiler. Raises `BuildError` when there is none."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for candidate in ("c++", "g++", "clang++"):
        if shutil.which(candidate):
            return [candidate]
    raise BuildError("no C++ compiler found: install g++ or set CXX, then build again")


def run_compiler(command: Sequence[str]) -> None:
    """Raises `BuildError` with what the compiler said; its warnings go to standard error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()[:4000]}")
    if done.stderr.strip():
        sys.stderr.write(done.stderr)
