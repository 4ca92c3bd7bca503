"""Running our own modules as processes: the command, and an environment in which they are found."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import tandem.v1

import cluster


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Runs one of our modules; `-P` keeps the current directory from shadowing it."""
    return (sys.executable, "-P", "-m", module, *arguments)


def module_environment() -> dict[str, str]:
    """Our environment with the folders that our own packages came from: children work uninstalled as well."""
    roots = [str(Path(next(iter(package.__path__))).resolve()) for package in (cluster, tandem.v1)]
    folders = [str(Path(roots[0]).parent), str(Path(roots[1]).parents[1])]
    inherited = os.environ.get("PYTHONPATH", "")
    folders += [folder for folder in inherited.split(os.pathsep) if folder and folder not in folders]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
