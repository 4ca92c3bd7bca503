"""Chunked-prefill attention: long runs of new tokens against paged KV, variable lengths in one launch.

The chunk's own keys and values are in the pool already (`kv_write` runs first), so one loop over the block table covers
the cached prefix and the chunk alike (flash attention 2, Dao 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels import fp8_kv
from engine.kernels.triton.launch_config import LaunchConfig, must_widen_dots

LOG2_E = tl.constexpr(1.4426950408889634)


def prefill_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    max_query_tokens: int,
    sliding_window: int = 0,
    tree_masks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output `[num_tokens, num_heads, head_dim]` in the query's dtype.

    Shapes and tree_masks as in `paged_attention`; a sequence with a tree has 31 new tokens at most. sliding_window:
    tokens that a query sees, itself included; 0 is all. In a tree it counts from a row's place on its own branch.
    """
    num_heads, head_dim = query.shape[1], query.shape[2]
    num_kv_heads, block_tokens = pool.shape[3], pool.shape[4]
    output = torch.empty_like(query)
    has_scales = fp8_kv.is_fp8(pool)
    config = prefill_config(
        head_dim,
        block_tokens,
        num_heads // num_kv_heads,
        max_query_tokens,
        sliding_window,
        has_tree=tree_masks is not None,
        has_scales=has_scales,
    )
    grid = (triton.cdiv(max_query_tokens, config.constants["TILE_QUERIES"]), num_heads, context_lens.shape[0])
    _prefill_kernel[grid](
        query,
        pool.view(fp8_kv.VALUE_DTYPE) if has_scales else pool,
        pool.view(torch.float32) if has_scales else pool,
        block_tables,
        context_lens,
        query_starts,
        tree_masks if tree_masks is not None else context_lens,
        output,
        scale,
        layer,
        num_heads,
        block_tables.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        pool.stride(3),
        **config.constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return output


def prefill_config(
    head_dim: int,
    block_tokens: int,
    group: int,
    max_query_tokens: int,
    sliding_window: int,
    *,
    has_tree: bool,
    has_scales: bool,
) -> LaunchConfig:
    """Constants of the prefill kernel; wide heads take smaller tiles, so that they fit into registers."""
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": triton.next_power_of_2(head_dim),
        "BLOCK_TOKENS": block_tokens,
        "TILE_QUERIES": 64 if max_query_tokens > 16 else 16,
        "TILE_TOKENS": 64 if head_dim <= 128 else 32,
        "SLIDING_WINDOW": sliding_window,
        "HAS_TREE": has_tree,
        "HAS_SCALES": has_scales,
        "WIDEN": must_widen_dots(),
    }
    return LaunchConfig(constants, num_warps=4 if head_dim <= 64 else 8)


@triton.jit
def _prefill_kernel(
    query,
    pool,
    scales,
    block_tables,
    context_lens,
    query_starts,
    tree_masks,
    output,
    scale,
    layer,
    num_heads,
    table_stride,
    block_stride,
    layer_stride,
    kv_stride,
    head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Grid (query tile, head, sequence). One program: TILE_QUERIES rows of one head against all KV they may see.

    Reads each key and value up to the tile's last position once; a tile past the sequence's end returns at once.
    """
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(query_starts + sequence)
    num_new = tl.load(query_starts + sequence + 1) - first_row
    if tile * TILE_QUERIES >= num_new:
        return
    context_len = tl.load(context_lens + sequence)
    row = tile * TILE_QUERIES + tl.arange(0, TILE_QUERIES)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    is_row, is_dim = row < num_new, dim < HEAD_DIM
    first_new = context_len - num_new
    index = first_new + row  # where a row's own key lies
    position = index  # how far its text has come: the same, but in a tree
    if HAS_TREE:
        tree = tl.load(tree_masks + first_row + row, mask=is_row, other=0)
        position = tl.where(tree == 0, index, first_new + _num_bits(tree) - 1)
    address = ((first_row + row)[:, None].to(tl.int64) * num_heads + head) * HEAD_DIM + dim[None, :]
    q = tl.load(query + address, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    kv_head = head // GROUP
    base = layer.to(tl.int64) * layer_stride + kv_head.to(tl.int64) * head_stride

    # A tree's rows are all in the first tile, and none of them stands before its root.
    first_position = first_new + tile * TILE_QUERIES
    end = tl.minimum(first_position + TILE_QUERIES, context_len)
    start_token = 0
    if SLIDING_WINDOW > 0:
        start_token = tl.maximum(first_position - SLIDING_WINDOW + 1, 0) // TILE_TOKENS * TILE_TOKENS
    best = tl.full([TILE_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([TILE_QUERIES], tl.float32)
    accumulated = tl.zeros([TILE_QUERIES, HEAD_DIM_PADDED], tl.float32)
    for start in range(start_token, end, TILE_TOKENS):
        token = start + tl.arange(0, TILE_TOKENS)
        is_token = token < end
        block = tl.load(block_tables + sequence * table_stride + token // BLOCK_TOKENS, mask=is_token, other=0)
        plane = base + block.to(tl.int64) * block_stride
        cell = pool + plane[:, None] + (token % BLOCK_TOKENS)[:, None] * HEAD_DIM
        is_element = is_token[:, None] & is_dim[None, :]
        keys = tl.load(cell + dim[None, :], mask=is_element, other=0.0)
        if HAS_SCALES:
            keys = keys.to(query.dtype.element_ty)
        if WIDEN:
            keys = keys.to(tl.float32)
        scores = tl.dot(q, tl.trans(keys)) * (scale * LOG2_E)
        if HAS_SCALES:
            token_scale = scales + (plane + BLOCK_TOKENS * HEAD_DIM) // 4 + token % BLOCK_TOKENS
            scores *= tl.load(token_scale, mask=is_token, other=0.0)[None, :]
        sees = (token[None, :] <= index[:, None]) & is_token[None, :]
        if HAS_TREE:
            ahead = token - first_new
            bit = (tree[:, None] >> tl.minimum(tl.maximum(ahead, 0), 31)[None, :]) & 1
            sees = sees & ((tree[:, None] == 0) | (ahead[None, :] < 0) | (bit == 1))
        if SLIDING_WINDOW > 0:
            sees = sees & (token[None, :] > position[:, None] - SLIDING_WINDOW)
        scores = tl.where(sees, scores, float("-inf"))
        tile_best = tl.maximum(best, tl.max(scores, 1))
        safe_best = tl.where(tile_best == float("-inf"), 0.0, tile_best)
        weights = tl.exp2(scores - safe_best[:, None])
        fade = tl.exp2(best - safe_best)
        values = tl.load(cell + kv_stride + dim[None, :], mask=is_element, other=0.0)
        total = total * fade + tl.sum(weights, 1)
        if HAS_SCALES:
            values = values.to(query.dtype.element_ty)
            weights *= tl.load(token_scale + kv_stride // 4, mask=is_token, other=0.0)[None, :]
        if WIDEN:
            values = values.to(tl.float32)
        accumulated = accumulated * fade[:, None] + tl.dot(weights.to(values.dtype), values)
        best = tile_best
    result = accumulated / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(output + address, result.to(output.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])


@triton.jit
def _num_bits(masks):
    """How many bits are set in each of int32 `masks`, none of them negative."""
    bits = masks - ((masks >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    bits += bits >> 8
    return (bits + (bits >> 16)) & 0x3F
