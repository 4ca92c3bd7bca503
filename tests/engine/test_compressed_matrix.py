"""Matrices in 12 bits a weight hold every bfloat16 as it was, and multiply bit for bit like the plain ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cluster.errors import EngineFailure
from engine.kernels.native import NativeMatrix
from engine.model_config import ModelConfig
from engine.native_library import NumberFormat
from engine.native_weights import WeightCompression
from tests.engine.native_model import MODELS, Batch, RandomWeights, built_isas, compressing_isas, small_runner

Bits = npt.NDArray[np.uint16]

ALL_BITS = np.arange(2**16, dtype=np.uint16)
INFINITY_BITS = 0x7F80
# Rows in blocks of every size, around the counts where the blocks change and where weights are decoded into memory.
ROW_COUNTS = (*range(1, 18), 24, 32, 33, 48, 49, 63, 64, 65, 77, 130)
SHAPES = ((1, 8), (15, 32), (16, 96), (17, 576), (50, 160), (33, 7), (20, 77), (48, 1536))
COMPRESSING = compressing_isas()

on_compressing = pytest.mark.parametrize("isa", COMPRESSING)


def trained_bits(outputs: int, inputs: int, *, oddities: int = 0) -> Bits:
    """Weights as training leaves them, `oddities` of them replaced by any finite bit patterns."""
    random = np.random.default_rng(outputs * 1000 + inputs + oddities)
    floats = (0.05 * random.standard_normal((outputs, inputs))).astype(np.float32)
    bits = (floats.view(np.uint32) >> 16).astype(np.uint16)
    finite = ALL_BITS[(ALL_BITS & 0x7FFF) < INFINITY_BITS]
    bits.flat[random.permutation(bits.size)[:oddities]] = random.choice(finite, min(oddities, bits.size))
    return bits


def make_matrix(bits: Bits, kept: NumberFormat, isa: str) -> NativeMatrix:
    return NativeMatrix(bits.view(np.uint8), bits.shape[1], NumberFormat.BF16, kept, isa=isa)


def held_bits(matrix: NativeMatrix) -> Bits:
    rows = np.stack([matrix.row(output) for output in range(matrix.num_outputs)])
    assert not (rows.view(np.uint32) & 0xFFFF).any()
    return (rows.view(np.uint32) >> 16).astype(np.uint16)


@on_compressing
@pytest.mark.parametrize("order", ["ascending", "shuffled"])
def test_every_bit_pattern_comes_back(isa: str, order: str) -> None:
    """Subnormals, both zeros, infinities and every NaN: panels of few high bytes, and panels that must stay plain."""
    bits = ALL_BITS if order == "ascending" else np.random.default_rng(0).permutation(ALL_BITS)
    matrix = make_matrix(bits.reshape(128, 512), NumberFormat.BF16_COMPRESSED, isa)
    np.testing.assert_array_equal(held_bits(matrix), bits.reshape(128, 512))


@on_compressing
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("oddities", [0, 1, 7, 10_000])
def test_weights_come_back_whatever_their_exceptions(isa: str, outputs: int, inputs: int, oddities: int) -> None:
    bits = trained_bits(outputs, inputs, oddities=oddities)
    np.testing.assert_array_equal(held_bits(make_matrix(bits, NumberFormat.BF16_COMPRESSED, isa)), bits)


@on_compressing
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("oddities", [0, 1, 7, 10_000])
def test_products_equal_the_plain_ones_bit_for_bit(isa: str, outputs: int, inputs: int, oddities: int) -> None:
    bits = trained_bits(outputs, inputs, oddities=oddities)
    plain = make_matrix(bits, NumberFormat.BF16, isa)
    compressed = make_matrix(bits, NumberFormat.BF16_COMPRESSED, isa)
    x = np.random.default_rng(inputs).standard_normal((max(ROW_COUNTS), inputs)).astype(np.float32)
    for rows in ROW_COUNTS:
        np.testing.assert_array_equal(compressed.multiply(x[:rows]), plain.multiply(x[:rows]))


@on_compressing
def test_exceptions_in_each_place_of_a_group_are_multiplied_in_their_place(isa: str) -> None:
    """One large weight among ordinary ones, in turn at every input of a group and every output of a panel."""
    for place in range(8 * 16):
        bits = trained_bits(16, 128)
        bits[place % 16, 64 + place // 16] = 0x7E55
        compressed = make_matrix(bits, NumberFormat.BF16_COMPRESSED, isa)
        plain = make_matrix(bits, NumberFormat.BF16, isa)
        for rows in (1, 5, 70):
            x = np.random.default_rng(place).standard_normal((rows, 128)).astype(np.float32)
            np.testing.assert_array_equal(compressed.multiply(x), plain.multiply(x))


@on_compressing
def test_trained_weights_take_three_quarters_of_the_bytes(isa: str) -> None:
    bits = trained_bits(512, 576)
    share = (
        make_matrix(bits, NumberFormat.BF16_COMPRESSED, isa).packed_bytes
        / make_matrix(bits, NumberFormat.BF16, isa).packed_bytes
    )
    assert 0.75 < share < 0.76


@on_compressing
def test_floats_are_rounded_as_for_plain_weights(isa: str) -> None:
    weights = np.random.default_rng(1).standard_normal((40, 64)).astype(np.float32)
    kept = [
        NativeMatrix(weights, 64, NumberFormat.F32, kind, isa=isa)
        for kind in (NumberFormat.BF16, NumberFormat.BF16_COMPRESSED)
    ]
    np.testing.assert_array_equal(held_bits(kept[0]), held_bits(kept[1]))


@on_compressing
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_models_give_the_same_logits_and_less_memory(isa: str, config: ModelConfig) -> None:
    """A prompt of more rows than are streamed, decode steps of one row and of three; tied and separate heads."""
    weights = RandomWeights(config)
    weights.tensors["model.layers.1.mlp.up_proj.weight"][17] *= 1e-20  # a row of exceptions

    def run(compression: WeightCompression) -> tuple[torch.Tensor, int]:
        runner = small_runner(config, weights, dtype="bfloat16", isa=isa, compression=compression)
        batch = Batch(64, 16)
        sequences = [batch.add([(7 * i + j) % config.vocab_size for i in range(90)]) for j in range(3)]
        steps = [[(sequences[0], 80), (sequences[1], 9)], [(sequences[0], 1)], [(each, 1) for each in sequences]]
        logits = [runner.forward(batch.step(step), None).logits.clone() for step in steps]
        return torch.cat(logits), int(runner.kernel_details()["weight_bytes"])

    (compressed, fewer_bytes), (plain, num_bytes) = run("auto"), run("off")
    assert torch.equal(compressed, plain)
    assert fewer_bytes < 0.95 * num_bytes


@pytest.mark.parametrize("isa", [isa for isa in built_isas() if isa not in COMPRESSING])
def test_other_instruction_sets_refuse_the_format(isa: str) -> None:
    with pytest.raises(EngineFailure, match=f"{isa} has no kernel"):
        NativeMatrix(np.ones((16, 32), np.float32), 32, NumberFormat.F32, NumberFormat.BF16_COMPRESSED, isa=isa)
