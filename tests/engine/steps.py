"""Batches for model runners in tests: sequences with their own shuffled blocks, stepped in chunks of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from engine.kv_memory import KvMemory, layout_of
from engine.model_loader import open_weights
from engine.step import LayerCallback, ModelRunner, StepInput, StepOutput
from engine.torch_runner import TorchRunner


@dataclass
class TestSequence:
    """Token ids known so far, how many of them have KV, and the blocks that hold it."""

    __test__ = False

    token_ids: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class BlockDealer:
    """Hands out a pool's blocks in shuffled order. Block 0 is never given out: it stays poisoned."""

    def __init__(self, memory: KvMemory, seed: int = 0) -> None:
        self.block_tokens = memory.layout.block_tokens
        for block in range(memory.num_blocks):
            memory.poison(block)
        order = np.random.default_rng(seed).permutation(np.arange(1, memory.num_blocks))
        self._free = [int(block) for block in order]

    def sequence(self, token_ids: Sequence[int]) -> TestSequence:
        return TestSequence(list(token_ids))

    def cover(self, sequence: TestSequence, num_tokens: int) -> None:
        while len(sequence.blocks) * self.block_tokens < num_tokens:
            sequence.blocks.append(self._free.pop())


def make_step(
    dealer: BlockDealer, work: Sequence[tuple[TestSequence, int]], *, logits_of_every_token: bool = False
) -> StepInput:
    """A step that computes the next n tokens of each (sequence, n); logits of each one's last token."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, contexts = [0], []
    for sequence, count in work:
        first, end = sequence.computed, sequence.computed + count
        dealer.cover(sequence, end)
        token_ids += sequence.token_ids[first:end]
        positions += range(first, end)
        for position in range(first, end):
            block = sequence.blocks[position // dealer.block_tokens]
            slots.append(block * dealer.block_tokens + position % dealer.block_tokens)
        starts.append(len(token_ids))
        contexts.append(end)
        sequence.computed = end
    tables = np.zeros((len(work), max(len(sequence.blocks) for sequence, _ in work)), dtype=np.int32)
    for row, (sequence, _) in enumerate(work):
        tables[row, : len(sequence.blocks)] = sequence.blocks
    rows = range(len(token_ids)) if logits_of_every_token else [end - 1 for end in starts[1:]]
    return StepInput(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        slots=np.array(slots, dtype=np.int64),
        query_starts=np.array(starts, dtype=np.int32),
        context_lens=np.array(contexts, dtype=np.int32),
        block_tables=tables,
        logit_rows=np.array(list(rows), dtype=np.int32),
    )


def prompt_logits(
    runner: ModelRunner,
    dealer: BlockDealer,
    token_ids: Sequence[int],
    chunk: int,
    layer_done: LayerCallback | None = None,
) -> torch.Tensor:
    """Logits of every position `[tokens, vocab]`, prefilled `chunk` tokens at a time."""
    sequence = dealer.sequence(token_ids)
    parts = []
    while sequence.computed < len(token_ids):
        count = min(chunk, len(token_ids) - sequence.computed)
        step = make_step(dealer, [(sequence, count)], logits_of_every_token=True)
        parts.append(runner.forward(step, layer_done).logits.clone())
    return torch.cat(parts)


def greedy_tokens(
    runner: ModelRunner, dealer: BlockDealer, prompts: Sequence[Sequence[int]], count: int
) -> list[list[int]]:
    """`count` greedy tokens of each prompt, decoded in one batch."""
    sequences = [dealer.sequence(prompt) for prompt in prompts]
    generated: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        work = [(sequence, len(sequence.token_ids) - sequence.computed) for sequence in sequences]
        output: StepOutput = runner.forward(make_step(dealer, work), None)
        for sequence, tokens, token in zip(sequences, generated, output.logits.argmax(-1).tolist(), strict=True):
            sequence.token_ids.append(token)
            tokens.append(token)
    return generated


def tokens_of_one_process(model: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens of each prompt by the reference in float32, without workers."""
    weights = open_weights(model)
    memory = KvMemory(layout_of(weights.config, "float32", 16), 64)
    tokens = greedy_tokens(TorchRunner(weights, memory), BlockDealer(memory), prompts, count)
    weights.close()
    return tokens
