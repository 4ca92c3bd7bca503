"""Which number format a model computes in: `auto` becomes what this machine multiplies fastest without losing text."""

from __future__ import annotations

import torch

from cluster.errors import StartupError
from cluster.kv_layout import FP8_KV

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# What a pool's tensor is made of: FP8 values and their scales are bytes to whoever only moves them.
POOL_DTYPES = TORCH_DTYPES | {FP8_KV: torch.uint8}
# Either one multiplies bf16 natively; without them bf16 is emulated and slower than float32.
_BF16_CPU_FEATURES = frozenset({"avx512_bf16", "amx_bf16"})


def resolve_dtype(setting: str, device: torch.device, cpu_features: frozenset[str]) -> str:
    """`setting`, or for `auto` bfloat16 where the device has it in hardware, else float32.

    Raises `StartupError` for a name that is no dtype and for float16 on a CPU.
    """
    if setting == "auto":
        if device.type == "cuda":
            return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
        return "bfloat16" if cpu_features & _BF16_CPU_FEATURES else "float32"
    if setting not in TORCH_DTYPES:
        raise StartupError(f"dtype {setting!r} is unknown: use auto, {', '.join(TORCH_DTYPES)}", param="dtype")
    if setting == "float16" and device.type == "cpu":
        raise StartupError("dtype float16 needs a GPU: use bfloat16 or float32 on a CPU", param="dtype")
    return setting


def cpu_features() -> frozenset[str]:
    """Flags of the first CPU as the kernel names them (`avx512_bf16`); empty where /proc/cpuinfo is not there."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as cpuinfo:
            for line in cpuinfo:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        return frozenset()
    return frozenset()
