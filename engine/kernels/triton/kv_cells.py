"""Writing new keys and values into the paged pool, and moving whole cells between the pool and a staging buffer.

A cell is one (block, layer): `[2, kv_heads, block_tokens, head_dim]`, contiguous. Gather and scatter serve transports
that cannot take a list of runs; attention itself reads blocks in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COPY_ELEMENTS = 1024


def kv_write(key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    """Puts key and value `[num_tokens, kv_heads, head_dim]` into `pool[block, layer, :, :, offset]`.

    slots `[num_tokens]` int64: block * block_tokens + offset; a negative slot is skipped (padding of a CUDA graph).
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    _kv_write_kernel[(num_tokens, num_kv_heads)](
        key,
        value,
        pool,
        slots,
        layer,
        num_kv_heads,
        key.stride(0),
        value.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
        BLOCK_TOKENS=pool.shape[4],
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
    slots,
    layer,
    num_kv_heads,
    key_stride,
    value_stride,
    block_stride,
    layer_stride,
    kv_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Grid (token, KV head). One program copies one head's key and value: 2 x HEAD_DIM elements read and written."""
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    dim = tl.arange(0, HEAD_DIM_PADDED)
    is_dim = dim < HEAD_DIM
    cell = pool + (slot // BLOCK_TOKENS) * block_stride + layer.to(tl.int64) * layer_stride
    target = cell + (head * BLOCK_TOKENS + slot % BLOCK_TOKENS) * HEAD_DIM + dim
    k = tl.load(key + token.to(tl.int64) * key_stride + head * HEAD_DIM + dim, mask=is_dim)
    v = tl.load(value + token.to(tl.int64) * value_stride + head * HEAD_DIM + dim, mask=is_dim)
    tl.store(target, k.to(pool.dtype.element_ty), mask=is_dim)
    tl.store(target + kv_stride, v.to(pool.dtype.element_ty), mask=is_dim)


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
