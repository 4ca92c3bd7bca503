"""Whole models on Triton's operations verify trees of drafts as the reference does, by both kinds of attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from cluster.errors import EngineFailure
from engine.draft import Draft
from engine.kernels.reference_attention import AttentionShape
from engine.kernels.triton import operations
from engine.model_config import ModelConfig
from engine.step import ModelRunner
from engine.torch_runner import TorchRunner
from engine.triton_runner import triton_runner
from tests.engine.native_model import SMALL_LLAMA, SMALL_WINDOW, Batch, RandomWeights, poisoned_memory
from tests.engine.test_tree_verification import BINARY, BLOCK, random_tree, tree_step

ONE_LAYER = replace(SMALL_LLAMA, num_layers=1, num_heads=3, num_kv_heads=1)
TOLERANCE = 5e-4


def make_runner(config: ModelConfig, *, is_triton: bool) -> ModelRunner:
    memory = poisoned_memory(config, dtype="float32", block_tokens=BLOCK, num_blocks=16)
    if is_triton:
        return triton_runner(RandomWeights(config), memory, quantization="none", max_model_len=0)
    return TorchRunner(RandomWeights(config), memory)


@pytest.mark.parametrize(
    ("draft", "num_tokens", "window"),
    [
        (BINARY, 50, 0),
        (BINARY, 1, 0),
        (random_tree(30, 2), 45, 0),
        (random_tree(2, 3), 15, 0),
        (BINARY, 45, SMALL_WINDOW.sliding_window),
        (random_tree(30, 2), 45, SMALL_WINDOW.sliding_window),
    ],
    ids=["16 rows", "no context", "31 rows", "across a block", "16 rows, window", "31 rows, window"],
)
def test_each_row_sees_its_own_branch_alone(draft: Draft, num_tokens: int, window: int) -> None:
    config = replace(ONE_LAYER, sliding_window=window)
    outputs = []
    for is_triton in (False, True):
        runner, batch = make_runner(config, is_triton=is_triton), Batch(16, BLOCK)
        assert runner.verifies_trees
        sequence = batch.add([*range(num_tokens), *draft.token_ids])
        others = [batch.add([7, 8, 9])]
        before = [(sequence, num_tokens - 1), (others[0], 2)]
        runner.forward(batch.step([(each, count) for each, count in before if count], logits="none"), None)
        outputs.append(runner.forward(tree_step(batch, sequence, draft, others), None).logits.clone())
    assert len(outputs[0]) == len(draft) + 2
    torch.testing.assert_close(outputs[1], outputs[0], atol=TOLERANCE, rtol=0)


def test_a_tree_that_does_not_fit_into_masks_is_refused() -> None:
    batch = Batch(16, BLOCK)
    step = batch.step([(batch.add(list(range(32))), 32)])
    shape, pool = AttentionShape(num_heads=2, num_kv_heads=2, head_dim=16), torch.zeros((16, 1, 2, 2, BLOCK, 16))
    operations.plan_attention(replace(step, tree_masks=np.zeros(32, np.int32)), shape, pool)
    with pytest.raises(EngineFailure, match="more than 31 rows"):
        operations.plan_attention(replace(step, tree_masks=np.ones(32, np.int32)), shape, pool)
