"""Products with quantised weights equal the product with the weights taken apart again."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.triton.quantized_matmul import matmul_w4a16, matmul_w8a8, quantize_rows
from tests.engine.triton.paged_batch import DEVICE, TOLERANCE


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def pack(nibbles: torch.Tensor) -> torch.Tensor:
    """`[n, k]` values 0..15 to `[n, k / 8]` int32, the lowest bits first."""
    shifts = torch.arange(8, device=DEVICE) * 4
    words = (nibbles.long().reshape(nibbles.shape[0], -1, 8) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("m", "n", "k", "group_size"), [(1, 64, 64, 32), (3, 70, 576, 64), (17, 192, 576, 96), (1, 8, 16, 8), (0, 8, 16, 8)]
)
def test_w4a16_equals_the_product_with_dequantised_weights(
    m: int, n: int, k: int, group_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(m + n + k)
    nibbles = torch.randint(0, 16, (n, k), generator=generator).to(DEVICE)
    # Zero points at both ends of their range: 0 and 15 must not wrap.
    zeros = torch.randint(0, 16, (n, k // group_size), generator=generator).to(DEVICE, torch.float32)
    zeros[0], zeros[-1] = 0, 15
    scales = randn(n, k // group_size).abs() * 0.1
    x = randn(m, k).to(dtype)
    weight = (nibbles - zeros.repeat_interleave(group_size, 1)) * scales.repeat_interleave(group_size, 1)
    expected = x.double() @ weight.to(dtype).double().T
    actual = matmul_w4a16(x, pack(nibbles), scales, zeros, group_size).double()
    torch.testing.assert_close(actual, expected, atol=20 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_w4a16_refuses_a_group_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match="must divide 576"):
        matmul_w4a16(randn(1, 576), pack(torch.zeros(8, 576)), randn(8, 4), randn(8, 4), 128)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 64), (5, 70, 576), (33, 100, 96)])
def test_w8a8_equals_the_product_of_the_rounded_operands(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = randn(m, k), randn(n, k)
    x_quantised, x_scales = quantize_rows(x, dtype)
    w_quantised, w_scales = quantize_rows(weight, dtype)
    rounded_x = x_quantised.double() * x_scales[:, None]
    rounded_w = w_quantised.double() * w_scales[:, None]
    actual = matmul_w8a8(x_quantised, x_scales, w_quantised, w_scales, torch.float32).double()
    torch.testing.assert_close(actual, rounded_x @ rounded_w.T, atol=1e-4, rtol=1e-4)
    # And the rounding itself is small: the quantised product is near the exact one.
    exact = x.double() @ weight.double().T
    assert (actual - exact).norm() / exact.norm() < (0.02 if dtype is torch.int8 else 0.06)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_q9_a_zero_row_stays_zero_and_is_no_nan(dtype: torch.dtype) -> None:
    x = torch.zeros((2, 64), device=DEVICE)
    x[1] = 3.0
    quantised, scales = quantize_rows(x, dtype)
    weight, weight_scales = quantize_rows(randn(16, 64), dtype)
    product = matmul_w8a8(quantised, scales, weight, weight_scales, torch.float32)
    assert torch.equal(product[0], torch.zeros(16, device=DEVICE))
    assert torch.isfinite(product).all()


def test_w8a8_refuses_mixed_operands() -> None:
    with pytest.raises(ValueError, match="both operands"):
        matmul_w8a8(torch.zeros((1, 64), dtype=torch.int8), randn(1), randn(8, 64), randn(8), torch.float32)
