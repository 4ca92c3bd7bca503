"""What a launcher must know of a process: how to start it, how to see that it is ready, how long it may take to end."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

# Asks the process once whether it is ready; False or an exception of the network kind means not yet.
Probe = Callable[[], Awaitable[bool]]


class Stage(enum.IntEnum):
    """Later ones need earlier ones; stopping goes the other way."""

    REDIS = 0
    WORKER = 1
    ROUTER = 2


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of a cluster. `name` is its worker_id, or `redis`, or `router-0`."""

    name: str
    stage: Stage
    command: tuple[str, ...]
    probe: Probe
    environment: Mapping[str, str] = field(default_factory=dict)  # on top of the launcher's own
    start_timeout_s: float = 120.0
    # From SIGTERM until it is killed.
    stop_timeout_s: float = 60.0
    # The cluster cannot serve while every process with this mark is down; empty: it can do without.
    needed_as: str = ""
