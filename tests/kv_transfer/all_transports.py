"""The transports that a test goes through, and why one of them is skipped."""

from __future__ import annotations

import pytest

from kv_transfer.transports.registry import OPTIONAL_TRANSPORTS, SENDERS

TRANSPORTS = tuple(SENDERS)
NETWORK_TRANSPORTS = frozenset({"tcp", "ucx", "nixl"})


def needs_library(transport: str) -> None:
    """Skips the test where the transport's library cannot be had."""
    library = OPTIONAL_TRANSPORTS.get(transport)
    if library is not None and not library.is_installed():
        pytest.skip(f"{transport} is not installed: {library.INSTALL}")
