"""`engine.torch_runner` against transformers: the same logits and tokens, whatever the chunks, batch and blocks are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from cluster.errors import StartupError
from engine.kv_memory import KvMemory, layout_of
from engine.model_loader import open_weights
from engine.step import ModelRunner
from engine.torch_runner import TorchRunner
from tests.engine.steps import BlockDealer, greedy_tokens, make_step, prompt_logits
from tests.engine.tiny_models import LAYERS, MIXTURES, VARIANTS, VOCAB, random_model, save_gguf, save_safetensors

ATOL = 1e-3
# Prompts of licence text and chat questions, with the tokens that transformers gives in float32.
GREEDY_REFERENCE: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "exactness" / "greedy_reference.json").read_text()
)


def load(
    path: Path, *, dtype: str = "float32", block_tokens: int = 16, num_blocks: int = 64
) -> tuple[TorchRunner, KvMemory]:
    weights = open_weights(path)
    memory = KvMemory(layout_of(weights.config, dtype, block_tokens), num_blocks)
    runner = TorchRunner(weights, memory)
    weights.close()
    return runner, memory


def tokens(count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
@pytest.mark.parametrize("variant", [*VARIANTS, *MIXTURES])
def test_logits_equal_transformers_for_every_architecture(variant: str, block_tokens: int, tmp_path: Path) -> None:
    model = random_model(variant)
    runner, memory = load(save_safetensors(model, tmp_path), block_tokens=block_tokens, num_blocks=1024 // block_tokens)
    for count in sorted({1, max(block_tokens - 1, 1), block_tokens, block_tokens + 1, 70}):
        expected = reference_logits(model, tokens(count, seed=count))
        for chunk in (1, 16, 17, 100):
            logits = prompt_logits(runner, BlockDealer(memory, seed=chunk), tokens(count, seed=count), chunk)
            assert torch.allclose(logits, expected, atol=ATOL), (count, chunk, (logits - expected).abs().max())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_gguf_logits_equal_a_transformers_model_with_the_same_weights(variant: str, kind: str, tmp_path: Path) -> None:
    model = random_model(variant)
    weights = open_weights(save_gguf(model, tmp_path / "m.gguf", kind))
    model.load_state_dict({name: weights.tensor(name).float() for name in weights.names()}, strict=False)
    weights.close()
    runner, memory = load(tmp_path / "m.gguf")
    expected = reference_logits(model, tokens(40))
    assert torch.allclose(prompt_logits(runner, BlockDealer(memory), tokens(40), 17), expected, atol=ATOL)


def test_ragged_mixed_batch_gives_each_sequence_what_it_gets_alone(tmp_path: Path) -> None:
    model = random_model("llama")
    runner, memory = load(save_safetensors(model, tmp_path), num_blocks=128)
    dealer = BlockDealer(memory)
    # (tokens already computed, new tokens): decode, verification, prefill; edges of a block; long beside short.
    shapes = [
        (0, 1),
        (15, 1),
        (16, 1),
        (17, 1),
        (300, 1),
        (31, 5),
        (0, 16),
        (0, 17),
        (16, 15),
        (100, 33),
        (1, 40),
        (250, 3),
    ]
    sequences = [dealer.sequence(tokens(cached + new, seed=index)) for index, (cached, new) in enumerate(shapes)]
    for sequence, (cached, _) in zip(sequences, shapes, strict=True):
        if cached:
            runner.forward(make_step(dealer, [(sequence, cached)]), None)
    work = [(sequence, new) for sequence, (_, new) in zip(sequences, shapes, strict=True)]
    logits = runner.forward(make_step(dealer, work, logits_of_every_token=True), None).logits
    start = 0
    for sequence, (cached, new) in zip(sequences, shapes, strict=True):
        expected = reference_logits(model, sequence.token_ids)[cached:]
        assert torch.allclose(logits[start : start + new], expected, atol=ATOL), (cached, new)
        start += new


def test_logit_rows_choose_which_tokens_get_logits(tmp_path: Path) -> None:
    runner, memory = load(save_safetensors(random_model("llama"), tmp_path))
    everything = prompt_logits(runner, BlockDealer(memory), tokens(20), 20)
    dealer = BlockDealer(memory)
    output = runner.forward(make_step(dealer, [(dealer.sequence(tokens(20)), 20)]), None)
    assert output.logits.shape == (1, VOCAB)
    assert output.hidden.shape == (1, runner.config.hidden_size)
    assert output.logits.dtype == torch.float32
    assert torch.allclose(output.logits[0], everything[-1], atol=ATOL)


def test_layer_done_comes_in_order_with_the_layers_kv_in_the_pool(tmp_path: Path) -> None:
    runner, memory = load(save_safetensors(random_model("llama"), tmp_path))
    dealer = BlockDealer(memory)
    sequence = dealer.sequence(tokens(20))
    step = make_step(dealer, [(sequence, 20)])
    seen: list[int] = []

    def layer_done(layer: int) -> None:
        seen.append(layer)
        assert not memory.tensor[sequence.blocks[0], layer].isnan().any()
        assert not memory.tensor[sequence.blocks[1], layer, :, :, :4].isnan().any()
        if layer + 1 < LAYERS:
            assert memory.tensor[sequence.blocks[0], layer + 1].isnan().all()

    runner.forward(step, layer_done)
    assert seen == list(range(LAYERS))
    # Only the sequence's own slots were written.
    assert memory.tensor[sequence.blocks[1], :, :, :, 4:].isnan().all()
    assert memory.tensor[0].isnan().all()


def test_bfloat16_follows_float32_closely(tmp_path: Path) -> None:
    model = random_model("qwen3")
    directory = save_safetensors(model, tmp_path)
    exact = prompt_logits(*_runner_and_dealer(directory, "float32"), tokens(60), 60)
    rounded = prompt_logits(*_runner_and_dealer(directory, "bfloat16"), tokens(60), 17)
    assert rounded.dtype == torch.float32
    error = (rounded - exact).abs().mean() / exact.abs().mean()
    assert 0 < error < 0.03


def test_pool_of_another_model_is_refused(tmp_path: Path) -> None:
    weights = open_weights(save_safetensors(random_model("llama"), tmp_path / "a"))
    other = open_weights(save_safetensors(random_model("qwen3"), tmp_path / "b"))
    with pytest.raises(StartupError, match="laid out for another model"):
        TorchRunner(weights, KvMemory(layout_of(other.config, "float32", 16), 2))


def test_torch_runner_keeps_the_runners_protocol(tmp_path: Path) -> None:
    runner: ModelRunner = load(save_safetensors(random_model("llama"), tmp_path))[0]
    assert runner.backend == "torch"


@pytest.mark.model
@pytest.mark.parametrize("count", [1, 15, 16, 17, 100, 500])
def test_default_model_logits_equal_transformers(
    count: int, default_runner: tuple[TorchRunner, KvMemory], default_reference: Any
) -> None:
    """On text, not on random tokens: those make activations so large that transformers itself is 1e-3 off float64."""
    runner, memory = default_runner
    prompt = next(case["prompt"] for case in GREEDY_REFERENCE if len(case["prompt"]) >= count)[:count]
    expected = reference_logits(default_reference, prompt)
    # One token at a time over 500 would take minutes and repeats what 100 shows.
    for chunk in (16, 17) if count > 100 else (1, 16, 17):
        logits = prompt_logits(runner, BlockDealer(memory, seed=chunk), prompt, chunk)
        assert (logits - expected).abs().max() <= ATOL, chunk


@pytest.mark.model
def test_default_model_greedy_tokens_equal_transformers_in_one_batch(
    default_runner: tuple[TorchRunner, KvMemory],
) -> None:
    runner, memory = default_runner
    cases = [case for case in GREEDY_REFERENCE if len(case["prompt"]) in (1, 16, 33, 100, 257, 511)]
    generated = greedy_tokens(runner, BlockDealer(memory), [case["prompt"] for case in cases], 32)
    assert len(cases) == 6
    for case, own in zip(cases, generated, strict=True):
        assert own == case["tokens"][:32], len(case["prompt"])


@pytest.fixture(scope="module")
def default_runner(default_model_path: Path) -> tuple[TorchRunner, KvMemory]:
    return load(default_model_path, num_blocks=160)


@pytest.fixture(scope="module")
def default_reference(default_model_path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        default_model_path.parent, gguf_file=default_model_path.name, dtype=torch.float32
    )


def _runner_and_dealer(path: Path, dtype: str) -> tuple[TorchRunner, BlockDealer]:
    runner, memory = load(path, dtype=dtype)
    return runner, BlockDealer(memory)
