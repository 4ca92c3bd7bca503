"""Linear layers whose weights are quantised once at load: `y = x W^T + b` by the kernels of `quantized_matmul`.

int4   groups of 32 inputs, scale and zero a group; activations stay as they are (W4A16)
int8   one scale an output, activations by row at each call (W8A8)
fp8    the same in float8_e4m3fn
"""

from __future__ import annotations

import torch

from engine.kernels.linear import Linear, make_linear
from engine.kernels.triton.quantized_matmul import (
    PACKED_PER_WORD,
    matmul_w4a16,
    matmul_w8a8,
    quantize_rows,
)

GROUP_SIZE = 32
HIGHEST_NIBBLE = 15


def make_int4_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """W4A16. A weight whose inputs do not divide into groups stays as it is."""
    if weight.shape[1] % GROUP_SIZE:
        return make_linear(weight, bias)
    packed, scales, zeros = quantize_int4(weight)
    return lambda x: _add(matmul_w4a16(x.contiguous(), packed, scales, zeros, GROUP_SIZE), bias)


def make_int8_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    return _w8a8_linear(weight, bias, torch.int8)


def make_fp8_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    return _w8a8_linear(weight, bias, torch.float8_e4m3fn)


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed words `[n, k / 8]` int32, scales and zeros `[n, k / GROUP_SIZE]` in the weight's dtype.

    A group's range always holds 0, so that a zero point is a nibble; a group of zeros has scale 1.
    """
    groups = weight.float().unflatten(1, (-1, GROUP_SIZE))
    low, high = groups.amin(2).clamp(max=0.0), groups.amax(2).clamp(min=0.0)
    # Rounded to the type that is kept before use, so that nibbles fit the scale they are read with.
    scales = ((high - low) / HIGHEST_NIBBLE).to(weight.dtype)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    zeros = (-low / scales.float()).round().clamp(0, HIGHEST_NIBBLE)
    nibbles = (groups / scales.float()[:, :, None] + zeros[:, :, None]).round().clamp(0, HIGHEST_NIBBLE)
    words = nibbles.to(torch.int64).flatten(1).unflatten(1, (-1, PACKED_PER_WORD))
    shifts = torch.arange(0, 4 * PACKED_PER_WORD, 4, device=weight.device)
    packed = (words << shifts).sum(2)
    # The highest nibble sets the sign bit: wrapped into int32 as it stands.
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return packed, scales, zeros.to(weight.dtype)


def _w8a8_linear(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
    quantized, scales = quantize_rows(weight, dtype)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        rows, row_scales = quantize_rows(x, dtype)
        return _add(matmul_w8a8(rows, row_scales, quantized, scales, x.dtype), bias)

    return multiply


def _add(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return product if bias is None else product.add_(bias)
