"""Runs of bytes as transports see them: cut to other sizes, copied, located."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np


def cut(payload: Sequence[memoryview], sizes: Sequence[int]) -> list[memoryview]:
    """The payload's bytes in pieces of these sizes; copied only where a piece lies across two runs."""
    if [run.nbytes for run in payload] == list(sizes):
        return list(payload)
    rest, pieces = deque(payload), []
    for size in sizes:
        parts, missing = [], size
        while missing:
            run = rest.popleft()
            parts.append(run[:missing])
            if run.nbytes > missing:
                rest.appendleft(run[missing:])
            missing -= parts[-1].nbytes
        pieces.append(parts[0] if len(parts) == 1 else memoryview(b"".join(parts)))
    return pieces


def address_of(run: memoryview) -> int:
    """Where its first byte is in this process."""
    return int(np.frombuffer(run, np.uint8).ctypes.data)
