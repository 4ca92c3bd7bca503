"""A payload's runs, cut to the sizes that the other side has."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cluster.byte_runs import size_of_each, sizes_of


def cut(payload: Sequence[memoryview], like: Sequence[memoryview]) -> Sequence[memoryview]:
    """The payload's bytes in runs of the sizes of those of `like`; see `cut_to`."""
    if len(payload) == len(like) and (size := size_of_each(like)) is not None and size == size_of_each(payload):
        return payload
    return cut_to(payload, sizes_of(like).tolist())


def cut_to(payload: Sequence[memoryview], sizes: Sequence[int]) -> Sequence[memoryview]:
    """The payload's bytes in pieces of these sizes; copied only where a piece lies across two runs."""
    if sizes_of(payload).tolist() == list(sizes):
        return payload
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
