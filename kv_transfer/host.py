"""Which processes share a host."""

from __future__ import annotations

from pathlib import Path


def read_host_id() -> str:
    """The same for all processes that may share memory: the kernel's boot id."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
