"""A whole sweep in virtual time on two pools whose speed is known, and what an interruption costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.machine import describe_machine
from benchmarks.request_record import read_records
from benchmarks.scripted_server import Answer
from benchmarks.sweep import (
    COUPLED,
    DECODE_STEP,
    PREFILL_RATE,
    PREFILL_TIME,
    Progress,
    Sweep,
    predicted_capacities,
)
from benchmarks.sweep_measurements import MeasurementFailed, Target, measure_prefill
from benchmarks.sweep_settings import QUICK, SweepSettings
from benchmarks.sweep_store import SweepDirectoryError, SweepStore, read_manifest, read_points
from tests.benchmarks.scripted_sender import ScriptedSender
from tests.benchmarks.two_pool_sender import TwoPoolSender
from tests.benchmarks.virtual_loop import run_virtually

PREFILL_TOKEN_S, STEP_S, STEP_SEQUENCE_S = 0.0008, 0.010, 0.002
SETTINGS = replace(SweepSettings(**QUICK), run_s=25.0, ttft_ms=1500.0, tpot_ms=60.0)


def _store(directory: Path, settings: SweepSettings = SETTINGS) -> SweepStore:
    return SweepStore(directory, settings, describe_machine(), "made-up")


def _sender() -> TwoPoolSender:
    return TwoPoolSender(PREFILL_TOKEN_S, STEP_S, STEP_SEQUENCE_S)


async def _sweep(store: SweepStore, sender: TwoPoolSender, progress: Progress) -> tuple[float, float, float]:
    sweep = Sweep(SETTINGS, store, progress)
    sweep.plan_time(has_control=False, has_speculation=False)
    target = Target(sender, "1P1D", content_seed=5)
    timings = await sweep.measure_timings(target, kv_tokens=100_000, max_batch=64)
    x_p, x_d = predicted_capacities(SETTINGS, timings.model)
    measured_x_p = await sweep.search_prefill(target, x_p)
    capacity = await sweep.search_coupled(target, min(measured_x_p, x_d))
    return x_p, measured_x_p, capacity


def test_a_sweep_finds_the_pools_that_it_measures_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    reports: list[tuple[str, float, float]] = []
    sender = _sender()
    store = _store(tmp_path)
    x_p, measured_x_p, capacity = run_virtually(
        _sweep(store, sender, Progress(lambda what, done, total: reports.append((what, done, total))))
    )
    # 256 tokens of 0.8 ms: at most 4.9 requests a second.
    busiest = 1 / (256 * PREFILL_TOKEN_S)
    assert measured_x_p < busiest
    assert measured_x_p == pytest.approx(x_p, rel=0.15)
    assert capacity == pytest.approx(measured_x_p, rel=0.25)
    for stage in (PREFILL_TIME, DECODE_STEP, PREFILL_RATE, COUPLED):
        assert store.points(stage)
    # No run found the prompts of another one in the cache.
    assert not any("cache_warm" in point.summary["flags"] for point in read_points(tmp_path))
    assert reports[-1][1] <= reports[-1][2]

    model = Sweep(SETTINGS, store, Progress(lambda *_: None)).timings("1P1D", 100_000, 64).model
    assert model.c1_ms == pytest.approx(PREFILL_TOKEN_S * 1e3, rel=0.05)
    assert model.tpot_ms(8, 500) == pytest.approx((STEP_S + 8 * STEP_SEQUENCE_S) * 1e3, rel=0.1)

    # Every point has its raw records; a second sweep over the same directory sends nothing.
    point = store.points(COUPLED)[0]
    _, records = read_records(tmp_path / "records" / f"{point.key}.jsonl")
    assert len(records) >= point.summary["num_offered"]
    again = _sender()
    resumed = run_virtually(_sweep(_store(tmp_path), again, Progress(lambda *_: None)))
    assert resumed == (x_p, measured_x_p, capacity)
    assert again.num_sent == 0


def test_a_directory_with_another_sweep_is_refused(tmp_path: Path) -> None:
    _store(tmp_path)
    assert read_manifest(tmp_path)["model"] == "made-up"
    assert read_points(tmp_path) == []
    with pytest.raises(SweepDirectoryError, match="other settings"):
        _store(tmp_path, replace(SETTINGS, seed=1))
    with pytest.raises(SweepDirectoryError, match="holds no sweep"):
        read_manifest(tmp_path / "nothing")


def test_a_refused_request_ends_the_measurement_with_the_servers_words() -> None:
    sender = ScriptedSender(lambda number, body, now_s: Answer(status=404, body='{"error": "model_not_found"}'))
    with pytest.raises(MeasurementFailed, match="model_not_found"):
        run_virtually(measure_prefill(Target(sender, "1P1D", content_seed=5), SETTINGS, 64, 0.0))


def test_two_deployments_see_the_same_arrivals() -> None:
    assert SETTINGS.seed_of("rate", 2.5, 0) == SETTINGS.seed_of("rate", 2.5, 0)
    assert SETTINGS.seed_of("rate", 2.5, 0) != SETTINGS.seed_of("rate", 2.5, 1)
