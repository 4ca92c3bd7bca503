"""`engine.kernels.triton.grouped_matmul` against `engine.kernels.experts`, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.experts import make_experts, route
from engine.kernels.triton.grouped_matmul import TILE_ROWS, make_grouped_experts, plan_tiles
from tests.engine.triton.paged_batch import DEVICE

HIDDEN, SIZE, NUM_EXPERTS = 72, 40, 5  # none a multiple of a tile


def experts_of(dtype: torch.dtype, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    gate_up = [torch.randn(2 * SIZE, HIDDEN, generator=generator) / HIDDEN**0.5 for _ in range(NUM_EXPERTS)]
    down = [torch.randn(HIDDEN, SIZE, generator=generator) / SIZE**0.5 for _ in range(NUM_EXPERTS)]
    return [weight.to(DEVICE, dtype) for weight in gate_up], [weight.to(DEVICE, dtype) for weight in down]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 40])
@pytest.mark.parametrize("routing", ["spread", "one expert", "the last two"])
def test_all_experts_in_one_launch_equal_one_after_the_other(dtype: torch.dtype, rows: int, routing: str) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, NUM_EXPERTS, generator=generator)
    if routing == "one expert":
        logits[:, 2] += 100
    elif routing == "the last two":
        logits[:, -2:] += 100
    expert_ids, weights = route(logits.to(DEVICE), 2, normalizes=True)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(DEVICE, dtype)
    gate_up, down = experts_of(dtype)
    expected = make_experts(gate_up, down)(hidden, expert_ids, weights)
    result = make_grouped_experts(gate_up, down)(hidden, expert_ids, weights)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    assert result.dtype == dtype


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(33, HIDDEN, generator=generator).to(DEVICE)
    expert_ids, weights = route(torch.randn(33, NUM_EXPERTS, generator=generator).to(DEVICE), 2, normalizes=False)
    compute = make_grouped_experts(*experts_of(torch.float32))
    together = compute(hidden, expert_ids, weights)
    for row in (0, 16, 32):
        one = slice(row, row + 1)
        assert torch.equal(compute(hidden[one], expert_ids[one], weights[one])[0], together[row])


def test_no_rows_give_no_rows() -> None:
    empty = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    hidden = torch.empty(0, HIDDEN, device=DEVICE)
    result = make_grouped_experts(*experts_of(torch.float32))(hidden, empty, torch.empty(0, 2, device=DEVICE))
    assert result.shape == (0, HIDDEN)


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
def test_every_slot_lies_in_one_tile_of_its_expert(rows: int) -> None:
    expert_ids = torch.randint(0, NUM_EXPERTS, (rows, 2), generator=torch.Generator().manual_seed(rows))
    tiles = plan_tiles(expert_ids, NUM_EXPERTS)
    slots = [slot for slot in tiles.slots.flatten().tolist() if slot >= 0]
    assert sorted(slots) == list(range(2 * rows))
    for tile, expert in zip(tiles.slots.tolist(), tiles.experts.tolist(), strict=True):
        members = [slot for slot in tile if slot >= 0]
        assert all(int(expert_ids.flatten()[slot]) == expert for slot in members)
        assert (expert == NUM_EXPERTS) == (not members)


def test_routing_weights_are_the_softmaxs_own_or_sum_to_one() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    shares = torch.softmax(logits, -1)
    expert_ids, weights = route(logits, 2, normalizes=False)
    assert expert_ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, shares[:, :2])
    _, normalized = route(logits, 2, normalizes=True)
    torch.testing.assert_close(normalized, shares[:, :2] / shares[:, :2].sum())
