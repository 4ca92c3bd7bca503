"""Paged decode attention: 1 to 16 new tokens for each sequence against its whole KV, read in place.

The KV of one sequence is split over programs so that a small batch still fills a GPU (flash decoding, Dao et al. 2023);
the query heads of one KV head are packed with the new tokens into the rows of one matrix product, so each key and value
is read once. A second kernel merges the splits by their log-sum-exp.

Does not know: how the KV got there (`kv_write`), long prefill chunks (`prefill_attention`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels import fp8_kv
from engine.kernels.triton.launch_config import LaunchConfig, must_widen_dots

MIN_DOT_ROWS = 16  # tl.dot takes at least 16 rows
MAX_QUERY_TOKENS = 16
LOG2_E = tl.constexpr(1.4426950408889634)


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    max_query_tokens: int,
    num_splits: int,
    tree_masks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output `[num_tokens, num_heads, head_dim]` in the query's dtype.

    Shapes: query `[num_tokens, num_heads, head_dim]`; pool `[blocks, layers, 2, kv_heads, block_tokens, head_dim]`;
    block_tables `[B, W]` int32; context_lens `[B]` int32, KV tokens with the new ones; query_starts `[B + 1]` int32.
    tree_masks `[num_tokens]` int32: bit j of a row says that the row sees the sequence's j-th new token (a draft tree);
    0, or no masks at all: the row sees itself and those before it. A row whose sequence has no context is 0.

    Raises ValueError when a sequence may have more than 16 new tokens.
    """
    if max_query_tokens > MAX_QUERY_TOKENS:
        raise ValueError(f"{max_query_tokens} new tokens a sequence: at most {MAX_QUERY_TOKENS}, use prefill_attention")
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_tokens = pool.shape[3], pool.shape[4]
    group = num_heads // num_kv_heads
    num_sequences = context_lens.shape[0]
    has_scales = fp8_kv.is_fp8(pool)
    config = split_config(
        head_dim,
        block_tokens,
        group,
        max_query_tokens,
        num_splits,
        has_tree=tree_masks is not None,
        has_scales=has_scales,
    )
    partial = query.new_empty((num_splits, num_tokens, num_heads, head_dim), dtype=torch.float32)
    log_sums = query.new_empty((num_splits, num_tokens, num_heads), dtype=torch.float32)
    output = torch.empty_like(query)
    _split_kernel[(num_sequences, num_kv_heads, num_splits)](
        query,
        pool.view(fp8_kv.VALUE_DTYPE) if has_scales else pool,
        pool.view(torch.float32) if has_scales else pool,
        block_tables,
        context_lens,
        query_starts,
        tree_masks if tree_masks is not None else context_lens,
        partial,
        log_sums,
        scale,
        layer,
        num_tokens,
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
    _merge_kernel[(num_tokens, num_heads)](
        partial,
        log_sums,
        output,
        num_tokens,
        num_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
        NUM_SPLITS=num_splits,
        SPLITS_PADDED=triton.next_power_of_2(num_splits),
        num_warps=1,
    )
    return output


def split_config(
    head_dim: int,
    block_tokens: int,
    group: int,
    max_query_tokens: int,
    num_splits: int,
    *,
    has_tree: bool,
    has_scales: bool,
) -> LaunchConfig:
    """Constants of the split kernel, chosen so that nothing spills on sm_80 and sm_90."""
    rows = max(MIN_DOT_ROWS, triton.next_power_of_2(max_query_tokens * group))
    constants = {
        "GROUP": group,
        "ROWS": rows,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": triton.next_power_of_2(head_dim),
        "BLOCK_TOKENS": block_tokens,
        "TILE_TOKENS": 64 if head_dim <= 128 else 32,
        "NUM_SPLITS": num_splits,
        "HAS_TREE": has_tree,
        "HAS_SCALES": has_scales,
        "WIDEN": must_widen_dots(),
    }
    return LaunchConfig(constants, num_warps=8 if rows * head_dim > 64 * 128 else 4)


@triton.jit
def _split_kernel(
    query,
    pool,
    scales,
    block_tables,
    context_lens,
    query_starts,
    tree_masks,
    partial,
    log_sums,
    scale,
    layer,
    num_tokens,
    num_heads,
    table_stride,
    block_stride,
    layer_stride,
    kv_stride,
    head_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Grid (sequence, KV head, split). One program: all query rows of one KV head against one split of its KV.

    Reads the split's keys and values once (2 x split tokens x HEAD_DIM elements), writes ROWS x HEAD_DIM floats. FP8 KV
    is widened to the query's type; its scales, `scales` being the pool as float32, multiply scores and weights.
    """
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(query_starts + sequence)
    num_new = tl.load(query_starts + sequence + 1) - first_row
    context_len = tl.load(context_lens + sequence)
    # Whole tiles to each split, so that no tile is shared by two programs.
    tiles = tl.cdiv(tl.cdiv(context_len, TILE_TOKENS), NUM_SPLITS)
    split_first = split * tiles * TILE_TOKENS
    split_end = tl.minimum(split_first + tiles * TILE_TOKENS, context_len)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    new_index, head = row // GROUP, kv_head * GROUP + row % GROUP
    is_row, is_dim = new_index < num_new, dim < HEAD_DIM
    token_row = first_row + new_index
    q = tl.load(
        query + (token_row[:, None].to(tl.int64) * num_heads + head[:, None]) * HEAD_DIM + dim[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)
    first_new = context_len - num_new
    if HAS_TREE:
        tree = tl.load(tree_masks + token_row, mask=is_row, other=0)
        # A row of no tree sees itself and those before it, which is a mask like any other.
        tree = tl.where(tree == 0, (2 << tl.minimum(new_index, 29)) - 1, tree)
    base = layer.to(tl.int64) * layer_stride + kv_head.to(tl.int64) * head_stride

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulated = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
    for start in range(split_first, split_end, TILE_TOKENS):
        token = start + tl.arange(0, TILE_TOKENS)
        is_token = token < split_end
        block = tl.load(block_tables + sequence * table_stride + token // BLOCK_TOKENS, mask=is_token, other=0)
        plane = base + block.to(tl.int64) * block_stride
        cell = pool + plane[:, None] + (token % BLOCK_TOKENS)[:, None] * HEAD_DIM
        is_element = is_token[:, None] & is_dim[None, :]
        # Masked loads give 0: whatever lies behind the context (NaN in poisoned blocks) never enters a product.
        keys = tl.load(cell + dim[None, :], mask=is_element, other=0.0)
        if HAS_SCALES:
            keys = keys.to(query.dtype.element_ty)
        if WIDEN:
            keys = keys.to(tl.float32)
        scores = tl.dot(q, tl.trans(keys)) * (scale * LOG2_E)
        if HAS_SCALES:
            token_scale = scales + (plane + BLOCK_TOKENS * HEAD_DIM) // 4 + token % BLOCK_TOKENS
            scores *= tl.load(token_scale, mask=is_token, other=0.0)[None, :]
        draft = token - first_new
        if HAS_TREE:
            shift = tl.minimum(tl.maximum(draft, 0), 31)
            sees = (draft[None, :] < 0) | (((tree[:, None] >> shift[None, :]) & 1) == 1)
        else:
            sees = draft[None, :] <= new_index[:, None]
        scores = tl.where(sees & is_token[None, :], scores, float("-inf"))
        tile_best = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet keeps weight 0 instead of exp(-inf + inf).
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

    is_seen = total > 0
    safe_total = tl.where(is_seen, total, 1.0)
    out_row = (split * num_tokens + token_row).to(tl.int64) * num_heads + head
    tl.store(
        partial + out_row[:, None] * HEAD_DIM + dim[None, :],
        accumulated / safe_total[:, None],
        mask=is_row[:, None] & is_dim[None, :],
    )
    tl.store(log_sums + out_row, tl.where(is_seen, best + tl.log2(safe_total), float("-inf")), mask=is_row)


@triton.jit
def _merge_kernel(
    partial,
    log_sums,
    output,
    num_tokens,
    num_heads,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    """Grid (token, head). Weighs the splits of one output row by their share of the softmax's denominator."""
    token, head = tl.program_id(0), tl.program_id(1)
    split = tl.arange(0, SPLITS_PADDED)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    is_split = split < NUM_SPLITS
    row = (split * num_tokens + token).to(tl.int64) * num_heads + head
    log_sum = tl.load(log_sums + row, mask=is_split, other=float("-inf"))
    best = tl.max(log_sum, 0)
    # A row that sees nothing (a graph's padding) is 0 instead of exp(-inf + inf).
    weight = tl.exp2(log_sum - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total > 0, total, 1.0)
    part = tl.load(
        partial + row[:, None] * HEAD_DIM + dim[None, :],
        mask=(is_split & (log_sum > float("-inf")))[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(part * weight[:, None], 0)
    tl.store(
        output + (token.to(tl.int64) * num_heads + head) * HEAD_DIM + dim,
        merged.to(output.dtype.element_ty),
        mask=dim < HEAD_DIM,
    )
