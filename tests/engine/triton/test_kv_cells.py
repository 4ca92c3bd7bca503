"""Keys and values land in their slots and nowhere else; cells survive a trip through a staging buffer."""

from __future__ import annotations

import torch

from engine.kernels.triton.kv_cells import gather_cells, kv_write, scatter_cells
from tests.engine.triton.paged_batch import DEVICE

BLOCK_TOKENS = 16


def make_pool(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((6, 3, 2, 2, BLOCK_TOKENS, 48), generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


def test_write_reaches_exactly_its_slots_and_skips_padding() -> None:
    pool, generator = make_pool(), torch.Generator().manual_seed(2)
    key, value = (torch.randn((4, 2, 48), generator=generator).to(DEVICE) for _ in range(2))
    slots = torch.tensor([0, 5 * BLOCK_TOKENS + 15, -1, 2 * BLOCK_TOKENS + 7], device=DEVICE)
    expected = pool.clone()
    for token, slot in ((0, 0), (1, 95), (3, 39)):
        expected[slot // BLOCK_TOKENS, 1, 0, :, slot % BLOCK_TOKENS] = key[token]
        expected[slot // BLOCK_TOKENS, 1, 1, :, slot % BLOCK_TOKENS] = value[token]
    kv_write(key, value, pool, 1, slots)
    assert torch.equal(pool, expected)


def test_empty_write_changes_nothing() -> None:
    pool = make_pool()
    before = pool.clone()
    nothing = torch.empty((0, 2, 48), device=DEVICE)
    kv_write(nothing, nothing, pool, 0, torch.empty((0,), dtype=torch.int64, device=DEVICE))
    assert torch.equal(pool, before)


def test_gathered_cells_scatter_into_other_blocks_unchanged() -> None:
    pool = make_pool(torch.bfloat16)
    source = torch.tensor([4, 0, 2], dtype=torch.int32, device=DEVICE)
    target = torch.tensor([1, 3, 5], dtype=torch.int32, device=DEVICE)
    untouched = pool[:, 0].clone()
    staging = gather_cells(pool, source, first_layer=1, num_layers=2)
    assert torch.equal(staging, pool[source.long(), 1:3].reshape(3, -1))
    scatter_cells(pool, target, 1, staging)
    assert torch.equal(pool[target.long(), 1:3], pool[source.long(), 1:3])
    assert torch.equal(pool[:, 0], untouched)
