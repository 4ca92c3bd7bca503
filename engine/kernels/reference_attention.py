"""Attention over paged KV in plain torch, for batches that mix decode, verification and chunked prefill.

`plan_attention` runs once a step. It sorts the sequences into groups of like length, and for each group computes which
cells of the pool to fetch and which scores to mask. `AttentionPlan.attend` runs once a layer and replays that:

    pool cells ──index_select──> keys, values [sequences, kv_heads, context, head_dim] ──SDPA with mask──> rows

Why groups: one padded batch of everything would make every decode row pay for the longest context. Within a group,
lengths differ by less than a factor of two, so at most half of the work is padding, and the number of groups grows with
the logarithm of the lengths, not with the batch. A group's fetched KV is bounded by `MAX_GATHER_BYTES` (or is one
sequence), and `scaled_dot_product_attention` works in tiles: no `[tokens, context, heads]` scores ever exist. What does
exist is one layer of one group's KV, and one mask of `[queries, context]` for a prefill chunk.

Garbage: a block's unused tail may hold anything, NaN too. A mask is not enough (NaN plus minus infinity is NaN, and
zero times NaN is NaN), so every fetched row past a sequence's context is set to zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as functional

from engine.kernels import fp8_kv
from engine.step import StepInput

# A group's keys and values for one layer: about what a core's share of the last-level cache holds.
MAX_GATHER_BYTES = 8 * 1024 * 1024
# Up to here the query heads that share a KV head are laid out as further queries, so that a key is read once for all;
# with more queries the mask of that layout costs more than it saves (measured: equal at 128, 1.7 times slower at 512).
MAX_FOLDED_QUERIES = 16
IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention needs to know of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int = 0  # 0: every earlier token is seen


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of like lengths: G sequences, at most Q new tokens each, K fetched positions each."""

    num_sequences: int
    num_queries: int
    cells: torch.Tensor  # [2 * G * kv_heads * blocks] rows of the pool's cells, for layer 0
    garbage: torch.Tensor  # rows of the fetched [2 * G * kv_heads * K] past a context
    mask: torch.Tensor  # added to the scores
    query_rows: torch.Tensor  # [G * Q] rows of the batch; a sequence with fewer repeats its last one
    output_rows: torch.Tensor  # rows of the batch that this group answers
    answers: torch.Tensor | None  # where they are in [G * Q]; None: all of it, in order


class AttentionPlan:
    """One step's attention. Owned by the step; valid for any layer."""

    def __init__(self, shape: AttentionShape, pool: torch.Tensor, groups: list[_Group], num_tokens: int) -> None:
        self._shape = shape
        self._cells = _flat_cells(pool)
        self._layer_cells = _cell_strides(pool)[1]
        self._groups = groups
        self._num_tokens = num_tokens
        self._block_tokens = int(pool.shape[4])
        largest = max((group.cells.shape[0] for group in groups), default=0)
        # One buffer for every group and layer: fresh memory would cost a page fault for each page, each time.
        self._fetched = pool.new_empty((largest, self._cells.shape[1]))

    def attend(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention output `[num_tokens, num_heads * head_dim]` of query `[num_tokens, num_heads, head_dim]`.

        The keys and values of this step must be in the pool.
        """
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        cells_before_layer = layer * self._layer_cells
        for group in self._groups:
            keys, values = self._fetch(group, cells_before_layer)
            answer = self._attend_group(group, query, keys, values)
            output.index_copy_(0, group.output_rows, answer.to(output.dtype))
        return output.view(self._num_tokens, -1)

    def _fetch(self, group: _Group, cells_before_layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[G, kv_heads, K, head_dim]` with zeros past each context."""
        fetched = self._fetched[: group.cells.shape[0]]
        torch.index_select(self._cells, 0, group.cells + cells_before_layer, out=fetched)
        if fp8_kv.is_fp8(self._cells):
            fetched = fp8_kv.dequantize(*fp8_kv.split_planes(fetched, self._block_tokens))
        fetched.view(-1, self._shape.head_dim).index_fill_(0, group.garbage, 0.0)
        both = fetched.view(2, group.num_sequences, self._shape.num_kv_heads, -1, self._shape.head_dim)
        return both[0], both[1]

    def _attend_group(
        self, group: _Group, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The answers of one group, `[answered rows, num_heads, head_dim]`."""
        shape, num_sequences, num_queries = self._shape, group.num_sequences, group.num_queries
        heads_per_kv = shape.num_heads // shape.num_kv_heads
        queries = (
            query.index_select(0, group.query_rows)
            .to(keys.dtype)
            .view(num_sequences, num_queries, shape.num_kv_heads, heads_per_kv, shape.head_dim)
            .permute(0, 2, 3, 1, 4)
        )
        if num_queries <= MAX_FOLDED_QUERIES:
            answer = functional.scaled_dot_product_attention(queries.flatten(2, 3), keys, values, attn_mask=group.mask)
        else:
            keys, values = (part.flatten(0, 1).unsqueeze(1).expand(-1, heads_per_kv, -1, -1) for part in (keys, values))
            answer = functional.scaled_dot_product_attention(queries.flatten(0, 1), keys, values, attn_mask=group.mask)
        rows = (
            answer.reshape(num_sequences, shape.num_kv_heads, heads_per_kv, num_queries, shape.head_dim)
            .permute(0, 3, 1, 2, 4)
            .reshape(num_sequences * num_queries, shape.num_heads, shape.head_dim)
        )
        return rows if group.answers is None else rows.index_select(0, group.answers)


def plan_attention(step: StepInput, shape: AttentionShape, pool: torch.Tensor) -> AttentionPlan:
    """What `step` has to fetch and mask, over a pool `[blocks, layers, 2, kv_heads, block_tokens, head_dim]`."""
    planner = _Planner(step, shape, pool)
    return AttentionPlan(shape, pool, [planner.group(members) for members in planner.members()], step.num_tokens)


def _flat_cells(pool: torch.Tensor) -> torch.Tensor:
    """The pool as rows, one for each head's keys or values of a (block, layer): `[cells, block_tokens * head_dim]`.

    From its own first cell to its last. Where the pool is some heads of a larger one, other heads' rows lie between.
    """
    row = int(pool.shape[4] * pool.shape[5])
    last = sum((size - 1) * stride for size, stride in zip(pool.shape[:4], _cell_strides(pool), strict=True))
    return pool.as_strided((last + 1, row), (row, 1))


def _cell_strides(pool: torch.Tensor) -> tuple[int, ...]:
    """Rows of `_flat_cells` from a block, layer, kv and head to the next one."""
    row = int(pool.shape[4] * pool.shape[5])
    return tuple(stride // row for stride in pool.stride()[:4])


class _Planner:
    """One step's arrays in the forms that planning needs."""

    def __init__(self, step: StepInput, shape: AttentionShape, pool: torch.Tensor) -> None:
        self._step = step
        self._shape = shape
        self._pool = pool
        self._block_tokens = int(pool.shape[4])
        self._query_starts = step.query_starts[:-1].astype(np.int64)
        self._query_lens = np.diff(step.query_starts).astype(np.int64)
        self._context_lens = step.context_lens.astype(np.int64)
        # With a sliding window, blocks that no query of this step can see are not fetched.
        first_seen = np.zeros_like(self._context_lens)
        if shape.sliding_window:
            first_query = self._context_lens - self._query_lens
            first_seen = np.maximum(first_query - shape.sliding_window + 1, 0)
        self._first_blocks = first_seen // self._block_tokens
        self._num_blocks = -(-self._context_lens // self._block_tokens) - self._first_blocks

    def members(self) -> Iterator[IndexArray]:
        """Indices of the sequences of each group: equal powers of two of queries and blocks, and bounded bytes."""
        active = np.flatnonzero(self._query_lens)
        if active.size == 0:
            return
        # frexp's exponent is the bit length: 1; 2 and 3; 4 to 7; ... so decode rows (1) are never padded to a chunk.
        keys = np.frexp(self._query_lens[active])[1] * 64 + np.frexp(self._num_blocks[active])[1]
        cell_bytes = self._pool.stride(2) * self._pool.element_size()
        for key in np.unique(keys):
            bucket = active[keys == key]
            bytes_per_sequence = 2 * cell_bytes * int(self._num_blocks[bucket].max())
            size = max(1, MAX_GATHER_BYTES // bytes_per_sequence)
            for start in range(0, bucket.size, size):
                yield bucket[start : start + size]

    def group(self, members: IndexArray) -> _Group:
        query_lens, num_blocks = self._query_lens[members], self._num_blocks[members]
        num_queries, width = int(query_lens.max()), int(num_blocks.max())
        offsets = np.minimum(np.arange(num_queries), query_lens[:, None] - 1)  # [G, Q]
        query_rows = (self._query_starts[members][:, None] + offsets).reshape(-1)
        is_answer = (np.arange(num_queries) < query_lens[:, None]).reshape(-1)
        answers = None if is_answer.all() else self._index(np.flatnonzero(is_answer))
        # Position of each fetched row, [G, K].
        first_positions = self._first_blocks[members][:, None] * self._block_tokens
        positions = first_positions + np.arange(width * self._block_tokens)
        return _Group(
            num_sequences=members.size,
            num_queries=num_queries,
            cells=self._index(self._cells(members, width)),
            garbage=self._index(self._garbage(positions >= self._context_lens[members][:, None])),
            mask=self._mask(members, offsets, positions),
            query_rows=self._index(query_rows),
            output_rows=self._index(query_rows[is_answer]),
            answers=answers,
        )

    def _cells(self, members: IndexArray, width: int) -> IndexArray:
        """Rows of `_flat_cells` of layer 0, ordered (kv, sequence, head, block)."""
        columns = self._first_blocks[members][:, None] + np.arange(width)
        # Past a sequence's last block the table is not to be read: fetch that block again, it is zeroed below.
        last = self._first_blocks[members] + self._num_blocks[members] - 1
        columns = np.minimum(columns, last[:, None])
        blocks = np.take_along_axis(self._step.block_tables[members].astype(np.int64), columns, axis=1)
        block_cells, _, kv_cells, head_cells = _cell_strides(self._pool)
        first_cells = blocks * block_cells  # [G, W]
        keys_and_values = np.arange(2)[:, None, None, None] * kv_cells
        heads = np.arange(self._shape.num_kv_heads)[None, None, :, None] * head_cells
        cells: IndexArray = (first_cells[None, :, None, :] + keys_and_values + heads).reshape(-1)
        return cells

    def _garbage(self, is_past_context: npt.NDArray[np.bool_]) -> IndexArray:
        """Rows of the fetched (kv, sequence, head, position) that lie past their context."""
        sequences, positions = np.nonzero(is_past_context)
        num_kv_heads, length = self._shape.num_kv_heads, is_past_context.shape[1]
        planes = np.arange(2)[:, None, None] * is_past_context.shape[0] + sequences  # [2, 1, n]
        rows = (planes * num_kv_heads + np.arange(num_kv_heads)[None, :, None]) * length + positions
        flat: IndexArray = rows.reshape(-1)
        return flat

    def _mask(self, members: IndexArray, offsets: IndexArray, positions: IndexArray) -> torch.Tensor:
        """What is added to the scores: 0 where a query sees a position, a huge negative number elsewhere.

        Finite, because a row of one tile may be masked altogether, and minus infinity minus itself is NaN.
        """
        rows = self._query_starts[members][:, None] + offsets
        query_positions = torch.from_numpy(self._step.positions.astype(np.int64)[rows]).unsqueeze(-1)  # [G, Q, 1]
        key_positions = torch.from_numpy(positions).unsqueeze(1)  # [G, 1, K]
        if self._step.tree_masks is None:
            is_hidden = key_positions > query_positions
        else:
            roots = self._context_lens[members] - self._query_lens[members]
            is_hidden = torch.from_numpy(_hidden_in_trees(self._step.tree_masks[rows], roots, offsets, positions))
        if self._shape.sliding_window:
            is_hidden |= key_positions <= query_positions - self._shape.sliding_window
        # FP8 is widened to float32, every other KV is of the dtype that the model computes in.
        dtype = torch.float32 if fp8_kv.is_fp8(self._pool) else self._pool.dtype
        masked = torch.finfo(dtype).min / 2
        mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, masked)
        mask = mask.unsqueeze(1).to(self._pool.device)
        heads_per_kv, num_kv_heads = self._shape.num_heads // self._shape.num_kv_heads, self._shape.num_kv_heads
        if offsets.shape[1] <= MAX_FOLDED_QUERIES:
            return mask.repeat(1, 1, heads_per_kv, 1)  # [G, 1, heads_per_kv * Q, K]
        if members.size == 1:
            return mask  # [1, 1, Q, K]
        return mask.repeat_interleave(num_kv_heads, dim=0)  # [G * kv_heads, 1, Q, K]

    def _index(self, values: IndexArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._pool.device)


def _hidden_in_trees(
    masks: npt.NDArray[np.int32], roots: IndexArray, offsets: IndexArray, key_indices: IndexArray
) -> npt.NDArray[np.bool_]:
    """Which keys `[G, Q, K]` a row does not see, where some rows verify trees.

    `masks` [G, Q], `roots` [G] (where a sequence's first row of the step lies), `offsets` [G, Q] of the rows behind it,
    `key_indices` [G, K] where the keys lie.
    """
    ahead = (key_indices - roots[:, None])[:, None, :]
    is_later = ahead > offsets[:, :, None]
    bits = masks[:, :, None] >> np.clip(ahead, 0, 31)
    is_on_other_branch = (masks[:, :, None] != 0) & (ahead >= 0) & (bits & 1 == 0)
    hidden: npt.NDArray[np.bool_] = is_later | is_on_other_branch
    return hidden
