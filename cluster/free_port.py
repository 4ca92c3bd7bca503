"""A TCP port for a server that starts in a moment.

A port that the kernel names (bind to 0) lies in the range that outgoing connections take theirs from: between the end
of the probe and the server's start, any connection on this machine may take it. So one is drawn from below that range.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

OUTGOING_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT = 10_000
NUM_DRAWS = 100
_draws = random.SystemRandom()


def free_port(host: str = "127.0.0.1") -> int:
    """Free at this moment on `host`. Raises OSError when `host` is no address of this machine."""
    candidates = range(FIRST_PORT, _first_outgoing_port())
    for _ in range(NUM_DRAWS if len(candidates) > NUM_DRAWS else 0):
        try:
            return probe_port(host, _draws.choice(candidates))
        except OSError:
            continue
    return probe_port(host, 0)  # the kernel's choice is the best that is left


def probe_port(host: str, port: int) -> int:
    """The port, or for 0 one of the kernel's. Raises OSError when it is busy or not ours to take."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port with only closed connections in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        bound: int = probe.getsockname()[1]
        return bound


def _first_outgoing_port() -> int:
    try:
        return int(OUTGOING_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768  # Linux's own default
