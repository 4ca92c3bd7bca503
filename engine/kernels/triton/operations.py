"""The decoder's operations by Triton: the same contracts as `engine.kernels.reference`, on a GPU or in the interpreter.

A step's sequences fall into two groups, by whether decode attention takes them (up to 16 new tokens) or prefill
attention does. Each group is one launch a layer; KV is read in place in both, and both follow a tree of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cluster.errors import EngineFailure
from engine.draft import MAX_TREE_NODES
from engine.kernels.linear import make_linear
from engine.kernels.reference_attention import AttentionShape
from engine.kernels.table import AttentionPlan, LinearMaker, OperationTable
from engine.kernels.triton import fused_layers
from engine.kernels.triton.grouped_matmul import make_grouped_experts
from engine.kernels.triton.kv_cells import kv_write
from engine.kernels.triton.paged_attention import MAX_QUERY_TOKENS, paged_attention
from engine.kernels.triton.prefill_attention import prefill_attention
from engine.kernels.triton.quantized_linear import make_fp8_linear, make_int4_linear, make_int8_linear
from engine.step import StepInput

# A split of a sequence's KV is at least this long: shorter ones cost more to merge than they win.
MIN_SPLIT_TOKENS = 128
MAX_SPLITS = 32
# Programs for each multiprocessor, so that the last ones to run do not run alone.
WAVES = 2
MAX_TREE_ROWS = MAX_TREE_NODES + 1  # with the last known token's
LINEAR_MAKERS: dict[str, LinearMaker] = {
    "none": make_linear,
    "int4": make_int4_linear,
    "int8": make_int8_linear,
    "fp8": make_fp8_linear,
}


def triton_operations(quantization: str = "none") -> OperationTable:
    """The table; weights are kept as `quantization` says. Raises `KeyError` for a name that `LINEAR_MAKERS` lacks."""
    return OperationTable(
        add_rms_norm=_add_rms_norm,
        rotary=fused_layers.rotary,
        silu_multiply=fused_layers.silu_multiply,
        kv_write=kv_write,
        plan_attention=plan_attention,
        make_linear=LINEAR_MAKERS[quantization],
        make_experts=make_grouped_experts,
    )


def num_splits(num_sequences: int, num_kv_heads: int, longest_context: int, num_multiprocessors: int) -> int:
    """Programs that share one sequence's KV: enough to fill the GPU, a power of two (each is a kernel of its own)."""
    programs = num_sequences * num_kv_heads
    wanted = -(-WAVES * num_multiprocessors // programs)
    most = min(MAX_SPLITS, max(1, longest_context // MIN_SPLIT_TOKENS))
    return 1 << (min(wanted, most).bit_length() - 1)


def plan_attention(step: StepInput, shape: AttentionShape, pool: torch.Tensor) -> AttentionPlan:
    """One step's groups with their arrays on the pool's device. Raises `EngineFailure` for a tree that is too large."""
    query_lens = np.diff(step.query_starts)
    _check_trees(step, query_lens)
    # Decode attention knows no window: with one, prefill attention takes short runs as well.
    is_short = (query_lens <= MAX_QUERY_TOKENS) & (not shape.sliding_window)
    groups = [
        _group(step, members, pool.device, is_decode=is_decode)
        for is_decode, chosen in ((True, is_short), (False, ~is_short))
        if (members := np.flatnonzero(chosen & (query_lens > 0))).size
    ]
    return TritonAttentionPlan(shape, pool, groups, _multiprocessors(pool.device))


def plan_fixed_decode(
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    shape: AttentionShape,
    pool: torch.Tensor,
    longest_context: int,
) -> AttentionPlan:
    """For one new token of each sequence at most, whose arrays on the device change without a new plan: a graph's."""
    group = _Group(
        rows=None,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        tree_masks=None,
        max_query_tokens=1,
        longest_context=longest_context,
        is_decode=not shape.sliding_window,
    )
    return TritonAttentionPlan(shape, pool, [group], _multiprocessors(pool.device))


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that one launch takes, their new tokens laid end to end."""

    rows: torch.Tensor | None  # rows of the batch; None: all of it, in order
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    tree_masks: torch.Tensor | None  # None: none of the sequences verifies a tree
    max_query_tokens: int
    longest_context: int
    is_decode: bool


class TritonAttentionPlan:
    """One step's attention. Owned by the step; valid for any layer."""

    def __init__(self, shape: AttentionShape, pool: torch.Tensor, groups: list[_Group], multiprocessors: int) -> None:
        self._shape = shape
        self._pool = pool
        self._groups = groups
        self._multiprocessors = multiprocessors
        self._scale = shape.head_dim**-0.5

    def attend(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """Output `[num_tokens, num_heads * head_dim]` of query `[num_tokens, num_heads, head_dim]`."""
        if len(self._groups) == 1 and self._groups[0].rows is None:
            return self._attend_group(self._groups[0], query.contiguous(), layer).flatten(1)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in self._groups:
            if group.rows is None:
                raise ValueError("a group of all rows stands alone")
            output.index_copy_(0, group.rows, self._attend_group(group, query.index_select(0, group.rows), layer))
        return output.flatten(1)

    def _attend_group(self, group: _Group, query: torch.Tensor, layer: int) -> torch.Tensor:
        arrays = (group.block_tables, group.context_lens, group.query_starts)
        if not group.is_decode:
            window = self._shape.sliding_window
            return prefill_attention(
                query, self._pool, layer, *arrays, self._scale, group.max_query_tokens, window, group.tree_masks
            )
        splits = num_splits(
            len(group.context_lens), self._shape.num_kv_heads, group.longest_context, self._multiprocessors
        )
        return paged_attention(
            query, self._pool, layer, *arrays, self._scale, group.max_query_tokens, splits, group.tree_masks
        )


def _check_trees(step: StepInput, query_lens: npt.NDArray[np.int32]) -> None:
    if step.tree_masks is None:
        return
    firsts = step.query_starts[:-1][query_lens > MAX_TREE_ROWS]
    if step.tree_masks[firsts].any():
        raise EngineFailure(f"a tree has more than {MAX_TREE_ROWS} rows")


def _group(step: StepInput, members: npt.NDArray[np.int64], device: torch.device, *, is_decode: bool) -> _Group:
    query_lens = np.diff(step.query_starts)[members]
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    first_rows = np.repeat(step.query_starts[members] - starts[:-1], query_lens)
    rows = first_rows.astype(np.int64) + np.arange(starts[-1])
    masks = None if step.tree_masks is None else step.tree_masks[rows]
    return _Group(
        rows=torch.from_numpy(rows).to(device) if len(rows) != step.num_tokens else None,
        query_starts=torch.from_numpy(starts).to(device),
        context_lens=torch.from_numpy(step.context_lens[members]).to(device),
        block_tables=torch.from_numpy(np.ascontiguousarray(step.block_tables[members])).to(device),
        tree_masks=torch.from_numpy(masks).to(device) if masks is not None and masks.any() else None,
        max_query_tokens=int(query_lens.max()),
        longest_context=int(step.context_lens[members].max()),
        is_decode=is_decode,
    )


def _add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """The kernel takes rows that lie end to end; a norm of each head comes as a view of a wider product."""
    rows = hidden.reshape(-1, weight.shape[0])
    return fused_layers.add_rms_norm(rows, residual, weight, eps).view(hidden.shape)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
