"""`benchmarks.kernels`: it measures what it says, on one small shape."""

from __future__ import annotations

import pytest

from benchmarks.kernels import in_turns, time_matrix, time_sampling
from benchmarks.native_floors import Floors
from engine.native.build import build
from engine.native_library import NumberFormat

FLOORS = Floors(1e9, {NumberFormat.F32: 1e9, NumberFormat.BF16: 2e9, NumberFormat.Q8_0: 4e9})


def test_calls_take_turns() -> None:
    seen: list[int] = []
    call = in_turns([lambda: seen.append(0), lambda: seen.append(1)])
    for _ in range(5):
        call()
    assert seen == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("kind", [NumberFormat.BF16, NumberFormat.Q4_1])
def test_matrix_timing_has_the_floor_of_its_bytes_or_its_products(kind: NumberFormat) -> None:
    build()
    one, many = time_matrix("attention output", kind, [1, 64], FLOORS, "", repeats=3)
    num_bytes = 576 * 576 * (2 if kind == NumberFormat.BF16 else 20 / 32)
    assert one.floor_us == pytest.approx(num_bytes / 1e9 * 1e6, rel=0.01)
    rate = 2e9 if kind == NumberFormat.BF16 else 4e9
    assert many.floor_us == pytest.approx(2 * 64 * 576 * 576 / rate * 1e6, rel=0.01)
    assert one.ours_us > 0
    assert one.times_faster == one.reference_us / one.ours_us


def test_sampling_timing_is_of_one_row() -> None:
    build()
    timing = time_sampling(3.0, "", repeats=3)
    assert timing.rows == 1
    assert timing.ours_us > 0
