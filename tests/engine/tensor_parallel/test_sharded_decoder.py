"""The forward pass over several ranks equals that of one, and leaves the same KV, whatever the model and its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.kernels.table import REFERENCE, OperationTable
from engine.kv_memory import KvMemory, layout_of
from engine.model_loader import open_weights
from engine.step import ModelRunner
from engine.torch_runner import TorchRunner
from tests.engine.steps import BlockDealer, greedy_tokens, make_step, prompt_logits
from tests.engine.tensor_parallel.thread_ranks import Order, ThreadRanks
from tests.engine.tiny_models import LAYERS, VOCAB, random_model, save_safetensors

PROMPTS = [np.random.default_rng(length).integers(2, VOCAB, length).tolist() for length in (1, 17, 50)]
ATOL = 1e-4
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "two kv heads": ("llama3", {}),
    "four kv heads": ("llama", {"num_key_value_heads": 4}),
    "biases, own logits, odd vocabulary": ("qwen2", {"vocab_size": VOCAB + 1}),
    "norms of heads": ("qwen3", {}),
    "window": ("mistral", {}),
    "experts": ("qwen3_moe", {}),
}


class Pair:
    """The same model in one process and over ranks, each with a pool of its own."""

    def __init__(self, tmp_path: Path, name: str, size: int, kv_dtype: str = "float32") -> None:
        variant, changes = MODELS[name]
        model = save_safetensors(random_model(variant, **changes), tmp_path / "model")
        weights = open_weights(model)
        layout = layout_of(weights.config, kv_dtype, 16)
        self.memories = [KvMemory(layout, 32) for _ in range(2)]
        self.whole = TorchRunner(weights, self.memories[0], dtype="float32")
        weights.close()
        self.sharded = ThreadRanks(model, self.memories[1], size, tmp_path)

    def both(self, call: Callable[[ModelRunner, BlockDealer], Any]) -> list[Any]:
        runners: list[ModelRunner] = [self.whole, self.sharded]
        return [call(runner, BlockDealer(memory)) for runner, memory in zip(runners, self.memories, strict=True)]

    def close(self) -> None:
        self.sharded.close()
        for memory in self.memories:
            memory.close()


@pytest.mark.parametrize(
    ("name", "size"), [(name, 2) for name in MODELS] + [(name, 4) for name in MODELS if "kv head" in name]
)
def test_logits_tokens_and_kv_are_those_of_one_process(name: str, size: int, tmp_path: Path) -> None:
    pair = Pair(tmp_path, name, size)
    expected, logits = pair.both(lambda runner, dealer: prompt_logits(runner, dealer, PROMPTS[2], 17))
    assert torch.allclose(logits, expected, atol=ATOL), (logits - expected).abs().max()
    whole, sharded = (memory.tensor for memory in pair.memories)
    assert torch.allclose(whole, sharded, atol=ATOL, equal_nan=True)  # equal NaN: nothing else was written
    expected, tokens = pair.both(lambda runner, dealer: greedy_tokens(runner, dealer, PROMPTS, 6))
    assert tokens == expected
    pair.close()


def test_fp8_kv_of_each_head_lies_in_the_pool_of_all(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "two kv heads", 2, "fp8_e4m3")
    expected, logits = pair.both(lambda runner, dealer: prompt_logits(runner, dealer, PROMPTS[2], 17))
    # A sum in another order may round a value to the next of e4m3's.
    assert (logits - expected).abs().mean() < 0.02
    expected, tokens = pair.both(lambda runner, dealer: greedy_tokens(runner, dealer, PROMPTS[:1], 4))
    assert tokens == expected
    pair.close()


def test_taps_inputs_and_trees_are_those_of_one_process(tmp_path: Path) -> None:
    """What drafters ask for: states between layers, a first layer fed by somebody else, branches of guesses."""
    pair = Pair(tmp_path, "two kv heads", 2)
    inputs = np.random.default_rng(0).random((18, 64), np.float32)

    def work(runner: ModelRunner, dealer: BlockDealer) -> list[torch.Tensor]:
        first, second = dealer.sequence(PROMPTS[1]), dealer.sequence([*PROMPTS[1], 3])
        plain = replace(make_step(dealer, [(first, 17)], logits_of_every_token=True), tap_layers=(0, LAYERS - 1))
        output = runner.forward(plain, None)
        third = make_step(dealer, [(dealer.sequence(PROMPTS[2]), 20)])
        nothing_asked = runner.forward(replace(third, logit_rows=np.array([], np.int32)), None).logits
        assert nothing_asked.shape == (0, VOCAB)
        fed = replace(make_step(dealer, [(second, 18)]), inputs=inputs)
        first.token_ids += [4, 5]
        # Both guesses follow the prompt's last token: siblings, of which neither sees the other.
        tree = make_step(dealer, [(first, 2)], logits_of_every_token=True)
        tree = replace(tree, positions=np.array([17, 17], np.int32), tree_masks=np.array([1, 2], np.int32))
        assert output.taps is not None
        return [output.taps.clone(), runner.forward(fed, None).logits.clone(), runner.forward(tree, None).logits]

    for expected, got in zip(*pair.both(work), strict=True):
        assert torch.allclose(got, expected, atol=ATOL), (got - expected).abs().max()
    pair.close()


def test_layer_is_done_once_every_rank_has_written_it(tmp_path: Path) -> None:
    model = save_safetensors(random_model("llama"), tmp_path / "model")
    weights = open_weights(model)
    memory = KvMemory(layout_of(weights.config, "float32", 16), 32)
    weights.close()
    order = Order()

    def table(rank: int) -> OperationTable:
        def kv_write(
            key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, layer: int, slots: torch.Tensor
        ) -> None:
            REFERENCE.kv_write(key, value, pool, layer, slots)
            order.note("written", rank, layer)

        return replace(REFERENCE, kv_write=kv_write)

    ranks = ThreadRanks(model, memory, 4, tmp_path, [table(rank) for rank in range(4)])
    dealer = BlockDealer(memory)
    step = make_step(dealer, [(dealer.sequence(PROMPTS[2]), 50)])
    blocks = np.unique(step.slots // 16)[:3]  # those that are full

    def layer_done(layer: int) -> None:
        order.note("done", 0, layer)
        assert memory.tensor[blocks, layer].isfinite().all(), "some head is not there"

    ranks.forward(step, layer_done)
    for layer in range(LAYERS):
        written = [index for index, event in enumerate(order.events) if event[::2] == ("written", layer)]
        assert len(written) == 4
        assert max(written) < order.events.index(("done", 0, layer))
    ranks.close()
    memory.close()
