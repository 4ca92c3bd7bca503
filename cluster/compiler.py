"""This machine's C++ compiler and how it is called, from a command line too; knows nothing of what is compiled."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

COMPILE_TIMEOUT_S = 600


class BuildError(Exception):
    """The library could not be built; the message says what to do."""


class Build(Protocol):
    """Builds a library into a folder unless it is there, and returns its path. Raises `BuildError`."""

    def __call__(self, output_dir: Path, *, force: bool) -> Path: ...


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


def compiles(command: Sequence[str], program: str) -> bool:
    """Whether the compiler takes this C++ program with these flags. Raises `BuildError` where it cannot be run."""
    checking = [*command, "-fsyntax-only", "-x", "c++", "-"]
    try:
        done = subprocess.run(
            checking, input=program, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    return done.returncode == 0


def build_command(build: Build, description: str, default_dir: Path) -> int:
    """What `python -m ...native.build` does: its flags, the path or the error printed, the exit status."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output-dir", type=Path, default=default_dir)
    parser.add_argument("--force", action="store_true", help="build even when nothing changed")
    arguments = parser.parse_args()
    try:
        library = build(arguments.output_dir, force=arguments.force)
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{library}\n")
    return 0
