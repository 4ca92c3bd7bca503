"""The native engine on the default model: the tokens of transformers in float32, near them in bfloat16 and 4 bits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.kv_memory import KvMemory, layout_of
from engine.model_loader import open_weights
from engine.native_runner import NativeRunner
from engine.native_weights import Quantization, WeightCompression
from engine.weights.weight_source import WeightSource
from tests.engine.native_model import Batch, built_isas

BLOCK = 16
NUM_BLOCKS = 1024
REFERENCE_FILE = Path(__file__).parents[1] / "exactness" / "greedy_reference.json"
# A bfloat16 logit of about 20 is exact to 0.06: below this lead the two most likely tokens may change places.
NEAR_TIE = 0.25
# Emulated tiles would take minutes here; `test_native_runner` has them on small models.
REAL_ISAS = [isa for isa in built_isas() if isa != "amx_emulated"]
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def weights(default_model_path: Path) -> Iterator[WeightSource]:
    source = open_weights(default_model_path)
    yield source
    source.close()


@pytest.fixture(scope="module")
def references() -> list[dict[str, Any]]:
    """Prompts of 1 to 513 tokens, around the block edges, with the answers of transformers."""
    wanted = (1, 3, 15, 16, 17, 31, 32, 33, 64, 65, 129, 257, 513)
    loaded: list[dict[str, Any]] = json.loads(REFERENCE_FILE.read_text())
    return [reference for reference in loaded if len(reference["prompt"]) in wanted]


def make_runner(weights: WeightSource, dtype: str, quantization: Quantization = "none", isa: str = "") -> NativeRunner:
    memory = KvMemory(layout_of(weights.config, dtype, BLOCK), NUM_BLOCKS)
    return NativeRunner(weights.config, weights, memory, dtype=dtype, quantization=quantization, isa=isa)


def forced_logits(runner: NativeRunner, references: list[dict[str, Any]]) -> torch.Tensor:
    """[sequences, answer tokens, vocabulary]: all prompts prefilled in chunks, then decoded together along the
    reference's own answers, so that one early difference does not hide what follows."""
    batch = Batch(NUM_BLOCKS, BLOCK)
    sequences = [batch.add(reference["prompt"] + reference["tokens"]) for reference in references]
    for sequence, reference in zip(sequences, references, strict=True):
        while sequence.computed < len(reference["prompt"]) - 1:
            count = min(100, len(reference["prompt"]) - 1 - sequence.computed)
            runner.forward(batch.step([(sequence, count)], logits="none"), None)
    steps = [
        runner.forward(batch.step([(sequence, 1) for sequence in sequences]), None).logits.clone()
        for _ in references[0]["tokens"]
    ]
    return torch.stack(steps, dim=1)


class FloatTensors:
    """The same checkpoint without its blocks."""

    blocks_are_exact = False

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)


@pytest.mark.parametrize("compression", ["auto", "off"])
def test_blocks_that_the_library_dequantises_give_the_bits_of_float_tensors(
    weights: WeightSource, references: list[dict[str, Any]], compression: WeightCompression
) -> None:
    logits = []
    for source in (weights, cast(WeightSource, FloatTensors(weights))):
        memory = KvMemory(layout_of(weights.config, "bfloat16", BLOCK), NUM_BLOCKS)
        runner = NativeRunner(weights.config, source, memory, dtype="bfloat16", compression=compression)
        batch = Batch(NUM_BLOCKS, BLOCK)
        sequence = batch.add(references[5]["prompt"])
        logits.append(runner.forward(batch.step([(sequence, len(references[5]["prompt"]))]), None).logits.clone())
        runner.close()
    assert torch.equal(*logits)


def test_float32_tokens_equal_transformers(weights: WeightSource, references: list[dict[str, Any]]) -> None:
    logits = forced_logits(make_runner(weights, "float32"), references)
    assert logits.argmax(-1).tolist() == [reference["tokens"] for reference in references]
    top = logits.topk(2).values
    gaps = torch.tensor([reference["gaps"] for reference in references])
    torch.testing.assert_close(top[..., 0] - top[..., 1], gaps, atol=1e-3, rtol=0)


@pytest.mark.parametrize("isa", REAL_ISAS)
def test_bfloat16_differs_only_at_near_ties(weights: WeightSource, references: list[dict[str, Any]], isa: str) -> None:
    some = references[3:9] if isa.startswith(("avx512_", "amx")) else references[:2]
    chosen = forced_logits(make_runner(weights, "bfloat16", isa=isa), some).argmax(-1)
    expected = torch.tensor([reference["tokens"] for reference in some])
    gaps = torch.tensor([reference["gaps"] for reference in some])
    differs = chosen != expected
    assert gaps[differs].tolist() == [gap for gap in gaps[differs].tolist() if gap < NEAR_TIE]
    assert differs.float().mean() < 0.03
    sys.stdout.write(f"{isa}: {int(differs.sum())} of {differs.numel()} tokens differ\n")


@pytest.mark.parametrize(("quantization", "agreement"), [("file", 0.9), ("int8", 0.9), ("int4", 0.9)])
def test_quantized_weights_choose_nearly_the_same_tokens(
    weights: WeightSource, references: list[dict[str, Any]], quantization: Quantization, agreement: float
) -> None:
    runner = make_runner(weights, "bfloat16", quantization)
    some = references[3:9]
    chosen = forced_logits(runner, some).argmax(-1)
    expected = torch.tensor([reference["tokens"] for reference in some])
    share = float((chosen == expected).float().mean())
    sys.stdout.write(f"{quantization}: {share:.4f} of the tokens agree\n")
    assert share > agreement
    formats = {"file": {"Q4_1": 120, "Q8_0": 1}, "int8": {"Q8_0": 121}, "int4": {"Q4_1": 120, "Q8_0": 1}}
    assert runner.status()["weight_formats"] == formats[quantization]
