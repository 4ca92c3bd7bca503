"""Compiles every Triton kernel for a GPU that need not be there, and reports what the compiler says of each.

    python -m engine.kernels.triton.compile_ahead --arch 90 --arch 80

    python -m engine.kernels.triton.compile_ahead --markdown docs/kernels.md

One JSON line a kernel: registers, spilled bytes, shared memory. Exit status 1 when a decode kernel spills.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Read when triton is imported: multiply-adds stay fused, as in every release so far.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from engine.kernels.triton import (
    fused_layers,
    grouped_matmul,
    kv_cells,
    paged_attention,
    prefill_attention,
    quantized_matmul,
    rejection,
    sampling,
)
from engine.kernels.triton.launch_config import LaunchConfig

WARP_SIZE = 32
# head size, block tokens, query heads for each KV head, new tokens, with a tree, FP8 KV
ATTENTION_SHAPES = (
    (64, 16, 3, 1, False, False),
    (128, 16, 8, 1, False, False),
    (128, 64, 8, 16, True, False),
    (256, 16, 4, 1, False, False),
    (64, 16, 3, 1, False, True),
    (128, 16, 8, 16, True, True),
    (256, 16, 4, 1, False, True),
)


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel at one set of constants. `pointers` gives the element type of each pointer argument."""

    kernel: Any
    config: LaunchConfig
    pointers: dict[str, str]
    floats: tuple[str, ...] = ()
    is_decode: bool = False
    min_arch: int = 80  # FP8 needs compute capability 8.9

    @property
    def name(self) -> str:
        return str(self.kernel.__name__).lstrip("_")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """What ptxas said of one kernel."""

    name: str
    arch: int
    constants: dict[str, Any]
    registers: int
    spilled_bytes: int
    shared_bytes: int
    is_decode: bool


def kernel_specs(element: str = "bf16") -> Iterator[KernelSpec]:
    """Every kernel at the shapes that are checked."""
    half = f"*{element}"
    for head_dim, block_tokens, group, num_query_tokens, has_tree, has_scales in ATTENTION_SHAPES:
        yield from attention_specs(
            half, head_dim, block_tokens, group, num_query_tokens, has_tree=has_tree, has_scales=has_scales
        )
    for is_gather in (True, False):
        yield KernelSpec(
            kv_cells._move_kernel,
            LaunchConfig({"IS_GATHER": is_gather, "ELEMENTS": kv_cells.COPY_ELEMENTS}),
            {"pool": half, "blocks": "*i32", "staging": half},
        )
    for size in (576, 4096):
        yield KernelSpec(
            fused_layers._norm_kernel,
            LaunchConfig({"SIZE": size, "SIZE_PADDED": triton.next_power_of_2(size), "HAS_RESIDUAL": True}),
            {"hidden": half, "residual": half, "weight": half, "output": half},
            floats=("eps",),
            is_decode=True,
        )
    for group_size in (32, 64):
        yield KernelSpec(
            quantized_matmul._w4a16_kernel,
            quantized_matmul.w4a16_config(group_size),
            {"x": half, "packed": "*i32", "scales": half, "zeros": half, "output": half},
            is_decode=True,
        )
    yield KernelSpec(
        grouped_matmul._grouped_kernel,
        grouped_matmul.grouped_config(),
        {"x": half, "weights": half, "slots": "*i64", "experts": "*i32", "output": half},
        is_decode=True,
    )
    for is_int8 in (True, False):
        operand = "*i8" if is_int8 else "*fp8e4nv"
        yield KernelSpec(
            quantized_matmul._w8a8_kernel,
            quantized_matmul.w8a8_config(is_int8=is_int8),
            {"x": operand, "x_scales": "*fp32", "weight": operand, "weight_scales": "*fp32", "output": half},
            is_decode=True,
            min_arch=80 if is_int8 else 89,
        )
    yield KernelSpec(
        fused_layers._rotary_kernel,
        LaunchConfig({"HALF": 64, "HALF_PADDED": 64}, num_warps=1),
        {"x": half, "positions": "*i32", "cos": "*fp32", "sin": "*fp32"},
        is_decode=True,
    )
    yield KernelSpec(
        sampling._gumbel_kernel,
        sampling.gumbel_config(),
        {
            "scaled": "*fp32",
            "seeds": "*i64",
            "choice_indices": "*i32",
            "positions": "*i32",
            "best": "*fp64",
            "tokens": "*i32",
        },
        is_decode=True,
    )
    yield KernelSpec(
        rejection._rejection_kernel,
        LaunchConfig({"MAX_GUESSES": rejection.FEWEST_GUESSES, "TILE_TOKENS": rejection.TILE_TOKENS}),
        {
            "scaled": "*fp32",
            "guess_starts": "*i32",
            "guess_ids": "*i32",
            "laws": "*fp64",
            "uniforms": "*fp64",
            "tokens": "*i32",
        },
        is_decode=True,
    )
    yield KernelSpec(
        fused_layers._silu_kernel,
        LaunchConfig({"ELEMENTS": 1024}),
        {"gate_up": half, "output": half},
        is_decode=True,
    )


def attention_specs(
    half: str,
    head_dim: int,
    block_tokens: int,
    group: int,
    num_query_tokens: int,
    *,
    has_tree: bool,
    has_scales: bool,
) -> Iterator[KernelSpec]:
    """The kernels that read or write KV, for one model's shape."""
    pool = {"pool": "*fp8e4nv" if has_scales else half, "scales": "*fp32" if has_scales else half}
    attention = {"query": half, **pool, "block_tables": "*i32", "context_lens": "*i32", "query_starts": "*i32"}
    min_arch = 89 if has_scales else 80
    yield KernelSpec(
        paged_attention._split_kernel,
        paged_attention.split_config(
            head_dim, block_tokens, group, num_query_tokens, 8, has_tree=has_tree, has_scales=has_scales
        ),
        {**attention, "tree_masks": "*i32", "partial": "*fp32", "log_sums": "*fp32"},
        floats=("scale",),
        is_decode=True,
        min_arch=min_arch,
    )
    padded = triton.next_power_of_2(head_dim)
    yield KernelSpec(
        paged_attention._merge_kernel,
        LaunchConfig(
            {"HEAD_DIM": head_dim, "HEAD_DIM_PADDED": padded, "NUM_SPLITS": 8, "SPLITS_PADDED": 8}, num_warps=1
        ),
        {"partial": "*fp32", "log_sums": "*fp32", "output": half},
        is_decode=True,
    )
    yield KernelSpec(
        prefill_attention._prefill_kernel,
        prefill_attention.prefill_config(
            head_dim, block_tokens, group, 512, 0, has_tree=has_tree, has_scales=has_scales
        ),
        {**attention, "tree_masks": "*i32", "output": half},
        floats=("scale",),
        min_arch=min_arch,
    )
    yield KernelSpec(
        kv_cells._kv_write_kernel,
        LaunchConfig(
            {
                "HEAD_DIM": head_dim,
                "HEAD_DIM_PADDED": padded,
                "BLOCK_TOKENS": block_tokens,
                "HAS_SCALES": has_scales,
            },
            num_warps=1,
        ),
        {"key": half, "value": half, **pool, "slots": "*i64"},
        is_decode=True,
        min_arch=min_arch,
    )


def compile_kernel(spec: KernelSpec, arch: int) -> CompiledKernel:
    """Compiles one kernel down to machine code for `sm_<arch>`. Raises triton's own error when it cannot."""
    names = spec.kernel.arg_names
    signature = {name: _argument_type(spec, name) for name in names}
    constants = {(names.index(name),): value for name, value in spec.config.constants.items()}
    # What a launch sees too: allocations, strides and matrix sizes are multiples of 16.
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name in spec.pointers or name.endswith("_stride") or name in ("n", "k")
    }
    source = ASTSource(fn=spec.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {
        "num_warps": spec.config.num_warps,
        "num_stages": spec.config.num_stages,
        "enable_fp_fusion": spec.config.fuses_multiply_add,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, WARP_SIZE), options=options)
    registers, spilled_bytes = _resources(compiled.asm["ptx"], arch)
    if not spec.config.fuses_multiply_add and "fma.rn.f64" in compiled.asm["ptx"]:
        raise RuntimeError(f"{spec.name} has fused multiply-adds in float64: its bits would not be the defined ones")
    return CompiledKernel(
        spec.name, arch, spec.config.constants, registers, spilled_bytes, int(compiled.metadata.shared), spec.is_decode
    )


def describe_constants(constants: dict[str, Any]) -> str:
    """As the table has them."""
    return ", ".join(f"{name} {value}" for name, value in constants.items() if name != "WIDEN")


def markdown(kernels: Sequence[CompiledKernel]) -> str:
    """A table with a row for each kernel and set of constants, and three columns for each GPU."""
    arches = sorted({kernel.arch for kernel in kernels})
    rows: dict[tuple[str, str], dict[int, CompiledKernel]] = {}
    for kernel in kernels:
        rows.setdefault((kernel.name, describe_constants(kernel.constants)), {})[kernel.arch] = kernel
    lines = [
        "# What the compiler says of the Triton kernels",
        "",
        "Registers a thread, spilled bytes and bytes of shared memory, in bf16, compiled for GPUs that were not there.",
        "Made by `python -m engine.kernels.triton.compile_ahead --markdown docs/kernels.md`. CI compiles all of it",
        "and fails when a kernel of decode steps spills.",
        "",
        "| kernel | constants | in decode steps |"
        + "".join(f" sm_{arch}: registers | spilled | shared |" for arch in arches),
        "|---|---|---|" + "---|---|---|" * len(arches),
    ]
    for (name, constants), found in rows.items():
        is_decode = next(iter(found.values())).is_decode
        cells = [
            f" {one.registers} | {one.spilled_bytes} | {one.shared_bytes} |" if (one := found.get(arch)) else " | | |"
            for arch in arches
        ]
        lines.append(f"| {name} | {constants} | {'yes' if is_decode else ''} |" + "".join(cells))
    return "\n".join(lines) + "\n"


def _argument_type(spec: KernelSpec, name: str) -> str:
    if name in spec.config.constants:
        return "constexpr"
    if name in spec.pointers:
        return spec.pointers[name]
    return "fp32" if name in spec.floats else "i32"


def _resources(ptx: str, arch: int) -> tuple[int, int]:
    """Registers a thread and spilled bytes, from the assembler that triton ships."""
    assembler = get_ptxas(arch).path
    target = re.search(r"\.target (sm_\w+)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        arguments = [f"--gpu-name={target.group(1) if target else f'sm_{arch}'}", "-v", str(source)]
        finished = subprocess.run(
            [assembler, *arguments, "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    if finished.returncode != 0:
        raise RuntimeError(f"ptxas failed: {finished.stderr[:500]}")
    registers = re.search(r"Used (\d+) registers", finished.stderr)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", finished.stderr)
    if registers is None or spills is None:
        raise RuntimeError(f"ptxas did not report its resources: {finished.stderr[:500]}")
    return int(registers.group(1)), int(spills.group(1)) + int(spills.group(2))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", type=int, action="append", help="compute capability, such as 90 (default: 90 and 80)")
    parser.add_argument("--markdown", type=Path, help="a file for the table, instead of lines of JSON")
    arguments = parser.parse_args()
    spilling = 0
    kernels: list[CompiledKernel] = []
    for arch in arguments.arch or [90, 80]:
        for spec in kernel_specs():
            if arch < spec.min_arch:
                continue
            compiled = compile_kernel(spec, arch)
            if arguments.markdown is None:
                sys.stdout.write(json.dumps(asdict(compiled)) + "\n")
            kernels.append(compiled)
            spilling += compiled.is_decode and compiled.spilled_bytes > 0
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(kernels), encoding="utf-8")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
