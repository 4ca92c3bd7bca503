"""The ports of the router's fronts: claimed once, and noted in the runtime directory for who takes the cluster over."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.errors import StartupError
from cluster.free_port import free_port, probe_port
from cluster.rpc_security import write_secret
from deploy.config import RouterConfig


@dataclass(frozen=True, slots=True)
class RouterPorts:
    http: int
    grpc: int  # 0: off


def claim_ports(router: RouterConfig, runtime_dir: Path) -> RouterPorts:
    """Those noted in the directory, else free ones, noted there. Raises `StartupError` for a busy port."""
    note = runtime_dir / "ports.json"
    if note.exists():
        return RouterPorts(**json.loads(note.read_text()))
    ports = RouterPorts(
        http=claim_port(router.host, router.port, "port"),
        grpc=0 if router.grpc_port is None else claim_port(router.host, router.grpc_port, "grpc-port"),
    )
    write_secret(note, json.dumps(asdict(ports)))  # whole or not at all, and private like all that lies there
    return ports


def claim_port(host: str, port: int, flag: str) -> int:
    """The port, free at this moment; for 0 any free one. Raises `StartupError` when it is busy or not ours to take."""
    try:
        return probe_port(host, port) if port else free_port(host)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartupError(
            f"cannot listen on {host}:{port} ({reason.lower()}): stop what uses it, or choose another with --{flag}"
        ) from None
