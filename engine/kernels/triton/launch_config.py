"""The compile-time side of a kernel launch: one place for the launcher and for ahead-of-time compilation."""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Constants by argument name, warps a program, how deep loads run ahead of their use, and the arithmetic."""

    constants: dict[str, int | bool]
    num_warps: int = 4
    num_stages: int = 2
    fuses_multiply_add: bool = True  # False where the bits of a result are defined


def must_widen_dots() -> bool:
    """Whether matrix products take float32 operands: in the interpreter alone, which would multiply bfloat16's bits."""
    return bool(triton.knobs.runtime.interpret)
