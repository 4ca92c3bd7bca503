"""Matrix products of a drafter: native and in 8 bits where the library is, torch elsewhere.

A drafter's rounding costs acceptance at most, never a token, and its time is the reading of its weights: a quarter of
float32's bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from engine import native_library
from engine.kernels.linear import make_linear

FloatArray = npt.NDArray[np.float32]
Product = Callable[[FloatArray], FloatArray]
BLOCK_INPUTS = 32


def make_product(weight: torch.Tensor) -> Product:
    """`x [rows, inputs] -> x W^T [rows, outputs]` of `weight` [outputs, inputs]."""
    if native_library.is_available():
        # Not at the top: where the library was not built, this file must still import.
        from engine.kernels.native import NativeMatrix

        formats = native_library.NumberFormat
        kept = formats.Q8_0 if fits_blocks(weight.shape[1]) else formats.BF16
        return NativeMatrix(weight.float().numpy(), weight.shape[1], formats.F32, kept).multiply
    linear = make_linear(weight.float())

    def multiply(x: FloatArray) -> FloatArray:
        with torch.inference_mode():
            product: FloatArray = linear(torch.from_numpy(x)).numpy()
        return product

    return multiply


def fits_blocks(num_inputs: int) -> bool:
    """Whether a matrix with so many inputs can be kept in 8 or 4 bits: they share a scale by 32."""
    return num_inputs % BLOCK_INPUTS == 0


def unit_rms(x: FloatArray, eps: float) -> FloatArray:
    """Each row over its root mean square."""
    squares = np.einsum("...i,...i->...", x, x)
    scaled: FloatArray = x / np.sqrt(squares / np.float32(x.shape[-1]) + np.float32(eps))[..., None]
    return scaled
