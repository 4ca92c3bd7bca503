"""`engine.kernels.reference_attention` against the plainest attention there is, over a poisoned pool."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cluster.kv_layout import KvLayout
from engine.kernels import reference_attention
from engine.kernels.reference import kv_write
from engine.kernels.reference_attention import AttentionShape, plan_attention
from engine.kv_memory import KvMemory
from tests.engine.steps import BlockDealer, make_step

LAYERS = 2
# (tokens with KV before, new tokens)
EDGES = [(0, 1), (1, 1), (14, 1), (15, 1), (16, 1), (17, 1), (0, 15), (0, 16), (0, 17), (15, 2), (16, 16), (3, 30)]
LONG = [(500, 1), (0, 1), (499, 40), (30, 1), (0, 200), (255, 3), (256, 3), (64, 64)]


class Batch:
    """Sequences with random queries, keys and values; every KV token is in a pool that is NaN elsewhere."""

    def __init__(
        self, shapes: list[tuple[int, int]], shape: AttentionShape, block_tokens: int, dtype: str = "float32"
    ) -> None:
        layout = KvLayout(
            LAYERS, shape.num_kv_heads, shape.head_dim, dtype, 4 if dtype == "float32" else 2, block_tokens
        )
        num_blocks = sum(-(-(cached + new) // block_tokens) for cached, new in shapes) + 1
        self.memory = KvMemory(layout, num_blocks)
        self.pool = self.memory.tensor
        self.shape = shape
        dealer = BlockDealer(self.memory, seed=3)
        sequences = [dealer.sequence([0] * (cached + new)) for cached, new in shapes]
        torch.manual_seed(len(shapes))
        self.keys, self.values = ([self._random(c + n, shape.num_kv_heads) for c, n in shapes] for _ in range(2))
        whole = make_step(dealer, [(sequence, len(sequence.token_ids)) for sequence in sequences])
        # Layer 1 holds the KV; layer 0 stays NaN: an attention that reads the wrong layer shows.
        kv_write(torch.cat(self.keys), torch.cat(self.values), self.pool, 1, torch.from_numpy(whole.slots))
        for sequence, (cached, _) in zip(sequences, shapes, strict=True):
            sequence.computed = cached
        self.step = make_step(dealer, [(sequence, new) for sequence, (_, new) in zip(sequences, shapes, strict=True)])
        self.query = self._random(self.step.num_tokens, shape.num_heads)

    def attend(self) -> torch.Tensor:
        with torch.inference_mode():
            return plan_attention(self.step, self.shape, self.pool).attend(self.query, 1)

    def expected(self) -> torch.Tensor:
        """Softmax of the scores, one row and one head at a time, in float64."""
        shape, step = self.shape, self.step
        output = torch.zeros(step.num_tokens, shape.num_heads, shape.head_dim, dtype=torch.float64)
        heads_per_kv = shape.num_heads // shape.num_kv_heads
        for sequence in range(step.num_sequences):
            for row in range(step.query_starts[sequence], step.query_starts[sequence + 1]):
                position = int(step.positions[row])
                first = max(0, position - shape.sliding_window + 1) if shape.sliding_window else 0
                for head in range(shape.num_heads):
                    keys = self.keys[sequence][first : position + 1, head // heads_per_kv].double()
                    values = self.values[sequence][first : position + 1, head // heads_per_kv].double()
                    scores = keys @ self.query[row, head].double() / math.sqrt(shape.head_dim)
                    output[row, head] = scores.softmax(0) @ values
        return output.view(step.num_tokens, -1)

    def _random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, self.shape.head_dim).to(self.pool.dtype)


@pytest.mark.parametrize("block_tokens", [1, 8, 16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("shapes", [EDGES, LONG], ids=["edges", "long"])
def test_ragged_batches_equal_plain_attention(
    shapes: list[tuple[int, int]], heads: tuple[int, int], block_tokens: int
) -> None:
    batch = Batch(shapes, AttentionShape(*heads, head_dim=32), block_tokens)
    assert torch.allclose(batch.attend().double(), batch.expected(), atol=1e-5)


@pytest.mark.parametrize("window", [1, 7, 16, 33, 1000])
@pytest.mark.parametrize("shapes", [EDGES, LONG], ids=["edges", "long"])
def test_sliding_window_hides_older_tokens(shapes: list[tuple[int, int]], window: int) -> None:
    batch = Batch(shapes, AttentionShape(4, 2, head_dim=16, sliding_window=window), 16)
    assert torch.allclose(batch.attend().double(), batch.expected(), atol=1e-5)


def test_blocks_behind_the_window_are_not_read() -> None:
    batch = Batch([(200, 1), (100, 20)], AttentionShape(4, 2, head_dim=16, sliding_window=20), 16)
    expected = batch.expected()
    for sequence, first_seen in [(0, 181), (1, 81)]:
        for column in range(first_seen // 16):
            batch.memory.poison(int(batch.step.block_tables[sequence, column]))
    assert torch.allclose(batch.attend().double(), expected, atol=1e-5)


def test_bfloat16_output_is_rounded_once() -> None:
    batch = Batch(LONG, AttentionShape(6, 2, head_dim=64), 16, "bfloat16")
    difference = (batch.attend().double() - batch.expected()).abs()
    assert difference.max() < 0.02
    assert difference.mean() < 0.002


def test_groups_split_by_bytes_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(EDGES + LONG, AttentionShape(4, 2, head_dim=16), 16)
    whole = batch.attend()
    monkeypatch.setattr(reference_attention, "MAX_GATHER_BYTES", 1)
    assert torch.allclose(batch.attend(), whole, atol=1e-6)


def test_number_of_groups_does_not_grow_with_the_batch() -> None:
    contexts = np.random.default_rng(0).integers(0, 1000, 60)
    batch = Batch([(int(context), 1) for context in contexts], AttentionShape(2, 1, head_dim=8), 16)
    plan = plan_attention(batch.step, batch.shape, batch.pool)
    assert len(plan._groups) <= 7  # blocks 1, 2-3, 4-7, 8-15, 16-31, 32-63
    assert torch.allclose(batch.attend().double(), batch.expected(), atol=1e-5)


def test_sequence_without_new_tokens_is_passed_over() -> None:
    batch = Batch([(3, 1), (5, 0), (17, 2)], AttentionShape(2, 1, head_dim=8), 4)
    assert torch.allclose(batch.attend().double(), batch.expected(), atol=1e-5)
