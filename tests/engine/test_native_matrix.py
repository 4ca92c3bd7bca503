"""Native matrix products against NumPy, for every format, instruction set, odd shape and row count."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from cluster.errors import EngineFailure
from engine.kernels.native import NativeMatrix
from engine.native_library import NumberFormat
from tests.engine.native_model import built_isas, compressing_isas

GGUF_TYPES = {
    NumberFormat.Q4_0: gguf.GGMLQuantizationType.Q4_0,
    NumberFormat.Q4_1: gguf.GGMLQuantizationType.Q4_1,
    NumberFormat.Q8_0: gguf.GGMLQuantizationType.Q8_0,
}
ROW_COUNTS = (1, 2, 3, 5, 8, 12, 13, 16, 17, 24, 25, 32, 33, 48, 64, 65, 71)
IN_HALF = ("avx512_fp16",)  # instruction sets of products in half precision
SHAPES = ((1, 32), (15, 64), (16, 96), (17, 576), (50, 160))
pytestmark = pytest.mark.parametrize("isa", built_isas())


def random_array(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(1000 * shape[0] + shape[1]).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (33, 7), (20, 77)])
def test_float32_products_are_float32_exact(isa: str, outputs: int, inputs: int) -> None:
    weights = random_array(outputs, inputs)
    matrix = NativeMatrix(weights, inputs, NumberFormat.F32, NumberFormat.F32, isa=isa)
    for rows in ROW_COUNTS:
        x = random_array(rows, inputs)
        expected = x.astype(np.float64) @ weights.astype(np.float64).T
        np.testing.assert_allclose(matrix.multiply(x), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (33, 7), (20, 77)])
def test_half_precision_products_are_near_those_of_floats(isa: str, outputs: int, inputs: int) -> None:
    if isa not in IN_HALF:
        pytest.skip("activations are rounded to bfloat16")
    weights = random_array(outputs, inputs)
    matrix = NativeMatrix(weights, inputs, NumberFormat.F32, NumberFormat.BF16, isa=isa)
    rounded = torch.from_numpy(weights).bfloat16().double()
    for rows in ROW_COUNTS:
        x = random_array(rows, inputs)
        expected = (torch.from_numpy(x).double() @ rounded.T).numpy()
        random_walk = np.sqrt((torch.from_numpy(x).double() ** 2 @ (rounded**2).T).numpy())
        assert (np.abs(matrix.multiply(x) - expected) <= 6e-3 * random_walk + 2**-10 * np.abs(expected)).all()


@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (33, 7), (20, 77)])
def test_bfloat16_products_are_those_of_rounded_operands(isa: str, outputs: int, inputs: int) -> None:
    if isa in IN_HALF:
        pytest.skip("activations are rounded to float16")
    weights = random_array(outputs, inputs)
    matrix = NativeMatrix(weights, inputs, NumberFormat.F32, NumberFormat.BF16, isa=isa)
    rounded = torch.from_numpy(weights).bfloat16().double()
    for rows in ROW_COUNTS:
        x = random_array(rows, inputs)
        expected = (torch.from_numpy(x).bfloat16().double() @ rounded.T).numpy()
        np.testing.assert_allclose(matrix.multiply(x), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", [NumberFormat.F32, NumberFormat.BF16])
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 576), (48, 1536), (33, 600)])
def test_a_row_does_not_depend_on_the_rows_beside_it(isa: str, kind: NumberFormat, outputs: int, inputs: int) -> None:
    """Bit for bit, around the counts where blocks change; 360 rows of 1,536 inputs are more than a cache holds."""
    matrix = NativeMatrix(random_array(outputs, inputs), inputs, NumberFormat.F32, kind, isa=isa)
    x = random_array(360, inputs)
    alone = np.concatenate([matrix.multiply(x[row : row + 1]) for row in range(360)])
    for rows in (2, 13, 16, 17, 32, 33, 49, 64, 65, 300, 360):
        np.testing.assert_array_equal(matrix.multiply(x[:rows]), alone[:rows])


@pytest.mark.parametrize("kind", GGUF_TYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_blocks_of_a_file_keep_their_values(isa: str, kind: NumberFormat, outputs: int, inputs: int) -> None:
    """With activations that int8 holds exactly (whole numbers up to 127 in each block), nothing is rounded."""
    blocks = gguf.quants.quantize(random_array(outputs, inputs), GGUF_TYPES[kind])
    weights = gguf.quants.dequantize(blocks, GGUF_TYPES[kind]).astype(np.float64)
    matrix = NativeMatrix(blocks, inputs, kind, kind, isa=isa)
    for rows in ROW_COUNTS:
        x = np.random.default_rng(rows).integers(-126, 127, (rows, inputs)).astype(np.float32)
        x[:, ::32] = 127
        np.testing.assert_allclose(matrix.multiply(x), x.astype(np.float64) @ weights.T, rtol=1e-5, atol=2e-2)


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_activations_are_rounded_to_127_steps_of_each_32(isa: str, kind: NumberFormat) -> None:
    """The definition: each 32 activations become int8 by one scale, the rest is as exact as float32."""
    blocks = gguf.quants.quantize(random_array(33, 160), GGUF_TYPES[kind])
    weights = gguf.quants.dequantize(blocks, GGUF_TYPES[kind]).astype(np.float64)
    matrix = NativeMatrix(blocks, 160, kind, kind, isa=isa)
    for rows in ROW_COUNTS:
        groups = random_array(rows, 160).reshape(rows, 5, 32)
        highest = np.abs(groups).max(axis=2, keepdims=True)
        rounded = np.rint(groups * (np.float32(127) / highest)) * (highest / np.float32(127)).astype(np.float64)
        out = matrix.multiply(groups.reshape(rows, 160))
        np.testing.assert_allclose(out, rounded.reshape(rows, 160) @ weights.T, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_a_rows_products_do_not_depend_on_the_rows_beside_it(isa: str, kind: NumberFormat) -> None:
    blocks = gguf.quants.quantize(random_array(50, 160), GGUF_TYPES[kind])
    matrix = NativeMatrix(blocks, 160, kind, kind, isa=isa)
    x = random_array(71, 160)
    alone = np.concatenate([matrix.multiply(x[row : row + 1]) for row in range(71)])
    for rows in range(1, 72):
        np.testing.assert_array_equal(matrix.multiply(x[:rows]), alone[:rows])


@pytest.mark.parametrize("kind", [NumberFormat.Q4_1, NumberFormat.Q8_0])
def test_rounded_weights_are_near_the_floats(isa: str, kind: NumberFormat) -> None:
    weights, x = random_array(64, 576), random_array(9, 576)
    matrix = NativeMatrix(weights, 576, NumberFormat.F32, kind, isa=isa)
    exact = x @ weights.T
    error = np.abs(matrix.multiply(x) - exact).mean() / exact.std()
    assert error < (0.1 if kind == NumberFormat.Q4_1 else 0.015)


@pytest.mark.parametrize("kind", list(GGUF_TYPES))
def test_rows_of_zeros_give_zeros(isa: str, kind: NumberFormat) -> None:
    """Q9: an all-zero row has scale 0 and must not divide by it; its neighbours keep their values."""
    blocks = gguf.quants.quantize(random_array(20, 64), GGUF_TYPES[kind])
    x = random_array(3, 64)
    x[1] = 0
    out = NativeMatrix(blocks, 64, kind, kind, isa=isa).multiply(x)
    assert np.isfinite(out).all()
    assert not out[1].any()


def test_q9_zero_row_of_weights_gives_zeros_in_every_format(isa: str) -> None:
    weights = random_array(20, 576)
    weights[0] = 0
    x = random_array(4, 576)
    for kind in (NumberFormat.F32, NumberFormat.BF16, NumberFormat.Q4_1, NumberFormat.Q8_0):
        out = NativeMatrix(weights, 576, NumberFormat.F32, kind, isa=isa).multiply(x)
        assert np.isfinite(out).all()
        assert not out[:, 0].any()


@pytest.mark.parametrize("kept", [NumberFormat.F32, NumberFormat.BF16, NumberFormat.BF16_COMPRESSED])
@pytest.mark.parametrize("kind", list(GGUF_TYPES))
def test_blocks_of_a_file_become_the_floats_that_gguf_makes_of_them(
    isa: str, kind: NumberFormat, kept: NumberFormat
) -> None:
    """Bit for bit, with scales of every size that a float16 has, and rounded where bfloat16 is kept."""
    if kept == NumberFormat.BF16_COMPRESSED and isa not in compressing_isas():
        pytest.skip("keeps bfloat16 as it is")
    weights = random_array(50, 160) * np.float32(2.0) ** np.linspace(-22, 14, 50, dtype=np.float32)[:, None]
    blocks = gguf.quants.quantize(weights, GGUF_TYPES[kind])
    floats = gguf.quants.dequantize(blocks, GGUF_TYPES[kind])
    expected = torch.from_numpy(floats)
    if kept != NumberFormat.F32:
        expected = expected.bfloat16().float()
    matrix = NativeMatrix(blocks, 160, kind, kept, isa=isa)
    for output in range(50):
        np.testing.assert_array_equal(matrix.row(output), expected[output].numpy())


def test_formats_that_do_not_go_together_are_refused(isa: str) -> None:
    with pytest.raises(EngineFailure, match="cannot be kept"):
        NativeMatrix(random_array(4, 64), 64, NumberFormat.F32, NumberFormat.Q4_0, isa=isa)
    blocks = gguf.quants.quantize(random_array(4, 64), GGUF_TYPES[NumberFormat.Q4_1])
    with pytest.raises(EngineFailure, match="cannot be kept"):
        NativeMatrix(blocks, 64, NumberFormat.Q4_1, NumberFormat.Q8_0, isa=isa)
    with pytest.raises(EngineFailure, match="multiples of 32, not 48"):
        NativeMatrix(random_array(4, 48), 48, NumberFormat.F32, NumberFormat.Q8_0, isa=isa)
