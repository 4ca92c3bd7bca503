"""Random ragged batches over a poisoned pool, and the plainest attention there is to compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class PagedBatch:
    """B sequences: `keys[b]`, `values[b]` `[context, kv_heads, head_dim]`, the same in `pool` at shuffled blocks."""

    query: torch.Tensor
    pool: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    query_starts: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    layer: int

    @property
    def max_query_tokens(self) -> int:
        return int((self.query_starts[1:] - self.query_starts[:-1]).max())


def make_batch(
    shapes: list[tuple[int, int]],
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
) -> PagedBatch:
    """`shapes` has (new tokens, context tokens with the new ones) of each sequence. Unused pool elements are NaN."""
    generator = torch.Generator().manual_seed(len(shapes) * 1000 + head_dim + block_tokens)
    num_layers, layer = 2, 1
    num_blocks = sum(math.ceil(context / block_tokens) for _, context in shapes) + 3
    pool = torch.full((num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_dim), math.nan, dtype=dtype)
    order = torch.randperm(num_blocks, generator=generator).tolist()
    width = max(1, max(math.ceil(context / block_tokens) for _, context in shapes))
    tables = torch.zeros((len(shapes), width), dtype=torch.int32)
    keys, values = [], []
    for sequence, (_, context) in enumerate(shapes):
        k, v = (torch.randn((context, num_kv_heads, head_dim), generator=generator).to(dtype) for _ in range(2))
        keys.append(k)
        values.append(v)
        for index in range(math.ceil(context / block_tokens)):
            block = order.pop()
            tables[sequence, index] = block
            part = slice(index * block_tokens, min(context, (index + 1) * block_tokens))
            length = part.stop - part.start
            pool[block, layer, 0, :, :length] = k[part].transpose(0, 1)
            pool[block, layer, 1, :, :length] = v[part].transpose(0, 1)
    starts = torch.tensor([0, *torch.tensor([new for new, _ in shapes]).cumsum(0).tolist()], dtype=torch.int32)
    query = torch.randn((int(starts[-1]), num_heads, head_dim), generator=generator).to(dtype)
    lens = torch.tensor([context for _, context in shapes], dtype=torch.int32)
    return PagedBatch(
        query.to(DEVICE), pool.to(DEVICE), tables.to(DEVICE), lens.to(DEVICE), starts.to(DEVICE), keys, values, layer
    )


def dense_attention(batch: PagedBatch, sees: list[torch.Tensor] | None = None, window: int = 0) -> torch.Tensor:
    """Softmax attention in float64, one sequence at a time. `sees[b]` `[new, context]` replaces the causal mask."""
    rows = []
    for sequence, (k, v) in enumerate(zip(batch.keys, batch.values, strict=True)):
        first, last = int(batch.query_starts[sequence]), int(batch.query_starts[sequence + 1])
        num_new, context = last - first, k.shape[0]
        if num_new == 0:
            continue
        q = batch.query[first:last].cpu().double()
        group = q.shape[1] // k.shape[1]
        k64, v64 = (tensor.double().repeat_interleave(group, 1) for tensor in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k64) / math.sqrt(q.shape[2])
        position = torch.arange(context - num_new, context)[:, None]
        mask = torch.arange(context)[None, :] <= position
        if window:
            mask &= torch.arange(context)[None, :] > position - window
        scores = scores.masked_fill(~(mask if sees is None else sees[sequence]), -math.inf)
        rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v64))
    return torch.cat(rows) if rows else batch.query.cpu().double()


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.cpu().double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
