"""What a checkpoint's `quantization_config` says of its weights. What it does not understand it refuses.

    quant_method         matrices are stored as
    gptq                 qweight, qzeros, scales, g_idx: words along inputs; zero points less one (v1) or not (v2)
    awq                  qweight, qzeros, scales: words along outputs, nibbles interleaved
    compressed-tensors   weight_packed with weight_scale, perhaps weight_zero_point; or weight (int8, float8) with them
    fp8                  weight (float8) with weight_scale_inv or weight_scale

Scales of activations and of KV are read by nobody: products take activations as they are or scale them by row, and
FP8 KV has a scale for each token and head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster.errors import StartupError, shown

QuantizationMethod = Literal["gptq", "awq", "compressed-tensors", "fp8"]
METHODS: tuple[QuantizationMethod, ...] = ("gptq", "awq", "compressed-tensors", "fp8")
GPTQ_FORMATS = {"": 1, "gptq": 1, "gptq_v2": 0}  # what is to be added to a stored zero point
COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)
# Weights that are rotated, or stored without their zeros: other arithmetic than a product and a scale.
UNSUPPORTED_PARTS = ("sparsity_config", "transform_config")


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """How to read the quantised matrices of one checkpoint."""

    method: QuantizationMethod
    is_symmetric: bool = False  # gptq: the zero point is the middle, whatever is stored
    zero_offset: int = 0  # gptq: what the file's format adds to a stored zero point
    block_outputs: int = 0  # float8: outputs and inputs that share a scale; 0 where the scales' shape says it
    block_inputs: int = 0


def read_quantization(path: Path, stated: Mapping[str, Any]) -> CheckpointQuantization:
    """`stated` is the config's `quantization_config`. Raises `StartupError` naming the field."""
    method = stated.get("quant_method")
    if method == "gptq":
        return _read_gptq(path, stated)
    if method == "awq":
        _require(path, stated, "version", ("gemm", None))
        _require(path, stated, "bits", (4, None))
        return CheckpointQuantization("awq")
    if method == "compressed-tensors":
        _require(path, stated, "format", COMPRESSED_FORMATS)
        for name in UNSUPPORTED_PARTS:
            if _is_used(stated.get(name)):
                raise _refusal(path, name, stated[name])
        return CheckpointQuantization("compressed-tensors")
    if method == "fp8":
        block = stated.get("weight_block_size") or (0, 0)
        if len(block) != 2 or not all(type(size) is int and size >= 0 for size in block):
            raise _refusal(path, "weight_block_size", block)
        return CheckpointQuantization("fp8", block_outputs=block[0], block_inputs=block[1])
    raise StartupError(
        f"{path}: quantization_config.quant_method {shown(method)} is not supported: use {', '.join(METHODS)}, "
        "or a GGUF file",
        param="model",
    )


def _read_gptq(path: Path, stated: Mapping[str, Any]) -> CheckpointQuantization:
    _require(path, stated, "bits", (2, 4, 8))
    _require(path, stated, "checkpoint_format", (*GPTQ_FORMATS, None))
    offset = GPTQ_FORMATS[stated.get("checkpoint_format") or ""]
    return CheckpointQuantization("gptq", is_symmetric=stated.get("sym") is not False, zero_offset=offset)


def _require(path: Path, stated: Mapping[str, Any], name: str, supported: tuple[object, ...]) -> None:
    value = stated.get(name)
    if (value.lower() if isinstance(value, str) else value) not in supported:
        raise _refusal(path, name, value)


def _is_used(part: object) -> bool:
    """Exporters write empty parts, too, and a sparsity whose format is dense."""
    return bool(part) and not (isinstance(part, Mapping) and part.get("format") == "dense")


def _refusal(path: Path, name: str, value: object) -> StartupError:
    return StartupError(f"{path}: quantization_config.{name} {shown(value)} is not supported", param="model")
