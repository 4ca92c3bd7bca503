"""Matrix products with quantised weights, scales fused: W4A16 by groups, INT8 W8A8 and FP8 W8A8 by channel.

Decode at a small batch is bound by the bytes of the weights: W4A16 reads a quarter of them and computes in the
activation's type. W8A8 halves bytes and doubles the matrix rate, so it pays at a large batch and in prefill too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch_config import LaunchConfig, must_widen_dots

PACKED_PER_WORD = 8
FP8_MAX = 448.0
INT8_MAX = 127.0


def matmul_w4a16(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int
) -> torch.Tensor:
    """`x @ W.T` with `W = (nibble - zero) * scale`, in x's dtype, float32 sums.

    Shapes: x `[m, k]`; packed `[n, k / 8]` int32, eight nibbles a word, the lowest bits first; scales and zeros
    `[n, k / group_size]` (zeros in units of a nibble, 8 for symmetric weights).

    Raises ValueError when group_size does not divide k or is no multiple of 8.
    """
    m, k = x.shape
    n = packed.shape[0]
    if k % group_size or group_size % PACKED_PER_WORD:
        raise ValueError(f"group size {group_size} must divide {k} and be a multiple of {PACKED_PER_WORD}")
    output = x.new_empty((m, n))
    config = w4a16_config(group_size)
    grid = (triton.cdiv(m, config.constants["TILE_M"]), triton.cdiv(n, config.constants["TILE_N"]))
    if m:
        _w4a16_kernel[grid](
            x,
            packed,
            scales,
            zeros,
            output,
            m,
            n,
            k,
            **config.constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return output


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations to int8 or float8_e4m3fn with one float32 scale a row, `[m, k]` and `[m]`. A zero row has scale 1."""
    limit = INT8_MAX if dtype is torch.int8 else FP8_MAX
    largest = x.abs().amax(-1).float()
    scale = torch.where(largest > 0, largest / limit, torch.ones_like(largest))
    scaled = x.float() / scale[:, None]
    return (scaled.round() if dtype is torch.int8 else scaled).clamp(-limit, limit).to(dtype), scale


def matmul_w8a8(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`(x * x_scales) @ (weight * weight_scales).T` in `dtype`; sums in int32 for int8, float32 for float8.

    Shapes: x `[m, k]` and weight `[n, k]`, both int8 or both float8_e4m3fn; x_scales `[m]`, weight_scales `[n]`
    float32.
    """
    if x.dtype is not weight.dtype or x.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"both operands must be int8 or both float8_e4m3fn, not {x.dtype} and {weight.dtype}")
    m, k = x.shape
    n = weight.shape[0]
    output = x.new_empty((m, n), dtype=dtype)
    config = w8a8_config(is_int8=x.dtype is torch.int8)
    grid = (triton.cdiv(m, config.constants["TILE_M"]), triton.cdiv(n, config.constants["TILE_N"]))
    if m:
        _w8a8_kernel[grid](
            x,
            x_scales,
            weight,
            weight_scales,
            output,
            m,
            n,
            k,
            **config.constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return output


def w4a16_config(group_size: int) -> LaunchConfig:
    """A tile of k never spans two groups, so that each has one scale a channel; wider tiles spill."""
    tile_k = min(32, group_size & -group_size)
    constants = {"GROUP_SIZE": group_size, "TILE_M": 16, "TILE_N": 64, "TILE_K": tile_k, "WIDEN": must_widen_dots()}
    return LaunchConfig(constants, num_stages=3)


def w8a8_config(*, is_int8: bool) -> LaunchConfig:
    constants = {"IS_INT8": is_int8, "TILE_M": 32, "TILE_N": 64, "TILE_K": 64}
    return LaunchConfig(constants, num_stages=3)


@triton.jit
def _w4a16_kernel(
    x,
    packed,
    scales,
    zeros,
    output,
    m,
    n,
    k,
    GROUP_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Grid (m tile, n tile). One program: TILE_M x TILE_N outputs; reads its rows of x and its weights once."""
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    is_row, is_column = row < m, column < n
    words, groups = k // 8, k // GROUP_SIZE
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, k, TILE_K):
        inner = start + tl.arange(0, TILE_K)
        is_inner = inner < k
        a = tl.load(
            x + row[:, None].to(tl.int64) * k + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0
        )
        word = tl.load(
            packed + column[:, None].to(tl.int64) * words + (inner // 8)[None, :],
            mask=is_column[:, None] & is_inner[None, :],
            other=0,
        )
        nibble = (word >> ((inner % 8) * 4)[None, :]) & 0xF
        group = column.to(tl.int64) * groups + start // GROUP_SIZE
        scale = tl.load(scales + group, mask=is_column, other=0.0).to(tl.float32)
        zero = tl.load(zeros + group, mask=is_column, other=0.0).to(tl.float32)
        weight = ((nibble.to(tl.float32) - zero[:, None]) * scale[:, None]).to(x.dtype.element_ty)
        if WIDEN:
            total += tl.dot(a.to(tl.float32), tl.trans(weight.to(tl.float32)))
        else:
            total += tl.dot(a, tl.trans(weight))
    tl.store(
        output + row[:, None].to(tl.int64) * n + column[None, :],
        total.to(output.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


@triton.jit
def _w8a8_kernel(
    x,
    x_scales,
    weight,
    weight_scales,
    output,
    m,
    n,
    k,
    IS_INT8: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Grid (m tile, n tile). One program: TILE_M x TILE_N outputs, scaled once at the end."""
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    is_row, is_column = row < m, column < n
    total = tl.zeros([TILE_M, TILE_N], tl.int32 if IS_INT8 else tl.float32)
    for start in range(0, k, TILE_K):
        inner = start + tl.arange(0, TILE_K)
        is_inner = inner < k
        a = tl.load(
            x + row[:, None].to(tl.int64) * k + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0
        )
        b = tl.load(
            weight + column[:, None].to(tl.int64) * k + inner[None, :],
            mask=is_column[:, None] & is_inner[None, :],
            other=0.0,
        )
        if IS_INT8:
            total += tl.dot(a, tl.trans(b), out_dtype=tl.int32)
        else:
            total += tl.dot(a, tl.trans(b))
    row_scale = tl.load(x_scales + row, mask=is_row, other=0.0)
    column_scale = tl.load(weight_scales + column, mask=is_column, other=0.0)
    tl.store(
        output + row[:, None].to(tl.int64) * n + column[None, :],
        (total.to(tl.float32) * row_scale[:, None] * column_scale[None, :]).to(output.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )
