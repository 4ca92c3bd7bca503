"""FP8 KV on Triton: the bytes that the reference writes, and its attention over them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.kernels import fp8_kv, reference
from engine.kernels.reference_attention import AttentionShape
from engine.kernels.reference_attention import plan_attention as reference_plan
from engine.kernels.triton.kv_cells import kv_write
from engine.kernels.triton.operations import plan_attention
from engine.step import StepInput
from tests.engine.triton.paged_batch import DEVICE, TOLERANCE

LAYER = 1


def random_rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes, one of them 0."""
    generator = torch.Generator().manual_seed(sum(shape))
    rows = torch.randn(shape, generator=generator) * torch.logspace(-3, 1, shape[0])[:, None, None]
    rows[-1] = 0
    return rows.to(DEVICE, dtype)


def make_pool(num_blocks: int, num_kv_heads: int, block_tokens: int, head_dim: int) -> torch.Tensor:
    """Poisoned: every value and every scale is NaN."""
    shape = (num_blocks, 2, 2, num_kv_heads, block_tokens, head_dim + 4)
    return torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize(("head_dim", "block_tokens"), [(64, 16), (80, 8), (256, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_written_bytes_are_the_references(head_dim: int, block_tokens: int, dtype: torch.dtype) -> None:
    key, value = random_rows(4, 2, head_dim, dtype=dtype), random_rows(4, 2, head_dim, dtype=dtype).flip(0)
    pools = [make_pool(3, 2, block_tokens, head_dim) for _ in range(2)]
    slots = torch.tensor([0, 2 * block_tokens - 1, 2 * block_tokens, block_tokens], device=DEVICE)
    kv_write(key, value, pools[0], LAYER, slots)
    reference.kv_write(key, value, pools[1], LAYER, slots)
    assert torch.equal(pools[0], pools[1])
    kv_write(key, value, pools[0], LAYER, torch.full((4,), -1, device=DEVICE))  # padding of a CUDA graph
    assert torch.equal(pools[0], pools[1])


@pytest.mark.parametrize(
    ("shapes", "block_tokens", "head_dim", "dtype", "window"),
    [
        ([(1, 1), (1, 15), (1, 16), (1, 17), (0, 9), (3, 40)], 16, 64, torch.float32, 0),
        ([(1, 7), (1, 9), (2, 70)], 8, 80, torch.bfloat16, 0),
        ([(1, 130)], 128, 128, torch.float16, 0),
        ([(1, 18)], 16, 256, torch.bfloat16, 0),
        ([(17, 17), (20, 70), (1, 5)], 16, 64, torch.float32, 0),
        ([(18, 40)], 8, 64, torch.bfloat16, 9),
    ],
    ids=["edges", "bf16", "large blocks", "wide heads", "chunks", "window"],
)
def test_attention_equals_the_reference(
    shapes: list[tuple[int, int]], block_tokens: int, head_dim: int, dtype: torch.dtype, window: int
) -> None:
    num_heads, num_kv_heads = 4, 2
    contexts = [context for _, context in shapes]
    widths = [-(-context // block_tokens) for context in contexts]
    pool = make_pool(sum(widths) + 1, num_kv_heads, block_tokens, head_dim)
    order = list(np.random.default_rng(3).permutation(len(pool)))
    tables = np.zeros((len(shapes), max(widths)), np.int32)
    for row, (context, width) in enumerate(zip(contexts, widths, strict=True)):
        tables[row, :width] = [order.pop() for _ in range(width)]
        places = np.arange(context)
        slots = tables[row, places // block_tokens].astype(np.int64) * block_tokens + places % block_tokens
        rows = [random_rows(context, num_kv_heads, head_dim, dtype=dtype).flip(part) for part in (0, 2)]
        reference.kv_write(rows[0], rows[1], pool, LAYER, torch.from_numpy(slots).to(DEVICE))
    step = step_of(shapes, tables)
    query = random_rows(step.num_tokens + 1, num_heads, head_dim, dtype=dtype)[:-1]
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, window)
    expected = reference_plan(step, shape, pool).attend(query, LAYER)
    actual = plan_attention(step, shape, pool).attend(query, LAYER)
    assert actual.dtype == expected.dtype == dtype
    tolerance = TOLERANCE[dtype] * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=TOLERANCE[dtype])


def step_of(shapes: list[tuple[int, int]], tables: np.ndarray) -> StepInput:
    lens = [new for new, _ in shapes]
    starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    positions = np.concatenate([np.arange(context - new, context) for new, context in shapes]).astype(np.int32)
    return StepInput(
        token_ids=np.zeros(starts[-1], np.int32),
        positions=positions,
        slots=np.zeros(starts[-1], np.int64),
        query_starts=starts,
        context_lens=np.array([context for _, context in shapes], np.int32),
        block_tables=tables,
        logit_rows=np.zeros(0, np.int32),
    )


def test_a_pool_says_whether_it_is_fp8() -> None:
    assert fp8_kv.is_fp8(make_pool(1, 1, 16, 64))
    assert not fp8_kv.is_fp8(torch.zeros((1, 1, 2, 1, 16, 64)))
