"""`engine.kernels.reference`: each operation against its formula, and what it writes in place."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.linear import can_pack, make_linear
from engine.kernels.reference import add_rms_norm, kv_write, rotary, silu_multiply

DTYPES = [torch.float32, torch.bfloat16]


def close(own: torch.Tensor, exact: torch.Tensor) -> bool:
    tolerance = 1e-2 if own.dtype == torch.bfloat16 else 1e-5
    return torch.allclose(own.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_leaves_the_sum_in_the_residual(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, residual, weight = (torch.randn(*size).to(dtype) for size in ((5, 48), (5, 48), (48,)))
    total = residual + hidden
    own = add_rms_norm(hidden, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    exact = total.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert own.dtype == dtype
    assert close(own, exact)
    before = hidden.clone()
    add_rms_norm(hidden, None, weight, 1e-5)
    assert torch.equal(hidden, before)


def test_q9_norm_of_an_all_zero_row_is_zero() -> None:
    assert not add_rms_norm(torch.zeros(2, 8), None, torch.ones(8), 1e-6).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_turns_halves_in_place_by_position(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    angles = torch.rand(10, 4) * 6
    positions = torch.tensor([0, 9, 3], dtype=torch.int32)
    x = torch.randn(3, 5, 8).to(dtype)
    whole = x.clone()
    part = x[:, 1:4]  # strided: heads of a fused product
    exact = part.double()
    cos, sin = angles[positions.long()].double().cos()[:, None], angles[positions.long()].double().sin()[:, None]
    expected = torch.cat([exact[..., :4] * cos - exact[..., 4:] * sin, exact[..., 4:] * cos + exact[..., :4] * sin], -1)
    rotary(part, positions, angles.cos(), angles.sin())
    assert close(x[:, 1:4], expected)
    assert torch.equal(x[:, 0], whole[:, 0])
    assert torch.equal(x[:, 4], whole[:, 4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_multiply_takes_the_gate_first(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    gate_up = torch.randn(3, 10).to(dtype)
    gate, up = gate_up[:, :5].double(), gate_up[:, 5:].double()
    assert close(silu_multiply(gate_up), gate * gate.sigmoid() * up)


def test_kv_write_touches_its_slots_of_its_layer_only() -> None:
    pool = torch.zeros(4, 3, 2, 2, 4, 8)
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = torch.tensor([13, 2, 4])
    kv_write(key, value, pool, 1, slots)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(pool[slot // 4, 1, 0, :, slot % 4], key[token])
        assert torch.equal(pool[slot // 4, 1, 1, :, slot % 4], value[token])
        pool[slot // 4, 1, :, :, slot % 4] = 0
    assert not pool.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_linear_multiplies_packed_or_not(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, weight, bias = (torch.randn(*size).to(dtype) for size in ((rows, 48), (80, 48), (80,)))
    exact = x.double() @ weight.double().T
    own = make_linear(weight)(x)
    assert own.dtype == dtype
    assert torch.allclose(own.double(), exact, atol=0.2 if dtype == torch.bfloat16 else 1e-4)
    assert torch.allclose(
        make_linear(weight, bias)(x).double(), exact + bias.double(), atol=0.2 if dtype == torch.bfloat16 else 1e-4
    )


def test_weights_of_other_types_are_not_packed() -> None:
    assert not can_pack(torch.zeros(4, 4, dtype=torch.float64))
    weight = torch.eye(4, dtype=torch.float64)
    assert torch.equal(make_linear(weight)(weight), weight)
