"""Which Tandem this is, by its installed package."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version


@functools.cache
def tandem_version() -> str:
    """`0.1.0`; `unknown` where it runs from a source folder that nobody installed."""
    try:
        return version("tandem-serve")
    except PackageNotFoundError:
        return "unknown"
