"""`benchmarks.engine` and its floors: the arithmetic, and one small real measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine import (
    EngineUnderTest,
    measure_decode,
    measure_prefill,
    measure_python_share,
    num_parameters,
    parse_arguments,
)
from benchmarks.native_floors import Floors, measure_floors
from engine.native.build import build
from engine.native_library import NumberFormat

FLOORS = Floors(1e9, {NumberFormat.F32: 1e9, NumberFormat.BF16: 2e9, NumberFormat.Q8_0: 4e9})


def test_floor_is_the_larger_of_reading_and_computing() -> None:
    assert FLOORS.seconds(3e9, [(NumberFormat.BF16, 2e9)]) == 3.0
    assert FLOORS.seconds(3e9, [(NumberFormat.BF16, 8e9), (NumberFormat.F32, 1e9)]) == 5.0


def test_measured_floors_are_rates_of_a_processor() -> None:
    build()
    floors = measure_floors()
    assert 1e8 < floors.read_bytes_per_s < 1e12
    assert all(1e8 < rate < 1e14 for rate in floors.operations_per_s.values())


@pytest.mark.model
def test_measures_the_default_model(default_model_path: Path) -> None:
    build()
    engine = EngineUnderTest(parse_arguments(["--model", str(default_model_path)]), 300)
    assert num_parameters(engine.config) == pytest.approx(134.5e6, rel=0.001)
    decode = measure_decode(engine, FLOORS, batch=2, context=100, repeats=3)
    weight_bytes = 1.5 * num_parameters(engine.config)  # of bfloat16 at least, where it is compressed
    assert decode.floor_ms > 1e3 * weight_bytes / 1e9
    assert decode.fastest_ms <= decode.milliseconds <= decode.slowest_ms
    assert decode.tokens_per_s == pytest.approx(2e3 / decode.milliseconds)
    prefill = measure_prefill(engine, FLOORS, length=256, repeats=1)
    assert prefill.floor_ms > decode.floor_ms
    assert 0 <= measure_python_share(engine, repeats=5) < 1
    engine.runner.close()
