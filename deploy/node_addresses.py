"""Workers on several machines: what each node fills in to a worker's command, and where the worker then listens."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

# Stand in a worker's settings until its node is known.
ADDRESS, HOST = "@node_address@", "@node_host@"
RUNTIME_DIR, MODEL = "@node_runtime_dir@", "@node_model@"


class NodeAddresses:
    """Filled in by the launcher at each start, read by probes. Owned by the controller."""

    def __init__(self) -> None:
        self._targets: dict[str, str] = {}

    def assign(self, worker_id: str, target: str) -> None:
        self._targets[worker_id] = target

    def target(self, worker_id: str) -> str | None:
        """`host:port` of the worker's present incarnation; None before its first."""
        return self._targets.get(worker_id)


def command_on_node(command: Sequence[str], target: str, runtime_dir: Path, model: Path) -> list[str]:
    """The command with the node's own values."""
    values = {ADDRESS: target, HOST: target.rpartition(":")[0], RUNTIME_DIR: str(runtime_dir), MODEL: str(model)}
    filled = []
    for word in command:
        for name, value in values.items():
            word = word.replace(name, value)
        filled.append(word)
    return filled


def free_target(host: str) -> str:
    """An address of this machine with a port that was free a moment ago."""
    with socket.create_server((host, 0)) as probe:
        return f"{host}:{probe.getsockname()[1]}"
