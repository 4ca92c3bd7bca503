"""The small operations between the matrix products, fused so that each reads and writes its rows once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def add_rms_norm(hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of `hidden + residual`, `[num_tokens, size]`; the sum is left in `residual`.

    With residual None: the norm of `hidden` alone. Sums are float32, also for half inputs.
    """
    num_tokens, size = hidden.shape
    output = torch.empty_like(hidden)
    if num_tokens:
        _norm_kernel[(num_tokens,)](
            hidden,
            residual if residual is not None else hidden,
            weight,
            output,
            eps,
            SIZE=size,
            SIZE_PADDED=triton.next_power_of_2(size),
            HAS_RESIDUAL=residual is not None,
            num_warps=4,
        )
    return output


def rotary(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates `x` `[num_tokens, heads, head_dim]` in place; cos and sin are `[max positions, head_dim / 2]` float32.

    The halves convention of Llama in Hugging Face's order: element i turns with element i + head_dim / 2.
    """
    num_tokens, num_heads, head_dim = x.shape
    if num_tokens:
        _rotary_kernel[(num_tokens, num_heads)](
            x,
            positions,
            cos,
            sin,
            x.stride(0),
            x.stride(1),
            HALF=head_dim // 2,
            HALF_PADDED=triton.next_power_of_2(head_dim // 2),
            num_warps=1,
        )


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of `gate_up` `[num_tokens, 2 * size]` (gate first): `[num_tokens, size]`."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty((num_tokens, size))
    if num_tokens:
        elements = min(1024, triton.next_power_of_2(size))
        _silu_kernel[(num_tokens, triton.cdiv(size, elements))](gate_up, output, size, ELEMENTS=elements, num_warps=4)
    return output


@triton.jit
def _norm_kernel(
    hidden,
    residual,
    weight,
    output,
    eps,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Grid (token). One program: one row, read once, written once (twice with a residual)."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE_PADDED)
    is_index = index < SIZE
    x = tl.load(hidden + token * SIZE + index, mask=is_index, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual + token * SIZE + index, mask=is_index, other=0.0).to(tl.float32)
        # The sum is rounded to the stored type first, as the unfused operations do.
        x = x.to(residual.dtype.element_ty).to(tl.float32)
        tl.store(residual + token * SIZE + index, x.to(residual.dtype.element_ty), mask=is_index)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    normed = (x * scale).to(output.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + index, mask=is_index, other=0.0).to(tl.float32)
    tl.store(output + token * SIZE + index, (normed * w).to(output.dtype.element_ty), mask=is_index)


@triton.jit
def _rotary_kernel(x, positions, cos, sin, token_stride, head_stride, HALF: tl.constexpr, HALF_PADDED: tl.constexpr):
    """Grid (token, head). One program turns one head in place."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.arange(0, HALF_PADDED)
    is_index = index < HALF
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * HALF + index, mask=is_index, other=0.0)
    s = tl.load(sin + position * HALF + index, mask=is_index, other=0.0)
    first = x + token * token_stride + head * head_stride + index
    a = tl.load(first, mask=is_index, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=is_index, other=0.0).to(tl.float32)
    tl.store(first, (a * c - b * s).to(x.dtype.element_ty), mask=is_index)
    tl.store(first + HALF, (b * c + a * s).to(x.dtype.element_ty), mask=is_index)


@triton.jit
def _silu_kernel(gate_up, output, size, ELEMENTS: tl.constexpr):
    """Grid (token, part). Reads gate and up once, writes their product."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = part * ELEMENTS + tl.arange(0, ELEMENTS)
    is_index = index < size
    gate = tl.load(gate_up + token * 2 * size + index, mask=is_index, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + index, mask=is_index, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + token * size + index, product.to(output.dtype.element_ty), mask=is_index)
