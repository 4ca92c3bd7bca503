"""Whole models on Triton's operations, in the interpreter: logits and tokens of the reference, every architecture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from cluster.errors import StartupError
from engine.kernels.reference_attention import AttentionShape
from engine.kernels.table import LinearMaker
from engine.kernels.triton import operations
from engine.kernels.triton.quantized_linear import (
    GROUP_SIZE,
    make_fp8_linear,
    make_int4_linear,
    make_int8_linear,
    quantize_int4,
)
from engine.kv_memory import KvMemory, layout_of
from engine.model_loader import open_weights
from engine.step import StepInput
from engine.torch_runner import TorchRunner
from engine.triton_runner import triton_device, triton_runner
from tests.engine.steps import BlockDealer, greedy_tokens, make_step, prompt_logits
from tests.engine.tiny_models import MIXTURES, VARIANTS, VOCAB, random_model, save_safetensors

ATOL = 1e-3


def load(path: Path, *, is_triton: bool, quantization: str = "none") -> tuple[TorchRunner, KvMemory]:
    weights = open_weights(path)
    memory = KvMemory(layout_of(weights.config, "float32", 16), 64)
    runner: TorchRunner
    if is_triton:
        runner = triton_runner(weights, memory, quantization=quantization, max_model_len=0)
    else:
        runner = TorchRunner(weights, memory)
    weights.close()
    return runner, memory


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, count)]


@pytest.mark.parametrize("variant", [*VARIANTS, *MIXTURES])
def test_logits_equal_the_reference_for_every_architecture(variant: str, tmp_path: Path) -> None:
    path = save_safetensors(random_model(variant), tmp_path)
    (reference, its_memory), (runner, memory) = load(path, is_triton=False), load(path, is_triton=True)
    assert runner.backend == "triton"
    # A long chunk (across a block and the window), a run that decode attention takes, and a single token.
    dealers = BlockDealer(its_memory), BlockDealer(memory)
    sequences = [dealer.sequence(tokens(36)) for dealer in dealers]
    for chunk in (30, 5, 1):
        expected, logits = (
            one.forward(make_step(dealer, [(sequence, chunk)], logits_of_every_token=True), None).logits.clone()
            for one, dealer, sequence in zip((reference, runner), dealers, sequences, strict=True)
        )
        assert torch.allclose(logits, expected, atol=ATOL), (chunk, (logits - expected).abs().max())


def test_experts_are_not_quantised_in_silence(tmp_path: Path) -> None:
    path = save_safetensors(random_model("mixtral"), tmp_path)
    with pytest.raises(StartupError, match="mixture of experts, whose matrices stay in the model's dtype"):
        load(path, is_triton=True, quantization="int4")


def test_decode_verification_and_a_long_chunk_share_a_step(tmp_path: Path) -> None:
    """Both attentions in one step, their rows interleaved in the batch."""
    path = save_safetensors(random_model("llama"), tmp_path)
    outputs = []
    for is_triton in (False, True):
        runner, memory = load(path, is_triton=is_triton)
        dealer = BlockDealer(memory)
        sequences = [dealer.sequence(tokens(60, seed=seed)) for seed in range(4)]
        runner.forward(make_step(dealer, [(sequences[0], 30), (sequences[2], 20)]), None)
        work = [(sequences[0], 1), (sequences[1], 40), (sequences[2], 5), (sequences[3], 17)]
        outputs.append(runner.forward(make_step(dealer, work, logits_of_every_token=True), None).logits)
    expected, logits = outputs
    assert torch.allclose(logits, expected, atol=ATOL)


def test_greedy_tokens_of_a_batch_equal_the_reference(tmp_path: Path) -> None:
    path = save_safetensors(random_model("qwen3"), tmp_path)
    prompts = [tokens(3), tokens(20, 1)]
    chosen = []
    for is_triton in (False, True):
        runner, memory = load(path, is_triton=is_triton)
        chosen.append(greedy_tokens(runner, BlockDealer(memory), prompts, 3))
    assert chosen[0] == chosen[1]


def test_layers_are_announced_in_order(tmp_path: Path) -> None:
    runner, memory = load(save_safetensors(random_model("llama"), tmp_path), is_triton=True)
    seen: list[int] = []
    prompt_logits(runner, BlockDealer(memory), tokens(5), 5, seen.append)
    assert seen == list(range(runner.config.num_layers))


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_quantised_weights_come_close_to_the_model(quantization: str, tmp_path: Path) -> None:
    path = save_safetensors(random_model("llama", initializer_range=0.05), tmp_path)
    (reference, its_memory), (runner, memory) = (
        load(path, is_triton=False),
        load(path, is_triton=True, quantization=quantization),
    )
    expected = prompt_logits(reference, BlockDealer(its_memory), tokens(12), 12)
    logits = prompt_logits(runner, BlockDealer(memory), tokens(12), 12)
    error = (logits - expected).norm() / expected.norm()
    assert 0 < error < (0.25 if quantization == "int4" else 0.03)


@pytest.mark.parametrize(
    ("make", "bound"), [(make_int4_linear, 0.1), (make_int8_linear, 0.015), (make_fp8_linear, 0.05)]
)
def test_quantised_linear_layers_keep_bias_and_scale(make: LinearMaker, bound: float) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn((48, 64), generator=generator)
    bias, x = torch.randn(48, generator=generator) * 5, torch.randn((5, 64), generator=generator)
    expected = x @ weight.T + bias
    error = (make(weight, bias)(x) - expected).norm() / (expected - bias).norm()
    assert error < bound


def test_int4_groups_hold_zero_exactly_and_survive_groups_of_one_sign() -> None:
    weight = torch.cat([torch.full((1, GROUP_SIZE), 0.5), torch.full((1, GROUP_SIZE), -0.25)])
    weight = torch.cat([weight, torch.zeros((1, GROUP_SIZE))])
    packed, scales, zeros = quantize_int4(weight)
    nibbles = (packed[:, :, None].to(torch.int64) >> torch.arange(0, 32, 4)) & 0xF
    restored = (nibbles.flatten(1) - zeros) * scales
    torch.testing.assert_close(restored, weight, atol=1e-6, rtol=0)


def test_splits_fill_the_gpu_and_never_outnumber_the_context() -> None:
    assert operations.num_splits(1, 8, 8192, 132) == 32
    assert operations.num_splits(64, 8, 8192, 132) == 1
    assert operations.num_splits(1, 8, 100, 132) == 1
    assert operations.num_splits(4, 8, 1024, 132) == 8


def test_an_empty_step_part_is_no_group() -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)
    path_free_pool = torch.zeros((4, 1, 2, 2, 16, 16))
    memoryless = make_step_of_lengths([0, 1])
    plan = operations.plan_attention(memoryless, shape, path_free_pool)
    assert plan.attend(torch.ones((1, 4, 16)), 0).shape == (1, 64)


def make_step_of_lengths(query_lens: list[int]) -> StepInput:
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    total = int(starts[-1])
    return StepInput(
        token_ids=np.zeros(total, np.int32),
        positions=np.zeros(total, np.int32),
        slots=np.zeros(total, np.int64),
        query_starts=starts,
        context_lens=np.maximum(np.array(query_lens, np.int32), 1),
        block_tables=np.zeros((len(query_lens), 1), np.int32),
        logit_rows=np.zeros(0, np.int32),
    )


def test_without_a_gpu_the_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_device("none").type == "cpu"  # the interpreter
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match="needs a GPU"):
        triton_device("none")
    with pytest.raises(StartupError, match="keeps weights as"):
        triton_device("file")
