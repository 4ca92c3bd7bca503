"""Kernels that widen bfloat16 weights and multiply by float32 FMAs: the sums of plain AVX-512, in the same order."""

from __future__ import annotations

import numpy as np
import pytest

from engine.kernels.native import NativeMatrix
from engine.native_library import NumberFormat
from tests.engine.native_model import built_isas

WIDENING = [isa for isa in built_isas() if isa == "avx512_bf16_fma"]


@pytest.mark.parametrize("isa", WIDENING)
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 576), (48, 1536), (33, 7)])
def test_sums_are_those_of_plain_avx512_bit_for_bit(isa: str, outputs: int, inputs: int) -> None:
    """Of rows that stream a panel, of rows for which it is widened in memory, and of those left over by blocks."""
    random = np.random.default_rng(inputs)
    weights = random.standard_normal((outputs, inputs)).astype(np.float32)
    x = random.standard_normal((70, inputs)).astype(np.float32)
    widened, plain = (
        NativeMatrix(weights, inputs, NumberFormat.F32, NumberFormat.BF16, isa=name) for name in (isa, "avx512")
    )
    for rows in (1, 16, 33, 70):
        np.testing.assert_array_equal(widened.multiply(x[:rows]), plain.multiply(x[:rows]))
