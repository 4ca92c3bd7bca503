"""Norm, rotary and activation equal their plain formulas, at sizes that are no powers of two."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.triton.fused_layers import add_rms_norm, rotary, silu_multiply
from tests.engine.triton.paged_batch import DEVICE, TOLERANCE

EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x64 = x.double()
    return x64 / (x64.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 576), (7, 64), (3, 1536), (0, 576)])
def test_norm_with_residual(shape: tuple[int, int], dtype: torch.dtype) -> None:
    hidden, residual, weight = randn(*shape, dtype=dtype), 2 * randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    total = hidden + residual
    output = add_rms_norm(hidden, residual, weight, EPS)
    # The interpreter cuts off where a GPU rounds: one unit in the last place of bfloat16.
    torch.testing.assert_close(residual, total, atol=0, rtol=0 if dtype is torch.float32 else 2**-6)
    torch.testing.assert_close(output.double(), plain_norm(total, weight), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_norm_without_residual_leaves_its_input() -> None:
    hidden, weight = randn(5, 576), randn(576)
    before = hidden.clone()
    torch.testing.assert_close(add_rms_norm(hidden, None, weight, EPS).double(), plain_norm(before, weight))
    assert torch.equal(hidden, before)


def test_norm_of_a_zero_row_is_zero() -> None:
    assert torch.equal(add_rms_norm(torch.zeros((1, 576), device=DEVICE), None, randn(576), EPS), torch.zeros(1, 576))


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rotary_turns_each_pair_by_its_angle(head_dim: int) -> None:
    half = head_dim // 2
    positions = torch.tensor([0, 3, 41], dtype=torch.int32, device=DEVICE)
    frequencies = 10000.0 ** (-torch.arange(half, device=DEVICE) / half)
    angles = torch.arange(64, device=DEVICE)[:, None] * frequencies
    x = randn(3, 2, head_dim)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[positions.long()][:, None]
    rotary(x, positions, angles.cos().float().contiguous(), angles.sin().float().contiguous())
    torch.testing.assert_close(x.double(), torch.cat([turned.real, turned.imag], -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1536), (5, 100), (0, 64)])
def test_silu_multiply(shape: tuple[int, int]) -> None:
    gate_up = 4 * randn(shape[0], 2 * shape[1])
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(
        silu_multiply(gate_up).double(), torch.nn.functional.silu(gate) * up, atol=1e-5, rtol=1e-5
    )
