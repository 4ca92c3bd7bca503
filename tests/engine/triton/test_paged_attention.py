"""Paged decode attention equals plain attention, for every edge of block, batch and split."""

from __future__ import annotations

import math

import pytest
import torch

from engine.kernels.triton.paged_attention import paged_attention
from tests.engine.triton.paged_batch import PagedBatch, assert_close, dense_attention, make_batch

pytest.importorskip("triton")


def run(batch: PagedBatch, num_splits: int = 3, tree_masks: torch.Tensor | None = None) -> torch.Tensor:
    scale = 1 / math.sqrt(batch.query.shape[2])
    return paged_attention(
        batch.query,
        batch.pool,
        batch.layer,
        batch.block_tables,
        batch.context_lens,
        batch.query_starts,
        scale,
        batch.max_query_tokens,
        num_splits,
        tree_masks,
    )


@pytest.mark.parametrize("block_tokens", [8, 16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_equals_plain_attention_at_block_edges(block_tokens: int, dtype: torch.dtype) -> None:
    contexts = [1, block_tokens - 1, block_tokens, block_tokens + 1, 2 * block_tokens, 200]
    batch = make_batch([(1, context) for context in contexts], block_tokens=block_tokens, dtype=dtype)
    assert_close(run(batch), dense_attention(batch), dtype)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_every_head_size(head_dim: int) -> None:
    batch = make_batch([(1, 33), (1, 70)], head_dim=head_dim, num_heads=4)
    assert_close(run(batch), dense_attention(batch), torch.float32)


@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_splits_change_nothing_even_when_some_are_empty(num_splits: int) -> None:
    batch = make_batch([(1, 5), (1, 300)])
    assert_close(run(batch, num_splits), dense_attention(batch), torch.float32)


def test_several_new_tokens_see_themselves_and_those_before() -> None:
    batch = make_batch([(1, 40), (5, 5), (16, 130), (3, 17)], num_heads=8, num_kv_heads=1)
    assert_close(run(batch), dense_attention(batch), torch.float32)


def test_a_sequence_without_new_tokens_is_passed_over() -> None:
    batch = make_batch([(2, 20), (0, 30), (1, 9)])
    assert_close(run(batch), dense_attention(batch), torch.float32)


def test_tree_of_drafts_sees_its_own_branch_only() -> None:
    # Root, two children, a child of each: 0 <- 1 <- 3, 0 <- 2 <- 4.
    ancestors = [0b00001, 0b00011, 0b00101, 0b01011, 0b10101]
    batch = make_batch([(5, 50), (1, 7), (2, 20)])
    # The others verify no tree: mask 0 is the causal one.
    masks = torch.tensor([*ancestors, 0, 0, 0], dtype=torch.int32, device=batch.query.device)
    branch = torch.tensor([[(mask >> bit) & 1 == 1 for bit in range(5)] for mask in ancestors])
    causal = torch.ones((2, 20), dtype=torch.bool).tril(18)
    sees = [torch.cat([torch.ones((5, 45), dtype=torch.bool), branch], 1), torch.ones((1, 7), dtype=torch.bool), causal]
    assert_close(run(batch, tree_masks=masks), dense_attention(batch, sees), torch.float32)


def test_too_many_new_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 16"):
        run(make_batch([(17, 17)]))
