"""Hidden states out of the runners, and inputs in place of embeddings: native and torch agree, logits do not move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.errors import EngineFailure
from engine.kv_memory import KvMemory, layout_of
from engine.step import ModelRunner
from engine.torch_runner import TorchRunner
from tests.engine.native_model import SMALL_LLAMA, Batch, RandomWeights, small_runner

CONFIG = replace(SMALL_LLAMA, num_layers=3)
WEIGHTS = RandomWeights(CONFIG)
TAPS = (0, 2)
PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5, 4], list(range(40)))


def make_runner(backend: str) -> ModelRunner:
    if backend == "native":
        return small_runner(CONFIG, WEIGHTS)
    memory = KvMemory(layout_of(CONFIG, "float32", 16), 64)
    memory.zero()
    return TorchRunner(WEIGHTS, memory)


@pytest.fixture(params=["native", "torch"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return make_runner(request.param)


@pytest.mark.parametrize("rows", ["all", "last"])
def test_taps_are_the_residual_stream_of_the_logit_rows(rows: str) -> None:
    outputs = []
    for backend in ("native", "torch"):
        batch = Batch(64, 16)
        step = batch.step([(batch.add(prompt), len(prompt)) for prompt in PROMPTS], logits=rows)
        outputs.append(make_runner(backend).forward(replace(step, tap_layers=TAPS), None))
    native, reference = (output.taps for output in outputs)
    assert native is not None
    assert reference is not None
    assert native.shape == (outputs[0].logits.shape[0], len(TAPS), CONFIG.hidden_size)
    torch.testing.assert_close(native, reference, atol=1e-4, rtol=1e-4)
    last = native[:, -1]
    normed = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + CONFIG.rms_norm_eps)
    torch.testing.assert_close(normed * WEIGHTS.tensor("model.norm.weight"), outputs[0].hidden, atol=1e-4, rtol=1e-4)


def test_logits_are_the_same_bit_for_bit_with_and_without_taps(runner: ModelRunner) -> None:
    found = []
    for taps in ((), TAPS):
        batch = Batch(64, 16)
        step = batch.step([(batch.add(prompt), len(prompt)) for prompt in PROMPTS])
        output = runner.forward(replace(step, tap_layers=taps), None)
        assert (output.taps is None) == (not taps)
        found.append(output.logits.clone())
    assert torch.equal(*found)


def test_fewer_rows_and_other_taps_after_a_large_step(runner: ModelRunner) -> None:
    """Buffers of the large step must not show through."""
    expected = []
    for is_after_large in (False, True):
        batch = Batch(64, 16)
        if is_after_large:
            large = batch.step([(batch.add(list(range(60))), 60)])
            runner.forward(replace(large, tap_layers=(0, 1, 2)), None)
        step = batch.step([(batch.add([3, 4, 5]), 3)], logits="last")
        taps = runner.forward(replace(step, tap_layers=(1,)), None).taps
        assert taps is not None
        expected.append(taps.clone())
    torch.testing.assert_close(*expected, atol=1e-5, rtol=1e-5)


def test_inputs_stand_in_for_the_embeddings(runner: ModelRunner) -> None:
    embeddings = WEIGHTS.tensor("model.embed_tokens.weight").numpy()
    found = []
    for has_inputs in (False, True):
        batch = Batch(64, 16)
        step = batch.step([(batch.add(prompt), len(prompt)) for prompt in PROMPTS])
        inputs = np.ascontiguousarray(embeddings[step.token_ids]) if has_inputs else None
        ids = np.full_like(step.token_ids, CONFIG.vocab_size + 7) if has_inputs else step.token_ids
        found.append(runner.forward(replace(step, inputs=inputs, token_ids=ids), None).logits.clone())
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_a_layer_outside_the_model_is_refused() -> None:
    batch = Batch(64, 16)
    step = batch.step([(batch.add([1, 2]), 2)])
    with pytest.raises(EngineFailure, match="tapped layer"):
        make_runner("native").forward(replace(step, tap_layers=(3,)), None)


def test_inputs_of_another_width_are_refused() -> None:
    batch = Batch(64, 16)
    step = batch.step([(batch.add([1, 2]), 2)])
    with pytest.raises(TypeError, match="inputs"):
        make_runner("native").forward(replace(step, inputs=np.zeros((2, 8), np.float32)), None)
