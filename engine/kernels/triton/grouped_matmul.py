"""A mixture of experts by Triton: all experts' rows in one launch for each matrix, whatever router chose them.

    expert ids ─ plan ─> rows sorted by expert, each expert's padded to whole tiles ─> tile ─> one expert's matrix

How many tiles there are at most follows from the shapes, so nothing is read by the host and a CUDA graph can hold it.
Tiles that are not needed end at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.experts import Experts
from engine.kernels.triton.fused_layers import silu_multiply
from engine.kernels.triton.launch_config import LaunchConfig, must_widen_dots

TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Which rows each tile computes. A slot is one row at one of its experts: `row * experts_per_token + place`."""

    slots: torch.Tensor  # [tiles, TILE_ROWS] int64; -1 pads
    experts: torch.Tensor  # [tiles] int32; as many as there are experts: a tile that is not needed
    num_experts: int


def plan_tiles(expert_ids: torch.Tensor, num_experts: int) -> ExpertTiles:
    """Tiles of `expert_ids` `[rows, experts_per_token]`, with launches alone: the host reads nothing."""
    device, flat = expert_ids.device, expert_ids.flatten()
    num_slots = flat.shape[0]
    num_tiles = num_slots // TILE_ROWS + num_experts
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
    tile_ends = torch.cumsum((counts + TILE_ROWS - 1) // TILE_ROWS, 0)
    order = torch.argsort(flat, stable=True)
    sorted_ids = flat[order]
    first_slots = torch.cumsum(counts, 0) - counts
    first_tiles = tile_ends - (counts + TILE_ROWS - 1) // TILE_ROWS
    within = torch.arange(num_slots, device=device) - first_slots[sorted_ids]
    slots = torch.full((num_tiles * TILE_ROWS,), -1, dtype=torch.int64, device=device)
    slots[first_tiles[sorted_ids] * TILE_ROWS + within] = order
    experts = torch.searchsorted(tile_ends, torch.arange(num_tiles, device=device), right=True)
    return ExpertTiles(slots.view(num_tiles, TILE_ROWS), experts.to(torch.int32), num_experts)


def grouped_matmul(x: torch.Tensor, weights: torch.Tensor, tiles: ExpertTiles, slots_per_row: int) -> torch.Tensor:
    """`[slots, n]`: for each slot its row of `x`, `slot // slots_per_row`, times the transpose of its expert's matrix.

    Shapes: x `[rows, k]`, weights `[experts, n, k]` of x's type. Sums are in float32.
    """
    num_slots, n, k = x.shape[0] * slots_per_row, weights.shape[1], weights.shape[2]
    output = x.new_empty((num_slots, n))
    config = grouped_config()
    grid = (tiles.slots.shape[0], triton.cdiv(n, config.constants["TILE_N"]))
    if num_slots:
        _grouped_kernel[grid](
            x,
            weights,
            tiles.slots,
            tiles.experts,
            output,
            slots_per_row,
            n,
            k,
            tiles.num_experts,
            **config.constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return output


def make_grouped_experts(gate_up: Sequence[torch.Tensor], down: Sequence[torch.Tensor]) -> Experts:
    """`engine.kernels.experts.make_experts` in two launches for the matrices."""
    first, second = torch.stack(list(gate_up)), torch.stack(list(down))

    def compute(hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        experts_per_token = expert_ids.shape[1]
        tiles = plan_tiles(expert_ids, first.shape[0])
        inner = silu_multiply(grouped_matmul(hidden.contiguous(), first, tiles, experts_per_token))
        outer = grouped_matmul(inner, second, tiles, 1).view(*expert_ids.shape, hidden.shape[1])
        return (outer.float() * weights[:, :, None]).sum(1).to(hidden.dtype)

    return compute


def grouped_config() -> LaunchConfig:
    constants = {"TILE_M": TILE_ROWS, "TILE_N": 64, "TILE_K": 64, "WIDEN": must_widen_dots()}
    return LaunchConfig(constants, num_stages=3)


@triton.jit
def _grouped_kernel(
    x,
    weights,
    slots,
    experts,
    output,
    slots_per_row,
    n,
    k,
    num_experts,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Grid (tile, n tile). One program: TILE_M slots of one expert times TILE_N of its outputs."""
    expert = tl.load(experts + tl.program_id(0))
    if expert < num_experts:
        slot = tl.load(slots + tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M))
        column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        is_slot, is_column = slot >= 0, column < n
        row = slot // slots_per_row
        matrix = weights + expert.to(tl.int64) * n * k
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        for start in range(0, k, TILE_K):
            inner = start + tl.arange(0, TILE_K)
            is_inner = inner < k
            a = tl.load(x + row[:, None] * k + inner[None, :], mask=is_slot[:, None] & is_inner[None, :], other=0.0)
            b = tl.load(
                matrix + column[:, None].to(tl.int64) * k + inner[None, :],
                mask=is_column[:, None] & is_inner[None, :],
                other=0.0,
            )
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, tl.trans(b), total)
        tl.store(
            output + slot[:, None] * n + column[None, :],
            total.to(output.dtype.element_ty),
            mask=is_slot[:, None] & is_column[None, :],
        )
