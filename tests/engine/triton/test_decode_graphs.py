"""Plain decode steps through buckets, padding and fixed arguments give what they give alone.

The capture is a stand-in that computes again with what the arguments hold: a graph's replay without a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from cluster.errors import StartupError
from engine.decode_graphs import (
    PADDING_SLOT,
    Compute,
    PaddedStep,
    bucket_for,
    bucket_sizes,
    is_plain_decode,
)
from engine.kv_memory import KvMemory
from engine.model_config import ModelConfig
from engine.step import StepInput, StepOutput
from engine.triton_runner import TritonRunner, triton_runner
from tests.engine.native_model import SMALL_LLAMA, SMALL_WINDOW, RandomWeights, poisoned_memory
from tests.engine.steps import BlockDealer, make_step

ONE_LAYER = replace(SMALL_LLAMA, num_layers=1, num_heads=3, num_kv_heads=1, max_model_len=64)


def test_buckets_hold_their_batches_with_little_padding() -> None:
    sizes = bucket_sizes(64)
    assert sizes == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert [bucket_for(count, sizes) for count in (1, 3, 5, 8, 9, 64)] == [1, 4, 8, 8, 16, 64]
    assert bucket_for(65, sizes) is None
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(3) == (1, 2, 3)
    assert bucket_sizes(10) == (1, 2, 4, 8, 10)


def make_decode_step(num_sequences: int, *, context: int = 20) -> tuple[BlockDealer, StepInput]:
    memory = poisoned_memory(ONE_LAYER, dtype="float32", block_tokens=16, num_blocks=16)
    dealer = BlockDealer(memory)
    sequences = [dealer.sequence(range(context + 1)) for _ in range(num_sequences)]
    for number, sequence in enumerate(sequences):
        sequence.computed = context - number
    return dealer, make_step(dealer, [(sequence, 1) for sequence in sequences])


def test_only_plain_decode_steps_have_a_graph() -> None:
    dealer, step = make_decode_step(2)
    assert is_plain_decode(step)
    assert not is_plain_decode(replace(step, tree_masks=np.zeros(2, np.int32)))
    assert not is_plain_decode(replace(step, tap_layers=(0,)))
    assert not is_plain_decode(replace(step, inputs=np.zeros((2, 4), np.float32)))
    assert not is_plain_decode(replace(step, logit_rows=step.logit_rows[:1]))
    assert not is_plain_decode(make_step(dealer, [(dealer.sequence([1, 2, 3]), 2), (dealer.sequence([1]), 1)]))


def test_a_filled_step_is_padded_and_leaves_nothing_of_the_one_before() -> None:
    padded = PaddedStep(4, 4, torch.device("cpu"))
    places = {name: tensor.data_ptr() for name, tensor in padded.device.items()}
    for count in (4, 2):
        _, step = make_decode_step(count)
        padded.fill(step)
        at = {name: tensor.tolist() for name, tensor in padded.device.items()}
        assert at["token_ids"] == [*step.token_ids, *[0] * (4 - count)]
        assert at["positions"] == [*step.positions, *[0] * (4 - count)]
        assert at["slots"] == [*step.slots, *[PADDING_SLOT] * (4 - count)]
        assert at["context_lens"] == [*step.context_lens, *[0] * (4 - count)]
        assert at["query_starts"] == [0, 1, 2, 3, 4]
        width = step.block_tables.shape[1]
        assert [row[:width] for row in at["block_tables"][:count]] == step.block_tables.tolist()
    assert {name: tensor.data_ptr() for name, tensor in padded.device.items()} == places


class Recorder:
    """A capture that computes again, and counts."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = 0

    def __call__(self, compute: Compute) -> Compute:
        self.num_captures += 1

        def replay() -> StepOutput:
            self.num_replays += 1
            return compute()

        return replay


@pytest.mark.parametrize("window", [0, SMALL_WINDOW.sliding_window // 4], ids=["full", "window"])
def test_replayed_steps_give_the_logits_and_the_kv_of_steps_without_a_graph(window: int) -> None:
    config, recorder = replace(ONE_LAYER, sliding_window=window), Recorder()
    results, pools = [], []
    for has_graphs in (False, True):
        runner, memory = make_runner(config)  # KV of what came before is random
        if has_graphs:
            runner.capture_decode_steps(recorder, max_sequences=4, max_model_len=0)
            assert recorder.num_captures == 3
        dealer = BlockDealer(memory)
        sequences = [dealer.sequence([(7 * place + number) % 200 for place in range(24)]) for number in range(5)]
        memory.tensor.copy_(torch.randn(memory.tensor.shape, generator=torch.Generator().manual_seed(3)))
        for sequence, length in zip(sequences, (14, 15, 16, 0, 9), strict=True):
            sequence.computed = length
        # Three in a bucket of four, one alone, then five: more than there is a graph for.
        batches = ([0, 1, 2], [3], [2, 0, 1], [0, 1, 2, 3, 4])
        steps = [make_step(dealer, [(sequences[number], 1) for number in batch]) for batch in batches]
        results.append([runner.forward(step, None).logits.clone() for step in steps])
        pools.append(memory.tensor.view(torch.uint8).clone())
    assert recorder.num_replays == 3
    for expected, logits in zip(*results, strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(pools[0], pools[1])


def make_runner(config: ModelConfig = ONE_LAYER) -> tuple[TritonRunner, KvMemory]:
    memory = poisoned_memory(config, dtype="float32", block_tokens=16, num_blocks=24)
    return triton_runner(RandomWeights(config), memory, quantization="none", max_model_len=0), memory


def test_who_wants_to_hear_of_layers_gets_a_step_without_a_graph() -> None:
    runner, memory = make_runner()
    recorder = Recorder()
    runner.capture_decode_steps(recorder, max_sequences=1, max_model_len=0)
    dealer = BlockDealer(memory)
    heard: list[int] = []
    runner.forward(make_step(dealer, [(dealer.sequence([5]), 1)]), heard.append)
    assert heard == [0]
    assert recorder.num_replays == 0


def test_a_gpu_that_does_not_capture_says_what_to_set() -> None:
    def fails(compute: Compute) -> Compute:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(StartupError, match="set cuda_graphs to off"):
        make_runner()[0].capture_decode_steps(fails, max_sequences=1, max_model_len=0)
