"""A step on a model, as the executor sees it: who is asked for more than a most likely token, and when."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.engine_overhead import CONFIG
from cluster.identity import BlockId, BlockRef
from engine.block_pool import BlockPool
from engine.executor import StepResults
from engine.kv_memory import KvMemory, layout_of
from engine.model_executor import ModelExecutor
from engine.request import EngineLimits
from engine.sequence import Sequence
from engine.step import LayerCallback, StepInput, StepOutput
from engine.step_plan import ScheduledChunk
from tests.engine.engine_bench import make_request

BLOCK, VOCAB = 4, 8
LIMITS = EngineLimits(max_batch_tokens=32, max_sequences=4, max_model_len=64)


class ScriptedRunner:
    """Implements `engine.step.ModelRunner`: each row's most likely token is the one that the test names."""

    def __init__(self) -> None:
        self.config = CONFIG
        self.backend = "scripted"
        self.verifies_trees = False
        self.most_likely: list[int] = []

    def forward(self, step: StepInput, layer_done: LayerCallback | None) -> StepOutput:
        logits = torch.zeros(len(self.most_likely), VOCAB)
        for row, token_id in enumerate(self.most_likely):
            logits[row] = float("nan") if token_id < 0 else logits[row]
            logits[row, token_id] += 5
        if step.only_most_likely:  # whoever reads them anyhow gets nothing
            logits[:] = float("nan")
        return StepOutput(logits, torch.zeros(len(logits), 1), None, np.array(self.most_likely, np.int32))


class Bench:
    def __init__(self) -> None:
        self.runner = ScriptedRunner()
        self._executor = ModelExecutor(
            self.runner, LIMITS, BLOCK, KvMemory(layout_of(CONFIG, "float32", BLOCK), num_blocks=1)
        )

    def decode(self, sequences: list[Sequence], most_likely: list[int]) -> StepResults:
        """One token of each; what comes is appended, as the engine does."""
        self.runner.most_likely = most_likely
        chunks = [ScheduledChunk(sequence, sequence.num_tokens - 1, 1) for sequence in sequences]
        results = self._executor.execute(chunks, None)
        for sequence, token_id in zip(sequences, results.token_ids, strict=True):
            sequence.append(token_id)
            sequence.num_computed = sequence.num_tokens - 1
        return results

    def forget(self, sequence: Sequence) -> None:
        self._executor.forget(sequence)


def make_sequence(name: str, **fields: object) -> Sequence:
    chain = BlockPool(1, BLOCK, "m").new_chain(b"")
    sequence = Sequence(make_request(name, range(5), **fields), chain, 64, 0, 0.0)
    sequence.blocks = [BlockRef(BlockId(block), 0) for block in range(1, 10)]
    sequence.num_computed = 4
    return sequence


def test_tokens_of_a_greedy_batch_are_the_most_likely_ones_step_after_step() -> None:
    bench, batch = Bench(), [make_sequence("a"), make_sequence("b")]
    assert [bench.decode(batch, tokens).token_ids for tokens in ([3, 1], [7, 2], [0, 6])] == [[3, 1], [7, 2], [0, 6]]


def test_a_row_that_breaks_in_a_later_step_of_a_greedy_batch_fails_alone() -> None:
    bench, batch = Bench(), [make_sequence("a"), make_sequence("b")]
    for tokens in ([3, 1], [7, 2]):
        assert bench.decode(batch, tokens).failed == {}
    results = bench.decode(batch, [4, -1])
    assert (results.token_ids[0], list(results.failed)) == (4, [1])


@pytest.mark.parametrize("fields", [{"logprobs": 0}, {"logit_bias": {2: 100.0}}])
def test_who_joins_a_greedy_batch_gets_what_it_asked_for(fields: dict[str, object]) -> None:
    bench, first, second = Bench(), make_sequence("a"), make_sequence("b", **fields)
    for token in (3, 7):
        bench.decode([first], [token])
    for _ in range(2):  # and goes on to get it
        results = bench.decode([first, second], [1, 6])
        assert results.token_ids == [1, 2 if "logit_bias" in fields else 6]
        assert list(results.logprobs) == ([1] if "logprobs" in fields else [])
    bench.forget(second)
    assert bench.decode([first], [5]).token_ids == [5]


def test_who_takes_the_place_of_a_greedy_sequence_is_asked_anew() -> None:
    bench, first, second = Bench(), make_sequence("a"), make_sequence("b", logit_bias={2: 100.0})
    bench.decode([first], [3])
    bench.forget(first)
    assert bench.decode([second], [3]).token_ids == [2]
