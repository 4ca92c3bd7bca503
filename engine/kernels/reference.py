"""The operations of a decoder layer in plain torch: what every other backend is compared with. Runs on any device.

Sums are float32 whatever the inputs are; the contracts (shapes, what is written in place) are those of the Triton
kernels of the same names. Attention has its own file, `engine.kernels.reference_attention`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from engine.kernels import fp8_kv


def add_rms_norm(hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of `hidden + residual` over the last dimension; the sum is left in `residual`.

    With residual None: the norm of `hidden` alone, which may have any number of leading dimensions.
    """
    if residual is not None:
        hidden = residual.add_(hidden)
    return functional.rms_norm(hidden, weight.shape, weight, eps)


def rotary(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates `x` `[num_tokens, heads, head_dim]` in place; cos and sin are `[max positions, head_dim / 2]` float32.

    The halves convention of Hugging Face: element i turns with element i + head_dim / 2.
    """
    half = cos.shape[1]
    cos_rows = cos.index_select(0, positions).unsqueeze(1)
    sin_rows = sin.index_select(0, positions).unsqueeze(1)
    first, second = x[..., :half].float(), x[..., half:].float()
    # Both before either is written: in float32 they are views of x.
    rotated_first = (first * cos_rows).sub_(second * sin_rows)
    rotated_second = (second * cos_rows).add_(first * sin_rows)
    x[..., :half] = rotated_first
    x[..., half:] = rotated_second


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of `gate_up` `[num_tokens, 2 * size]` (gate first): `[num_tokens, size]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def kv_write(key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    """Puts key and value `[num_tokens, kv_heads, head_dim]` into `pool[block, layer, :, :, offset]`.

    slots `[num_tokens]` int64: block * block_tokens + offset. FP8 pools get values and scales (`fp8_kv`).
    """
    block_tokens = pool.shape[4]
    blocks, offsets = slots // block_tokens, slots % block_tokens
    if fp8_kv.is_fp8(pool):
        values, scales = (part[:, layer] for part in fp8_kv.split_pool(pool))
        for index, rows in enumerate((key, value)):
            quantized, row_scales = fp8_kv.quantize(rows)
            values[blocks, index, :, offsets] = quantized.view(torch.uint8)
            scales[blocks, index, :, offsets] = row_scales
        return
    cells = pool[:, layer]
    cells[blocks, 0, :, offsets] = key
    cells[blocks, 1, :, offsets] = value
