"""Chunked-prefill attention over paged KV equals plain attention."""

from __future__ import annotations

import math

import pytest
import torch

from engine.kernels.triton.prefill_attention import prefill_attention
from tests.engine.triton.paged_batch import PagedBatch, assert_close, dense_attention, make_batch


def run(batch: PagedBatch, sliding_window: int = 0) -> torch.Tensor:
    scale = 1 / math.sqrt(batch.query.shape[2])
    return prefill_attention(
        batch.query,
        batch.pool,
        batch.layer,
        batch.block_tables,
        batch.context_lens,
        batch.query_starts,
        scale,
        batch.max_query_tokens,
        sliding_window,
    )


@pytest.mark.parametrize("block_tokens", [8, 16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged_chunks_equal_plain_attention(block_tokens: int, dtype: torch.dtype) -> None:
    shapes = [(block_tokens + 1, block_tokens + 1), (70, 150), (1, 90), (0, 12), (15, 15 + block_tokens)]
    batch = make_batch(shapes, block_tokens=block_tokens, num_heads=3, num_kv_heads=1, dtype=dtype)
    assert_close(run(batch), dense_attention(batch), dtype)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_head_size(head_dim: int) -> None:
    batch = make_batch([(20, 70)], head_dim=head_dim, num_heads=2, num_kv_heads=2)
    assert_close(run(batch), dense_attention(batch), torch.float32)


@pytest.mark.parametrize("window", [1, 16, 100])
def test_sliding_window_hides_what_is_too_far_back(window: int) -> None:
    batch = make_batch([(40, 200), (3, 3)], num_heads=2)
    assert_close(run(batch, window), dense_attention(batch, window=window), torch.float32)
