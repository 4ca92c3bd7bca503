"""Kernels that multiply bfloat16 weights in half precision: sums nearer to the exact ones than with activations rounded
to bfloat16, the same bits in every kernel, and float32 wherever half precision would lose something."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.kernels.native import NativeMatrix
from engine.native_library import NumberFormat
from tests.engine.native_model import MODELS, SMALL_LLAMA, Batch, RandomWeights, built_isas, small_runner

Floats = npt.NDArray[np.float32]

HALF = [isa for isa in built_isas() if isa == "avx512_fp16"]
IN_FLOATS = "avx512_bf16_fma"
# Of one row, of few (odd and even blocks), of two passes, and of panels that become float16 in memory.
ROW_COUNTS = (1, 2, 5, 16, 17, 32, 33, 41, 70)
KEPT = (NumberFormat.BF16, NumberFormat.BF16_COMPRESSED)

pytestmark = pytest.mark.parametrize("isa", HALF)


def bfloat16(values: npt.ArrayLike) -> Floats:
    rounded: Floats = torch.from_numpy(np.asarray(values, np.float32)).bfloat16().float().numpy()
    return rounded


def trained(outputs: int, inputs: int, seed: int = 0) -> Floats:
    return bfloat16(0.05 * np.random.default_rng(seed).standard_normal((outputs, inputs)))


def activations(kind: str, rows: int, inputs: int) -> Floats:
    x = np.random.default_rng(rows).standard_normal((rows, inputs)).astype(np.float32)
    if kind == "massive":
        x[:, 7] *= 300
    elif kind == "gated":
        x = x**3 * (x > 0)
    return x


def matrix(weights: Floats, isa: str, kept: NumberFormat = NumberFormat.BF16) -> NativeMatrix:
    return NativeMatrix(weights, weights.shape[1], NumberFormat.F32, kept, isa=isa)


def assert_made_in_floats(weights: Floats, isa: str) -> None:
    x = activations("plain", 70, weights.shape[1])
    for kept in KEPT:
        half, floats = matrix(weights, isa, kept), matrix(weights, IN_FLOATS, kept)
        for rows in ROW_COUNTS:
            np.testing.assert_array_equal(half.multiply(x[:rows]), floats.multiply(x[:rows]))


@pytest.mark.parametrize("kind", ["plain", "massive", "gated"])
@pytest.mark.parametrize("inputs", [576, 1536])
def test_sums_are_nearer_than_with_activations_rounded_to_bfloat16(isa: str, kind: str, inputs: int) -> None:
    weights, x = trained(160, inputs), activations(kind, 64, inputs)
    exact = x.astype(np.float64) @ weights.astype(np.float64).T
    rounded = bfloat16(x).astype(np.float64) @ weights.astype(np.float64).T

    def error(out: npt.NDArray[np.floating]) -> float:
        return float(np.sqrt(((out - exact) ** 2).mean()))

    assert error(matrix(weights, isa).multiply(x)) < error(rounded)


@pytest.mark.parametrize("inputs", [7, 96, 576, 600, 1536])
def test_every_kernel_gives_a_row_the_same_bits(isa: str, inputs: int) -> None:
    weights, x = trained(41, inputs), activations("plain", 70, inputs)
    plain, compressed = (matrix(weights, isa, kept) for kept in KEPT)
    alone = np.concatenate([plain.multiply(x[row : row + 1]) for row in range(70)])
    for rows in range(1, 71):
        np.testing.assert_array_equal(plain.multiply(x[:rows]), alone[:rows])
        np.testing.assert_array_equal(compressed.multiply(x[:rows]), alone[:rows])


@pytest.mark.parametrize("kept", KEPT)
def test_powers_of_two_change_no_other_bit(isa: str, kept: NumberFormat) -> None:
    """Of rows and of panels, as far as floats go: both are brought to the middle of what a float16 holds."""
    weights, x = trained(40, 576), activations("plain", 37, 576)
    expected = matrix(weights, isa, kept).multiply(x)
    for of_weights, of_rows in ((0, -60), (0, 60), (-60, 0), (60, 0), (-60, -40), (50, 50), (-90, 90)):
        scaled = matrix(np.ldexp(weights, of_weights), isa, kept).multiply(np.ldexp(x, of_rows))
        np.testing.assert_array_equal(scaled, np.ldexp(expected, of_weights + of_rows))


def test_the_largest_sums_do_not_overflow(isa: str) -> None:
    """Equal products, whose roundings add up: no further off than one bfloat16 may be from what it stands for."""
    weights = np.full((32, 576), 1.9921875, np.float32)
    x = np.full((40, 576), 0.99999, np.float32)
    for rows in (1, 16, 40):
        out = matrix(weights, isa).multiply(x[:rows])
        np.testing.assert_allclose(out, 576 * 1.9921875 * 0.99999, rtol=2**-8)


def test_rows_of_infinities_and_nans_are_those_of_floats(isa: str) -> None:
    weights, x = trained(40, 576), activations("plain", 37, 576)
    x[0, 5], x[3, 100], x[4, 575] = np.inf, -np.inf, np.nan
    x[6, 0], x[6, 64], x[6, 200] = np.inf, np.inf, 3e38
    half, floats = (matrix(weights, name).multiply(x) for name in (isa, IN_FLOATS))
    for row in (0, 3, 4, 6):
        np.testing.assert_array_equal(half[row], floats[row])
    others = [row for row in range(37) if row not in (0, 3, 4, 6)]
    assert np.isfinite(half[others]).all()
    alone = np.concatenate([matrix(weights, isa).multiply(x[row : row + 1]) for row in range(37)])
    np.testing.assert_array_equal(half, alone)


def test_outputs_far_below_their_panels_make_a_matrix_of_floats(isa: str) -> None:
    weights = trained(40, 576)
    weights[17] = bfloat16(weights[17] * np.float32(1e-20))
    assert_made_in_floats(weights, isa)


@pytest.mark.parametrize("odd", [np.inf, np.nan])
def test_weights_that_are_no_numbers_make_a_matrix_of_floats(isa: str, odd: float) -> None:
    weights = trained(40, 576)
    weights[21, 300] = odd
    assert_made_in_floats(weights, isa)


def test_frequent_weights_that_vanish_are_the_same_in_12_bits(isa: str) -> None:
    """So small beside the panel's others that their float16 is zero, so many that the table of high bytes has them."""
    weights = trained(40, 576)
    random = np.random.default_rng(3)
    weights[random.random(weights.shape) < 0.2] = np.float32(1.5 * 2.0**-64)
    x = activations("plain", 70, 576)
    plain, compressed = (matrix(weights, isa, kept) for kept in KEPT)
    in_floats = matrix(weights, IN_FLOATS).multiply(x)
    out = plain.multiply(x)
    assert not np.array_equal(out, in_floats)
    np.testing.assert_allclose(out, in_floats, atol=1e-2)
    alone = np.eye(576, dtype=np.float32)  # each weight by itself: a sum of many would hide what is left of a small one
    for rows in ROW_COUNTS:
        np.testing.assert_array_equal(compressed.multiply(x[:rows]), plain.multiply(x[:rows]))
        np.testing.assert_array_equal(compressed.multiply(alone[:rows]), plain.multiply(alone[:rows]))


def test_single_small_weights_fit(isa: str) -> None:
    weights = trained(40, 576)
    weights[5, ::9] = bfloat16(1e-12)
    weights[7, 3] = 0.0
    out, in_floats = (matrix(weights, name).multiply(activations("plain", 9, 576)) for name in (isa, IN_FLOATS))
    assert not np.array_equal(out, in_floats)
    np.testing.assert_allclose(out, in_floats, atol=1e-2)


def test_status_counts_matrices_that_half_precision_does_not_fit(isa: str) -> None:
    weights = RandomWeights(SMALL_LLAMA)

    def beyond() -> tuple[object, str | None]:
        runner = small_runner(SMALL_LLAMA, weights, dtype="bfloat16", isa=isa)
        return runner.status()["matrices_beyond_half"], runner.kernel_details().get("matrices_beyond_half")

    assert beyond() == (0, None)
    weights.tensors["model.layers.1.mlp.up_proj.weight"][17] *= 1e-20
    assert beyond() == (1, "1")


@pytest.mark.parametrize("name", ["llama", "qwen2-bias"])
def test_models_whose_matrices_do_not_fit_give_the_logits_of_floats(isa: str, name: str) -> None:
    """Every matrix of layers, and the output head, tied to the embedding or not. Attention is in float32 here."""
    config = MODELS[name]
    weights = RandomWeights(config)
    for tensor in weights.tensors.values():
        if tensor.ndim == 2:
            tensor[17] *= 1e-20

    def logits(of_isa: str) -> torch.Tensor:
        runner = small_runner(config, weights, dtype="bfloat16", kv_dtype="float32", isa=of_isa)
        batch = Batch(64, 16)
        sequence = batch.add([(7 * i) % config.vocab_size for i in range(60)])
        steps = [runner.forward(batch.step([(sequence, count)]), None).logits.clone() for count in (50, 1)]
        return torch.cat(steps)

    assert torch.equal(logits(isa), logits(IN_FLOATS))
