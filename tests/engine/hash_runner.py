"""A model whose logits are a hash of the KV that it reads through the block tables.

Each slot of its pool holds a fingerprint of (token, position). A row's logits are drawn from a generator keyed by all
fingerprints of its context, so a wrong, stale or missing block gives other tokens. Freed blocks can be poisoned.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from cluster.kv_layout import KvLayout
from cluster.sampling_params import SamplingParams
from engine.kv_memory import CellWrite
from engine.model_config import ModelConfig
from engine.sampler import SampleRow, SamplerState, sample
from engine.step import LayerCallback, StepInput, StepOutput
from engine.stop_rules import apply_stop_rules

VOCAB = 50
NUM_LAYERS = 3
HIDDEN = 4
POISON = np.uint64(0xDEADBEEFDEADBEEF)
CONFIG = ModelConfig(
    architecture="llama", name="hash", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=8, num_layers=NUM_LAYERS,
    num_heads=1, num_kv_heads=1, head_dim=4, rope_theta=1e4, rms_norm_eps=1e-5, max_model_len=4096, tie_embeddings=True,
    fingerprint="hash-model",
)  # fmt: skip


def fingerprints(token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    mixed = token_ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
    mixed ^= (positions.astype(np.uint64) + np.uint64(7)) * np.uint64(0xC2B2AE3D27D4EB4F)
    return mixed ^ (mixed >> np.uint64(29))


def logits_of_context(context: np.ndarray) -> np.ndarray:
    """`context` [n] fingerprints in order of position."""
    weights = np.arange(1, len(context) + 1, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    key = int((context * (weights | np.uint64(1))).sum(dtype=np.uint64))
    return np.random.Generator(np.random.PCG64(key)).standard_normal(VOCAB).astype(np.float32) * 2


class HashRunner:
    """Implements `engine.step.ModelRunner`."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.config = CONFIG
        self.backend = "hash"
        self.verifies_trees = True
        self.block_tokens = block_tokens
        self.layout = KvLayout(1, 1, 2, "float16", 2, block_tokens)  # as many bytes as the fingerprints have
        self.kv = np.full(num_blocks * block_tokens, POISON, dtype=np.uint64)
        self.batch_sizes: list[int] = []
        self.num_computed_tokens = 0
        self.nan_after_token: int | None = None
        self.fail_on_token: int | None = None
        self.failures: list[Exception] = []
        self.gate: threading.Semaphore | None = None  # when set, each step needs one permit

    def poison(self, block: int) -> None:
        self.kv[block * self.block_tokens : (block + 1) * self.block_tokens] = POISON

    def copy_block(self, source: int, destination: int) -> None:
        size = self.block_tokens
        self.kv[destination * size : (destination + 1) * size] = self.kv[source * size : (source + 1) * size]

    def save_blocks(self, blocks: Sequence[int]) -> np.ndarray:
        return self.kv.reshape(-1, self.block_tokens)[list(blocks)].view(np.uint8)

    def restore_blocks(self, blocks: Sequence[int], saved: np.ndarray) -> None:
        self.kv.reshape(-1, self.block_tokens)[list(blocks)] = saved.view(np.uint64)

    def run(self, block: int, first_layer: int, num_layers: int) -> memoryview:
        return memoryview(self.kv.reshape(-1, self.block_tokens)[block].view(np.uint8))

    def begin_write(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> CellWrite:
        return CellWrite([self.run(block, first_layer, num_layers) for block in blocks])

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self.kv[list(destinations)] = self.kv[list(sources)]

    def forward(self, step: StepInput, layer_done: LayerCallback | None) -> StepOutput:
        if self.gate is not None:
            assert self.gate.acquire(timeout=60)
        if self.failures:
            raise self.failures.pop(0)
        if self.fail_on_token is not None and self.fail_on_token in step.token_ids:
            raise RuntimeError("no kernel for this token")
        self.batch_sizes.append(step.num_sequences)
        self.num_computed_tokens += step.num_tokens
        assert len(np.unique(step.slots)) == step.num_tokens, "two tokens write one slot"
        self.kv[step.slots] = fingerprints(step.token_ids, step.positions)
        if layer_done is not None:
            for layer in range(NUM_LAYERS):
                layer_done(layer)
        logits = np.zeros((len(step.logit_rows), VOCAB), dtype=np.float32)
        for index, row in enumerate(step.logit_rows.tolist()):
            sequence = int(np.searchsorted(step.query_starts, row, side="right")) - 1
            start, end = step.query_starts[sequence : sequence + 2].tolist()
            root = int(step.context_lens[sequence]) - (end - start)  # where the first row of the step lies
            length = root + row - start + 1
            blocks = step.block_tables[sequence, : -(-length // self.block_tokens)].astype(np.int64)
            slots = (blocks[:, None] * self.block_tokens + np.arange(self.block_tokens)).reshape(-1)[:length]
            mask = 0 if step.tree_masks is None else int(step.tree_masks[row])
            if mask:
                branch = [root + bit for bit in range(row - start + 1) if mask >> bit & 1]
                slots = np.concatenate([slots[:root], slots[branch]])
            assert len(slots) == step.positions[row] + 1
            logits[index] = logits_of_context(self.kv[slots])
            if self.nan_after_token is not None and step.token_ids[row] == self.nan_after_token:
                logits[index, 0] = np.nan
        return StepOutput(torch.from_numpy(logits), torch.zeros(len(logits), HIDDEN))


def expected_tokens(prompt: Sequence[int], params: SamplingParams, num_generated: int = 0) -> list[int]:
    """What the model says without any engine: one sequence, no blocks, no batch."""
    history = np.array(prompt, dtype=np.int32)
    state = SamplerState(params, len(prompt) - num_generated)
    tokens: list[int] = []
    while True:
        context = fingerprints(history, np.arange(len(history)))
        row = SampleRow(state, history, num_generated + len(tokens))
        token = int(sample(torch.from_numpy(logits_of_context(context))[None], [row]).token_ids[0])
        decision = apply_stop_rules([token], params, num_generated + len(tokens), params.max_tokens)
        tokens.append(token)
        history = np.append(history, np.int32(token))
        if decision.finish_reason is not None:
            return tokens
