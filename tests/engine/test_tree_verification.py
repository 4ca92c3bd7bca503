"""A step over a tree: each row's logits are those of its own branch, on every backend that takes trees."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.errors import EngineFailure
from engine.draft import ROOT, Draft
from engine.kv_memory import KvMemory, layout_of
from engine.model_config import ModelConfig
from engine.native_runner import NativeRunner
from engine.step import ModelRunner, StepInput
from engine.torch_runner import TorchRunner
from tests.engine.native_model import (
    SMALL_LLAMA,
    SMALL_WINDOW,
    Batch,
    CachedSequence,
    RandomWeights,
    built_isas,
    poisoned_memory,
    reference_logits,
)

BLOCK = 16
TOLERANCE = 5e-4
BINARY = Draft(tuple(range(15)), (ROOT, ROOT, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6))


def random_tree(num_nodes: int, seed: int) -> Draft:
    randomness = random.Random(seed)
    parents = [randomness.randint(ROOT, index - 1) for index in range(num_nodes)]
    return Draft(tuple(randomness.sample(range(SMALL_LLAMA.vocab_size), num_nodes)), tuple(parents))


def make_runner(backend: str, config: ModelConfig) -> tuple[ModelRunner, KvMemory]:
    weights = RandomWeights(config)
    if backend != "torch":
        memory = poisoned_memory(config, dtype="float32", block_tokens=BLOCK, num_blocks=64)
        return NativeRunner(config, weights, memory, dtype="float32", isa=backend), memory
    memory = KvMemory(layout_of(config, "float32", BLOCK), 64)
    memory.zero()
    return TorchRunner(weights, memory), memory


def tree_step(batch: Batch, sequence: CachedSequence, draft: Draft, others: list[CachedSequence]) -> StepInput:
    """The tree behind the sequence's last token, beside plain decodes of others."""
    step = batch.step([(sequence, 1 + len(draft)), *((other, 1) for other in others)])
    root, end = 0, 1 + len(draft)
    masks = np.zeros(step.num_tokens, np.int32)
    masks[root:end] = draft.tree_masks()
    step.positions[root + 1 : end] = step.positions[root] + np.array(draft.depths(), np.int32)
    return replace(step, tree_masks=masks)


@pytest.mark.parametrize("config", [SMALL_LLAMA, SMALL_WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("backend", ["torch", *built_isas()])
@pytest.mark.parametrize("num_tokens", [1, 15, 40, 122, 150])  # 128: the kernels' tile of keys
def test_each_row_sees_its_own_branch_alone(backend: str, config: ModelConfig, num_tokens: int) -> None:
    runner, memory = make_runner(backend, config)
    weights = RandomWeights(config)
    prompt = [int(token) for token in np.random.default_rng(num_tokens).integers(0, config.vocab_size, num_tokens)]
    for draft in (BINARY, random_tree(15, 1), random_tree(30, 2), random_tree(2, 3), Draft((4, 5, 6), (ROOT, 0, 0))):
        batch = Batch(64, BLOCK)
        sequence = batch.add([*prompt, *draft.token_ids])
        others = [batch.add([7, 8, 9]), batch.add(list(range(30)))]
        before = [(sequence, num_tokens - 1), (others[0], 2), (others[1], 29)]
        runner.forward(batch.step([(each, count) for each, count in before if count], logits="none"), None)
        logits = runner.forward(tree_step(batch, sequence, draft, others), None).logits.clone()
        for node in range(ROOT, len(draft)):
            expected = reference_logits(config, weights, [*prompt, *draft.path(node)])[-1]
            torch.testing.assert_close(logits[1 + node].double(), expected, atol=TOLERANCE, rtol=0)
        expected = reference_logits(config, weights, list(range(30)))[-1]
        torch.testing.assert_close(logits[-1].double(), expected, atol=TOLERANCE, rtol=0)

        # The deepest branch is kept: its KV moves to where a chain's is, and decoding goes on behind it.
        node = int(np.argmax(draft.depths()))
        rows = [0]
        while node != ROOT:
            rows.insert(1, node + 1)
            node = draft.parents[node]
        places = range(num_tokens - 1, num_tokens + len(draft))
        slots = [sequence.blocks[place // BLOCK] * BLOCK + place % BLOCK for place in places]
        memory.move_tokens([slots[row] for row in rows], slots[: len(rows)])
        sequence.token_ids = [*prompt, *draft.path(rows[-1] - 1)[:-1], 11]  # the last one is not kept after all
        sequence.computed = len(sequence.token_ids) - 1
        logits = runner.forward(batch.step([(sequence, 1)]), None).logits
        expected = reference_logits(config, weights, sequence.token_ids)[-1]
        torch.testing.assert_close(logits[0].double(), expected, atol=TOLERANCE, rtol=0)


def test_a_tree_that_does_not_fit_into_masks_is_refused() -> None:
    runner, _ = make_runner(built_isas()[0], SMALL_LLAMA)
    batch = Batch(64, BLOCK)
    step = batch.step([(batch.add(list(range(40))), 40)])
    with pytest.raises(EngineFailure, match="more than 31 rows"):
        runner.forward(replace(step, tree_masks=np.ones(40, np.int32)), None)
    with pytest.raises(ValueError, match="at most 30"):
        random_tree(31, 0)


def test_a_tree_is_cut_and_made_a_chain() -> None:
    assert BINARY.first(3) == Draft((0, 1, 2), (ROOT, ROOT, 0))
    assert BINARY.first_chain() == Draft.chain((0, 2, 6, 14))
    assert BINARY.num_levels == 4
    assert BINARY.path(14) == (0, 2, 6, 14)
    assert Draft.chain((3, 4)).first_chain() == Draft.chain((3, 4))
