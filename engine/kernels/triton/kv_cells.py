"""Writing new keys and values into the paged pool, and moving whole cells between the pool and a staging buffer.

A cell is one (block, layer): `[2, kv_heads, block_tokens, head_dim]`, contiguous. Gather and scatter serve transports
that cannot take a list of runs; attention itself reads blocks in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels import fp8_kv

COPY_ELEMENTS = 1024


def kv_write(key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    """Puts key and value `[num_tokens, kv_heads, head_dim]` into `pool[block, layer, :, :, offset]`.

    slots `[num_tokens]` int64: block * block_tokens + offset; a negative slot is skipped (padding of a CUDA graph). An
    FP8 pool gets values and scales, as `engine.kernels.fp8_kv` defines them.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    has_scales = fp8_kv.is_fp8(pool)
    _kv_write_kernel[(num_tokens, num_kv_heads)](
        key,
        value,
        pool.view(fp8_kv.VALUE_DTYPE) if has_scales else pool,
        pool.view(torch.float32) if has_scales else pool,
        slots,
        layer,
        num_kv_heads,
        key.stride(0),
        value.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        pool.stride(3),
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
        BLOCK_TOKENS=pool.shape[4],
        HAS_SCALES=has_scales,
        num_warps=1,
    )


def gather_cells(pool: torch.Tensor, blocks: torch.Tensor, first_layer: int, num_layers: int) -> torch.Tensor:
    """Copies layers of the blocks `[n]` int32 into a buffer `[n, num_layers * cell elements]`, in order."""
    staging = pool.new_empty((blocks.shape[0], num_layers * pool.stride(1)))
    _move_cells(pool, blocks, first_layer, staging, is_gather=True)
    return staging


def scatter_cells(pool: torch.Tensor, blocks: torch.Tensor, first_layer: int, staging: torch.Tensor) -> None:
    """The inverse of `gather_cells`: `staging` `[n, num_layers * cell elements]` goes into the blocks' layers."""
    _move_cells(pool, blocks, first_layer, staging, is_gather=False)


def _move_cells(
    pool: torch.Tensor, blocks: torch.Tensor, first_layer: int, staging: torch.Tensor, *, is_gather: bool
) -> None:
    num_elements = staging.shape[1]
    if staging.shape[0] == 0 or num_elements == 0:
        return
    _move_kernel[(staging.shape[0], triton.cdiv(num_elements, COPY_ELEMENTS))](
        pool,
        blocks,
        staging,
        first_layer,
        num_elements,
        pool.stride(0),
        pool.stride(1),
        IS_GATHER=is_gather,
        ELEMENTS=COPY_ELEMENTS,
        num_warps=4,
    )


@triton.jit
def _kv_write_kernel(
    key,
    value,
    pool,
    scales,
    slots,
    layer,
    num_kv_heads,
    key_stride,
    value_stride,
    block_stride,
    layer_stride,
    kv_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Grid (token, KV head). One program copies one head's key and value: 2 x HEAD_DIM elements read and written.

    `scales` is the pool as float32; strides count the pool's elements, which are bytes there.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    dim = tl.arange(0, HEAD_DIM_PADDED)
    is_dim = dim < HEAD_DIM
    plane = (slot // BLOCK_TOKENS) * block_stride + layer.to(tl.int64) * layer_stride + head * head_stride
    target = pool + plane + slot % BLOCK_TOKENS * HEAD_DIM + dim
    k = tl.load(key + token.to(tl.int64) * key_stride + head * HEAD_DIM + dim, mask=is_dim, other=0.0)
    v = tl.load(value + token.to(tl.int64) * value_stride + head * HEAD_DIM + dim, mask=is_dim, other=0.0)
    if HAS_SCALES:
        scale = scales + (plane + BLOCK_TOKENS * HEAD_DIM) // 4 + slot % BLOCK_TOKENS
        k, k_scale = _scaled_row(k)
        v, v_scale = _scaled_row(v)
        tl.store(scale, k_scale)
        tl.store(scale + kv_stride // 4, v_scale)
    tl.store(target, k.to(pool.dtype.element_ty), mask=is_dim)
    tl.store(target + kv_stride, v.to(pool.dtype.element_ty), mask=is_dim)


@triton.jit
def _scaled_row(row):
    """A row's scale, and the row in its units, float32 but rounded to what e4m3 has.

    Rounded here, to nearest even, and not by the cast: Triton's interpreter drops the carry into the exponent there.
    """
    wide = row.to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(wide), 0), 448.0)
    scale = tl.where(scale == 0, 1.0, scale)
    scaled = tl.div_rn(wide, scale)
    # e4m3 has three bits behind the leading one, and no exponent below -6 (121 in a float32's bits).
    exponent = (scaled.to(tl.int32, bitcast=True) >> 23) & 0xFF
    step = ((tl.maximum(exponent, 121) - 3) << 23).to(tl.float32, bitcast=True)
    nearest = scaled / step + 12582912.0 - 12582912.0  # 1.5 x 2^23, whose neighbours are whole numbers
    return nearest * step, scale


@triton.jit
def _move_kernel(
    pool,
    blocks,
    staging,
    first_layer,
    num_elements,
    block_stride,
    layer_stride,
    IS_GATHER: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Grid (block, part). One program copies ELEMENTS consecutive elements of one block's layers."""
    index, part = tl.program_id(0), tl.program_id(1)
    block = tl.load(blocks + index).to(tl.int64)
    element = part * ELEMENTS + tl.arange(0, ELEMENTS)
    is_element = element < num_elements
    in_pool = pool + block * block_stride + first_layer.to(tl.int64) * layer_stride + element
    in_staging = staging + index.to(tl.int64) * num_elements + element
    if IS_GATHER:
        tl.store(in_staging, tl.load(in_pool, mask=is_element), mask=is_element)
    else:
        tl.store(in_pool, tl.load(in_staging, mask=is_element), mask=is_element)
