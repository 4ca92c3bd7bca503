"""Attention over several tiles of keys, for each instruction set and for head sizes that end in half a tile of dims."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.model_config import ModelConfig
from tests.engine.native_model import (
    SMALL_LLAMA,
    Batch,
    RandomWeights,
    built_isas,
    reference_logits,
    small_runner,
)

BLOCK = 16
LENGTH = 300  # two whole tiles of 128 keys and a part
# What a row has seen grows from tile to tile: chunks end inside tiles, at their edges, and with a single token.
CHUNKS = ([300], [128, 128, 44], [127, 2, 130, 1, 40], [257, 20, 8, 7, 3, 1, 1, 1, 1, 1])


def model(head_dim: int, window: int) -> ModelConfig:
    return replace(SMALL_LLAMA, head_dim=head_dim, num_layers=1, sliding_window=window)


def logits_of(config: ModelConfig, dtype: str, isa: str, chunks: list[int]) -> torch.Tensor:
    runner = small_runner(config, RandomWeights(config), dtype=dtype, isa=isa, num_blocks=64)
    batch = Batch(64, BLOCK)
    sequence = batch.add(prompt(config))
    rows = [runner.forward(batch.step([(sequence, count)]), None).logits.clone() for count in chunks]
    return torch.cat(rows)


def prompt(config: ModelConfig) -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(0, config.vocab_size, LENGTH)]


@pytest.mark.parametrize("isa", built_isas())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "window"), [(32, 0), (64, 150), (96, 0), (160, 0)])
def test_chunks_change_no_bit_and_the_sums_are_the_reference_s(
    isa: str, dtype: str, head_dim: int, window: int
) -> None:
    config = model(head_dim, window)
    alone, *others = [logits_of(config, dtype, isa, list(chunks)) for chunks in CHUNKS]
    for other in others:
        assert torch.equal(other, alone)
    expected = reference_logits(config, RandomWeights(config), prompt(config))
    error = (alone.double() - expected).abs()
    if dtype == "float32":
        assert error.max() < 5e-4
    else:
        assert error.mean() < 0.02 * expected.std()
        assert error.max() < 0.2 * expected.std()
