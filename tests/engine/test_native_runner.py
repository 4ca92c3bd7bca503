"""`engine.native_runner` against plain torch, for every instruction set that this machine runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.errors import EngineFailure, StartupError
from engine.kv_memory import KvMemory, layout_of
from engine.model_config import ModelConfig
from engine.native_runner import NativeRunner
from engine.native_weights import Quantization
from tests.engine.native_model import (
    BROAD,
    MODELS,
    SMALL_LLAMA,
    Batch,
    RandomWeights,
    built_isas,
    compressing_isas,
    poisoned_memory,
    reference_logits,
    small_runner,
)

BLOCK = 16
# Logits spread over about 12: float32 sums against float64.
LOGIT_TOLERANCE = 5e-4
# Around the edges of blocks, of the kernels' key tiles (64) and of their row blocks (12, 16).
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 63, 64, 65, 100)


@pytest.fixture(params=built_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tokens(length: int, config: ModelConfig = SMALL_LLAMA, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed + 1000 * length).integers(0, config.vocab_size, length)]


@pytest.mark.parametrize("name", MODELS)
def test_prompt_logits_equal_the_reference(isa: str, name: str) -> None:
    config = MODELS[name]
    weights = RandomWeights(config)
    runner = small_runner(config, weights, isa=isa)
    batch = Batch(64, BLOCK)
    prompts = [tokens(length, config) for length in LENGTHS]
    output = runner.forward(batch.step([(batch.add(prompt), len(prompt)) for prompt in prompts]), None)
    expected = torch.cat([reference_logits(config, weights, prompt) for prompt in prompts])
    torch.testing.assert_close(output.logits.double(), expected, atol=LOGIT_TOLERANCE, rtol=0)


@pytest.mark.parametrize("block_tokens", [1, 8, 16, 24, 128])
def test_any_block_size_gives_the_same_logits(isa: str, block_tokens: int) -> None:
    weights = RandomWeights(SMALL_LLAMA)
    runner = small_runner(SMALL_LLAMA, weights, isa=isa, block_tokens=block_tokens, num_blocks=160)
    batch = Batch(160, block_tokens)
    prompt = tokens(130)
    sequence = batch.add(prompt)
    logits = [runner.forward(batch.step([(sequence, 120)]), None).logits.clone()]
    logits += [runner.forward(batch.step([(sequence, 1)]), None).logits.clone() for _ in range(10)]
    torch.testing.assert_close(
        torch.cat(logits).double(), reference_logits(SMALL_LLAMA, weights, prompt), atol=LOGIT_TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "window", "qwen3-norm", "wide-heads", "broad"])
def test_a_row_does_not_depend_on_batch_or_chunks(isa: str, dtype: str, name: str) -> None:
    """Bit for bit: the same tokens in one chunk, in ragged chunks, and one by one beside other sequences."""
    config = MODELS[name]
    weights = RandomWeights(config)
    prompt = tokens(100)

    def run(chunks: list[int], others: int) -> torch.Tensor:
        runner = small_runner(config, weights, dtype=dtype, isa=isa, num_blocks=512)
        batch = Batch(512, BLOCK, seed=others)
        sequence = batch.add(prompt)
        beside = [batch.add(tokens(100, seed=index)) for index in range(1, others + 1)]
        rows = []
        for count in chunks:
            logits = runner.forward(batch.step([*((other, count) for other in beside), (sequence, count)]), None).logits
            rows.append(logits[-count:].clone())
        return torch.cat(rows)

    alone = run([100], 0)
    assert torch.equal(run([1, 16, 17, 3, 40, 23], 0), alone)
    assert torch.equal(run([33, 67], 5), alone)
    assert torch.equal(run([90] + [1] * 10, 31), alone)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_rows_of_quantized_models_do_not_depend_on_chunks(isa: str, quantization: Quantization) -> None:
    config = replace(SMALL_LLAMA, hidden_size=64, intermediate_size=96)
    weights = RandomWeights(config)
    prompt = tokens(70)

    def run(chunks: list[int]) -> torch.Tensor:
        memory = poisoned_memory(config, dtype="bfloat16", block_tokens=BLOCK, num_blocks=64)
        runner = NativeRunner(config, weights, memory, dtype="bfloat16", quantization=quantization, isa=isa)
        batch = Batch(64, BLOCK)
        sequence = batch.add(prompt)
        rows = [runner.forward(batch.step([(sequence, count)]), None).logits.clone() for count in chunks]
        runner.close()
        return torch.cat(rows)

    alone = run([1] * 70)
    assert torch.equal(run([70]), alone)
    assert torch.equal(run([33, 17, 16, 4]), alone)


def test_rows_of_very_many_inputs_do_not_depend_on_chunks(isa: str) -> None:
    """Of so many that a cache holds the activations of 32 rows alone, in parts of a panel that are shorter."""
    config = replace(SMALL_LLAMA, hidden_size=8704, intermediate_size=80, num_layers=1, num_heads=2, num_kv_heads=1)
    weights = RandomWeights(config)
    prompt = tokens(70)

    def run(chunks: list[int]) -> torch.Tensor:
        runner = small_runner(config, weights, dtype="bfloat16", isa=isa)
        batch = Batch(64, BLOCK)
        sequence = batch.add(prompt)
        rows = [runner.forward(batch.step([(sequence, count)]), None).logits.clone() for count in chunks]
        runner.close()
        return torch.cat(rows)

    assert torch.equal(run([70]), run([16, 16, 1, 16, 16, 5]))


def test_bfloat16_stays_close_to_the_reference(isa: str) -> None:
    weights = RandomWeights(SMALL_LLAMA)
    runner = small_runner(SMALL_LLAMA, weights, dtype="bfloat16", isa=isa)
    batch = Batch(64, BLOCK)
    prompt = tokens(100)
    logits = runner.forward(batch.step([(batch.add(prompt), 100)]), None).logits.double()
    expected = reference_logits(SMALL_LLAMA, weights, prompt)
    # bfloat16 keeps 8 bits: about 0.4 % of a logit's spread for each of the roundings on the way.
    assert (logits - expected).abs().mean() < 0.02 * expected.std()
    assert (logits - expected).abs().max() < 0.2 * expected.std()


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_kv_may_differ_in_dtype(dtype: str, kv_dtype: str, isa: str) -> None:
    weights = RandomWeights(SMALL_LLAMA)
    runner = small_runner(SMALL_LLAMA, weights, dtype=dtype, kv_dtype=kv_dtype, isa=isa)
    batch = Batch(64, BLOCK)
    prompt = tokens(70)
    logits = runner.forward(batch.step([(batch.add(prompt), 70)]), None).logits.double()
    expected = reference_logits(SMALL_LLAMA, weights, prompt)
    assert (logits - expected).abs().mean() < 0.02 * expected.std()


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8, 13, 16, 17, 31, 64])
def test_decode_of_any_batch_equals_the_reference(isa: str, batch_size: int) -> None:
    weights = RandomWeights(SMALL_LLAMA)
    runner = small_runner(SMALL_LLAMA, weights, isa=isa, num_blocks=512)
    batch = Batch(512, BLOCK)
    prompts = [tokens(2 + (7 * index) % 70, seed=index) for index in range(batch_size)]
    sequences = [batch.add(prompt) for prompt in prompts]
    runner.forward(batch.step([(sequence, len(sequence.token_ids) - 1) for sequence in sequences], logits="none"), None)
    logits = runner.forward(batch.step([(sequence, 1) for sequence in sequences]), None).logits
    expected = torch.stack([reference_logits(SMALL_LLAMA, weights, prompt)[-1] for prompt in prompts])
    torch.testing.assert_close(logits.double(), expected, atol=LOGIT_TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [SMALL_LLAMA, BROAD], ids=["small", "broad"])
def test_threads_change_no_bit(isa: str, config: ModelConfig, dtype: str) -> None:
    weights = RandomWeights(config)
    outputs = []
    for num_threads in (1, 2, 3):
        runner = small_runner(config, weights, dtype=dtype, isa=isa, num_threads=num_threads)
        batch = Batch(64, BLOCK)
        step = batch.step([(batch.add(tokens(length, config)), length) for length in (70, 1, 33)])
        outputs.append(runner.forward(step, None).logits.clone())
        runner.close()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_pool_holds_the_rotated_keys_and_nothing_else_is_written() -> None:
    weights = RandomWeights(SMALL_LLAMA)
    memory = poisoned_memory(SMALL_LLAMA, dtype="float32", block_tokens=BLOCK, num_blocks=8)
    runner = NativeRunner(SMALL_LLAMA, weights, memory, dtype="float32")
    batch = Batch(8, BLOCK)
    sequence = batch.add(tokens(BLOCK + 3))
    runner.forward(batch.step([(sequence, BLOCK + 3)]), None)
    written = ~memory.tensor.isnan().any(-1)  # [blocks, layers, 2, kv_heads, block_tokens]
    first, second = sequence.blocks
    expected = torch.zeros_like(written)
    expected[first] = True
    expected[second, :, :, :, :3] = True
    assert torch.equal(written, expected)


def test_logits_only_for_the_wanted_rows() -> None:
    weights = RandomWeights(SMALL_LLAMA)
    runner = small_runner(SMALL_LLAMA, weights)
    batch = Batch(64, BLOCK)
    first, second = batch.add(tokens(20)), batch.add(tokens(30))
    assert runner.forward(batch.step([(first, 5), (second, 10)], logits="none"), None).logits.shape == (0, 211)
    output = runner.forward(batch.step([(first, 15), (second, 20)], logits="last"), None)
    expected = torch.stack(
        [reference_logits(SMALL_LLAMA, weights, sequence.token_ids)[-1] for sequence in (first, second)]
    )
    torch.testing.assert_close(output.logits.double(), expected, atol=LOGIT_TOLERANCE, rtol=0)
    assert output.hidden.shape == (2, SMALL_LLAMA.hidden_size)
    head = weights.tensor("model.embed_tokens.weight")
    torch.testing.assert_close(output.hidden @ head.T, output.logits, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_the_last_layer_leaves_out_change_no_bit(isa: str, dtype: str, name: str) -> None:
    """Whatever rows want logits: these, their taps, the hidden states and every key and value stay as they were."""
    config = MODELS[name]
    weights = RandomWeights(config)
    lengths = (70, 1, 33, 20)
    everything = list(range(sum(lengths)))

    def run(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        memory = poisoned_memory(config, dtype=dtype, block_tokens=BLOCK, num_blocks=16)
        runner = NativeRunner(config, weights, memory, dtype=dtype, isa=isa)
        batch = Batch(16, BLOCK)
        step = batch.step([(batch.add(tokens(length, config)), length) for length in lengths])
        step = replace(step, logit_rows=np.array(rows, np.int32), tap_layers=(0, 1))
        output = runner.forward(step, None)
        assert output.taps is not None
        found = (
            output.logits.clone(),
            output.hidden.clone(),
            output.taps.clone(),
            memory.tensor.view(torch.int16).clone(),
        )
        runner.close()
        return found

    whole = run(everything)
    for rows in ([], [69], [69, 70, 103, 123], [0, 1, 2, 40, 41, 68, 70, 71, 72, 100, 104], everything[1:]):
        found = run(rows)
        for part, expected in zip(found[:3], whole[:3], strict=True):
            assert torch.equal(part, expected[rows])
        assert torch.equal(found[3], whole[3])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_most_likely_tokens_come_with_the_logits(isa: str, num_threads: int) -> None:
    """Of equal logits the first one's; none where a logit is no number or the largest is not finite."""
    config = replace(SMALL_LLAMA, vocab_size=2_500, tie_embeddings=False)  # several parts of the vocabulary a thread
    weights = RandomWeights(config)
    head = weights.tensor("lm_head.weight")
    head[2_000:2_400] = head[:400]  # equal logits
    runner = small_runner(config, weights, isa=isa, num_threads=num_threads)
    batch = Batch(64, BLOCK)
    step = batch.step([(batch.add(tokens(length, config)), length) for length in (70, 1, 33)])
    output = runner.forward(step, None)
    assert output.most_likely is not None
    assert output.most_likely.tolist() == output.logits.numpy().argmax(-1).tolist()
    for broken in (float("nan"), float("inf")):
        inputs = np.random.default_rng(0).normal(size=(step.num_tokens, config.hidden_size)).astype(np.float32)
        inputs[-1] = broken
        output = runner.forward(replace(step, inputs=inputs), None)
        logits = output.logits.numpy()
        assert output.most_likely is not None
        assert output.most_likely.tolist() == np.where(np.isfinite(logits.max(-1)), logits.argmax(-1), -1).tolist()
        assert output.most_likely[0] >= 0
        assert output.most_likely[-1] == -1
    runner.close()


@pytest.mark.parametrize("only_most_likely", [False, True])
@pytest.mark.parametrize("token", [3, 1_700, 2_499])
def test_one_logit_that_is_no_number_leaves_no_most_likely_token(isa: str, token: int, only_most_likely: bool) -> None:
    config = replace(SMALL_LLAMA, vocab_size=2_500, tie_embeddings=False)
    weights = RandomWeights(config)
    weights.tensor("lm_head.weight")[token] = float("nan")
    runner = small_runner(config, weights, isa=isa)
    batch = Batch(64, BLOCK)
    step = batch.step([(batch.add(tokens(5, config)), 5)])
    output = runner.forward(replace(step, only_most_likely=only_most_likely), None)
    assert output.most_likely is not None
    assert output.most_likely.tolist() == [-1] * 5
    runner.close()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_where_only_the_most_likely_tokens_are_wanted_no_logit_is_written(isa: str, num_threads: int) -> None:
    config = replace(SMALL_LLAMA, vocab_size=2_500)
    runner = small_runner(config, RandomWeights(config), isa=isa, num_threads=num_threads)
    batch = Batch(64, BLOCK)
    step = batch.step([(batch.add(tokens(length, config)), length) for length in (70, 1, 33)])
    output = runner.forward(step, None)
    expected = output.logits.numpy().argmax(-1).tolist()
    output.logits.fill_(-7.0)
    found = runner.forward(replace(step, only_most_likely=True), None)
    assert found.most_likely is not None
    assert found.most_likely.tolist() == expected
    assert (output.logits == -7.0).all()
    runner.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_what_broke_in_one_step_does_not_reach_the_next(isa: str, name: str, dtype: str) -> None:
    """Its numbers may still lie in the step's buffers, where other rows have their padding."""
    config = MODELS[name]
    runner = small_runner(config, RandomWeights(config), dtype=dtype, isa=isa)
    batch = Batch(64, BLOCK)
    steps = [batch.step([(batch.add(tokens(length, config)), length)]) for length in (90, 16, 33, 5)]
    expected = [runner.forward(step, None).logits.clone() for step in steps]
    for count in (90, 17, 40):
        broken = batch.step([(batch.add(tokens(count, config)), count)])
        broken = replace(broken, inputs=np.full((count, config.hidden_size), np.nan, np.float32))
        for step, logits in zip(steps, expected, strict=True):
            assert runner.forward(broken, None).logits.isnan().all()
            assert torch.equal(runner.forward(step, None).logits, logits)
    runner.close()


def test_a_step_that_is_asked_for_again_is_computed_again(isa: str) -> None:
    """Its arrays may hold something else by then, and steps between may have moved the buffers."""
    runner = small_runner(SMALL_LLAMA, RandomWeights(SMALL_LLAMA), isa=isa)
    batch = Batch(64, BLOCK)
    first = batch.step([(batch.add(tokens(20)), 20)], logits="last")
    expected = runner.forward(first, None).logits.clone()
    token_ids = first.token_ids.copy()
    first.token_ids[:] = token_ids[::-1]
    assert not torch.equal(runner.forward(first, None).logits, expected)
    first.token_ids[:] = token_ids
    larger = batch.step([(batch.add(tokens(30)), 30)], logits="all")
    runner.forward(larger, None)
    assert torch.equal(runner.forward(first, None).logits, expected)
    runner.close()


def test_one_layer_may_be_the_whole_model(isa: str) -> None:
    config = replace(SMALL_LLAMA, num_layers=1)
    weights = RandomWeights(config)
    runner = small_runner(config, weights, isa=isa)
    batch = Batch(64, BLOCK)
    prompt = tokens(50)
    logits = runner.forward(batch.step([(batch.add(prompt), 50)], logits="last"), None).logits
    expected = reference_logits(config, weights, prompt)[-1:]
    torch.testing.assert_close(logits.double(), expected, atol=LOGIT_TOLERANCE, rtol=0)


def test_empty_step_changes_nothing() -> None:
    runner = small_runner(SMALL_LLAMA, RandomWeights(SMALL_LLAMA))
    output = runner.forward(Batch(64, BLOCK).step([]), None)
    assert output.logits.shape == (0, 211)


def test_layer_callback_comes_once_a_layer_in_order_with_kv_in_place() -> None:
    weights = RandomWeights(SMALL_LLAMA)
    memory = poisoned_memory(SMALL_LLAMA, dtype="float32", block_tokens=BLOCK, num_blocks=8)
    runner = NativeRunner(SMALL_LLAMA, weights, memory, dtype="float32")
    batch = Batch(8, BLOCK)
    sequence = batch.add(tokens(BLOCK))
    seen: list[tuple[int, bool, bool]] = []

    def layer_done(layer: int) -> None:
        block = memory.tensor[sequence.blocks[0]]
        seen.append((layer, bool(block[layer].isfinite().all()), bool(block[layer + 1 :].isnan().all())))

    runner.forward(batch.step([(sequence, BLOCK)]), layer_done)
    assert seen == [(0, True, True), (1, True, True)]


def test_exception_of_the_callback_reaches_the_caller() -> None:
    runner = small_runner(SMALL_LLAMA, RandomWeights(SMALL_LLAMA))
    batch = Batch(64, BLOCK)
    sequence = batch.add(tokens(10))

    def layer_done(layer: int) -> None:
        raise ValueError(f"layer {layer}")

    with pytest.raises(ValueError, match="layer 0"):
        runner.forward(batch.step([(sequence, 5)]), layer_done)
    assert runner.forward(batch.step([(sequence, 5)]), None).logits.isfinite().all()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", 211, "vocabulary"),
        ("token_ids", -1, "vocabulary"),
        ("positions", -1, "position"),
        ("slots", 64 * BLOCK, "slot"),
        ("block_tables", 64, "block id"),
        ("context_lens", 3, "context"),
        ("context_lens", BLOCK + 1, "block table"),
        ("logit_rows", 4, "logit row"),
        ("query_starts", 1, "query_starts"),
    ],
)
def test_arrays_that_point_outside_are_refused(field: str, value: int, message: str) -> None:
    memory = poisoned_memory(SMALL_LLAMA, dtype="float32", block_tokens=BLOCK, num_blocks=64)
    runner = NativeRunner(SMALL_LLAMA, RandomWeights(SMALL_LLAMA), memory, dtype="float32")
    batch = Batch(64, BLOCK)
    step = batch.step([(batch.add(tokens(4)), 4)])
    getattr(step, field).flat[0] = value
    with pytest.raises(EngineFailure, match=message):
        runner.forward(step, None)
    assert memory.tensor.isnan().all()


def test_arrays_of_the_wrong_type_are_refused() -> None:
    runner = small_runner(SMALL_LLAMA, RandomWeights(SMALL_LLAMA))
    batch = Batch(64, BLOCK)
    step = batch.step([(batch.add(tokens(4)), 4)])
    with pytest.raises(TypeError, match="int32"):
        runner.forward(replace(step, token_ids=step.token_ids.astype(np.int64)), None)


@pytest.mark.parametrize(
    ("config", "dtype", "message"),
    [
        (replace(SMALL_LLAMA, head_dim=24), "float32", "head size 24"),
        (replace(SMALL_LLAMA, num_heads=5), "float32", "multiple"),
        (SMALL_LLAMA, "float16", "float16"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_at_start(config: ModelConfig, dtype: str, message: str) -> None:
    memory = KvMemory(layout_of(config, "float32", BLOCK), 2)
    with pytest.raises(StartupError, match=message):
        NativeRunner(config, RandomWeights(config), memory, dtype=dtype)


def test_pool_of_another_model_is_refused() -> None:
    memory = KvMemory(layout_of(replace(SMALL_LLAMA, num_layers=3), "float32", BLOCK), 2)
    with pytest.raises(StartupError, match="does not fit"):
        NativeRunner(SMALL_LLAMA, RandomWeights(SMALL_LLAMA), memory, dtype="float32")


def test_unknown_instruction_set_is_refused() -> None:
    memory = KvMemory(layout_of(SMALL_LLAMA, "float32", BLOCK), 2)
    with pytest.raises(StartupError, match="sse9"):
        NativeRunner(SMALL_LLAMA, RandomWeights(SMALL_LLAMA), memory, dtype="float32", isa="sse9")


def test_status_names_what_runs(isa: str) -> None:
    runner = small_runner(SMALL_LLAMA, RandomWeights(SMALL_LLAMA), isa=isa, dtype="bfloat16")
    status = runner.status()
    assert status["isa"] == isa
    assert status["num_threads"] == 1
    kept = "BF16_COMPRESSED" if isa in compressing_isas() else "BF16"
    assert status["weight_formats"] == {kept: 1 + 4 * SMALL_LLAMA.num_layers}
    details = runner.kernel_details()
    assert (details["isa"], details["weights"]) == (isa, kept)
    assert details["weight_bytes"] == str(status["packed_bytes"])
    assert isinstance(status["packed_bytes"], int)
    assert status["packed_bytes"] > 0


def test_close_twice_is_harmless() -> None:
    runner = small_runner(SMALL_LLAMA, RandomWeights(SMALL_LLAMA))
    runner.close()
    runner.close()
