"""What a figure was measured on: processor, memory, kernel, versions. No host name, no path, no user."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

# The features that decide which kernels run.
TOLD_CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "sve",
)
TOLD_PACKAGES = ("tandem-serve", "torch", "numpy", "grpcio", "uvicorn")


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine as a reader of its figures needs it."""

    cpu: str
    logical_cpus: int
    usable_cpus: int  # after affinity
    cpu_flags: tuple[str, ...]
    memory_gib: float
    kernel: str
    python: str
    packages: dict[str, str]
    load_average: float  # over the last minute, when this was taken: above 0.5 somebody else was busy

    @property
    def one_line(self) -> str:
        flags = ", ".join(self.cpu_flags)
        return (
            f"{self.cpu}, {self.usable_cpus} of {self.logical_cpus} logical CPUs, {self.memory_gib:.0f} GiB "
            f"({flags}); Linux {self.kernel}, Python {self.python}, "
            + ", ".join(f"{name} {version}" for name, version in self.packages.items())
        )


def describe_machine() -> Machine:
    """This machine, now."""
    model, flags = _cpu_model_and_flags(Path("/proc/cpuinfo"))
    return Machine(
        cpu=model or platform.machine(),
        logical_cpus=os.cpu_count() or 0,
        usable_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        cpu_flags=tuple(flag for flag in TOLD_CPU_FLAGS if flag in flags),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        kernel=platform.release(),
        python=platform.python_version(),
        packages={name: version for name in TOLD_PACKAGES if (version := _version(name))},
        load_average=round(os.getloadavg()[0], 2),
    )


def _cpu_model_and_flags(cpuinfo: Path) -> tuple[str, frozenset[str]]:
    """Of the first processor; empty where there is no such file."""
    if not cpuinfo.is_file():
        return "", frozenset()
    fields: dict[str, str] = {}
    for line in cpuinfo.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    return fields.get("model name", ""), frozenset(flags.split())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
