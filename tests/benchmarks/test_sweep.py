"""A whole sweep in virtual time on two pools whose speed is known, and what an interruption costs."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.knee import capacity_at_slo
from benchmarks.machine import describe_machine
from benchmarks.openai_client import StreamCapture
from benchmarks.request_record import read_records
from benchmarks.same_arrivals import simulated_capacity, simulated_point
from benchmarks.scripted_server import Answer
from benchmarks.sweep import (
    COUPLED,
    DECODE_STEP,
    DRIFT,
    INTERFERENCE,
    PREFILL_RATE,
    PREFILL_TIME,
    Progress,
    Sweep,
    decoding_batch,
    drift_share,
    grid_lengths,
    mean_slow_down,
    predicted_capacities,
    rate_points,
    slow_down,
    with_slower_prompts,
)
from benchmarks.sweep_measurements import (
    MeasurementFailed,
    Target,
    measure_interference,
    measure_prefill,
    measure_rate,
)
from benchmarks.sweep_settings import QUICK, SweepSettings
from benchmarks.sweep_store import Point, SweepDirectoryError, SweepStore, read_manifest, read_points
from benchmarks.workload import PlannedRequest
from deploy.autoscaler.capacity import CapacityModel
from tests.benchmarks.scripted_sender import ScriptedSender
from tests.benchmarks.two_pool_sender import TwoPoolSender
from tests.benchmarks.virtual_loop import run_virtually

PREFILL_TOKEN_S, STEP_S, STEP_SEQUENCE_S = 0.0008, 0.010, 0.002
# Fewer requests than a sweep takes: virtual runs cost time as well.
SETTINGS = replace(SweepSettings(**QUICK), run_s=25.0, min_requests=40, ttft_ms=1500.0, tpot_ms=60.0)


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
    assert measured_x_p == pytest.approx(x_p, rel=0.2)  # of runs of 40 requests, to the search's 15 %
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
    assert resumed == pytest.approx((x_p, measured_x_p, capacity))
    # Fits of the same points in another order differ in the last bits: the rates are the stored ones all the same.
    searching = Sweep(SETTINGS, _store(tmp_path), Progress(lambda *_: None))
    target = Target(again, "1P1D", content_seed=5)
    assert run_virtually(asyncio.wait_for(searching.search_prefill(target, x_p * (1 + 4e-16)), 1e6)) == measured_x_p
    assert again.num_sent == 0


class _SlowingSender(TwoPoolSender):
    """Its machine needs a tenth more for a prompt with each second; `beside` times as much while sequences decode."""

    def __init__(self, per_s: float, beside: float) -> None:
        super().__init__(PREFILL_TOKEN_S, STEP_S, STEP_SEQUENCE_S)
        self._per_s, self._beside = per_s, beside
        self._num_streams = 0

    async def send(self, request: PlannedRequest, capture: StreamCapture) -> None:
        factor = 1 + self._per_s * asyncio.get_running_loop().time()
        self.prefill_token_s = PREFILL_TOKEN_S * factor * (self._beside if self._num_streams else 1.0)
        is_stream = request.output_tokens > 1
        self._num_streams += is_stream
        try:
            await super().send(request, capture)
        finally:
            self._num_streams -= is_stream


@pytest.mark.parametrize("beside", [1.0, 1.5])
def test_interference_is_told_apart_from_a_machine_that_slows_down(beside: float) -> None:
    sender = _SlowingSender(0.1, beside)
    point, records = run_virtually(measure_interference(Target(sender, "1P1D", content_seed=5), SETTINGS, 200, 2))
    assert point.measured["prefill_ms"] > 1.2 * beside * 200 * PREFILL_TOKEN_S * 1e3  # slower than at the start
    assert slow_down(point) == pytest.approx(beside, rel=0.05)
    assert len(records) > 2 * SETTINGS.repeats


def test_what_is_predicted_for_the_coupled_run_is_of_the_machine_at_that_time() -> None:
    def timed(turn: int, prefill_ms: float) -> Point:
        return Point(DRIFT, "1P1D", {"turn": float(turn)}, {}, {"prefill_ms": prefill_ms})

    assert drift_share([timed(0, 100.0)]) == 0.0
    slower = drift_share([timed(2, 140.0), timed(0, 100.0), timed(1, 120.0)])
    assert slower == pytest.approx(0.3)
    model = CapacityModel(2.0, 1.0, 0.001, 10.0, 1.0, 0.0, kv_tokens=10_000, max_batch=64)
    assert with_slower_prompts(model, 1 + slower).prefill_ms(100, 50) == pytest.approx(1.3 * model.prefill_ms(100, 50))
    assert with_slower_prompts(model, 1 + slower).tpot_ms(4, 100) == model.tpot_ms(4, 100)


def test_the_pools_are_timed_where_the_workload_is() -> None:
    settings = replace(SETTINGS, input_low=64, input_high=192, prefill_lengths=(64, 1024))
    assert grid_lengths(settings) == [64, 128, 192, 1024]
    model = CapacityModel(0.0, 1.0, 0.0, 10.0, 1.0, 0.0, kv_tokens=100_000, max_batch=64)
    batch = decoding_batch(settings, model)
    # Little's law: as many as arrive while one decodes.
    rate_per_s = min(predicted_capacities(settings, model))
    assert batch == round(rate_per_s * 48 * model.tpot_ms(batch, 128 + 24) / 1e3)


@pytest.mark.parametrize(("output_tokens", "share"), [(2, 0.0), (48, 0.63), (480, 1.0)])
def test_prompts_are_slower_only_while_somebody_decodes(output_tokens: int, share: float) -> None:
    # 10 requests/s and 2 ms a token: a sequence decodes for 4 ms, 96 ms or a second.
    settings = replace(SETTINGS, input_low=72, input_high=72, output_low=output_tokens, output_high=output_tokens)
    model = CapacityModel(0.0, 1.0, 0.0, 2.0, 0.0, 0.0, kv_tokens=1_000_000, max_batch=64)
    rate_per_s = min(predicted_capacities(settings, model))
    mean = rate_per_s * output_tokens * 0.002
    point = Point(INTERFERENCE, "1P1D", {}, {}, {"prefill_ms": 150.0, "alone_ms": 100.0})
    assert mean_slow_down([point], settings, model) == pytest.approx(1 + 0.5 * (1 - math.exp(-mean)))
    assert mean_slow_down([point], settings, model) == pytest.approx(1 + 0.5 * share, abs=0.06)
    assert mean_slow_down([], settings, model) == 1.0


def test_runs_simulated_with_their_own_arrivals_have_their_luck() -> None:
    """The measured sender keeps the model's times: run by run as many requests are in time as the simulation says."""
    model = CapacityModel(0.0, 1e3 * PREFILL_TOKEN_S, 0.0, 1e3 * STEP_S, 1e3 * STEP_SEQUENCE_S, 0.0, 100_000, 64)
    x_p, _ = predicted_capacities(SETTINGS, model)
    points = [
        run_virtually(
            measure_rate(
                Target(_sender(), "1P1D", content_seed=5),
                SETTINGS,
                COUPLED,
                SETTINGS.workload,
                float(f"{share * x_p:.6g}"),
                0,
            )
        )[0]
        for share in (0.9, 1.1, 1.3)
    ]
    simulated = [simulated_point(point, SETTINGS, model) for point in points]
    for point, one in zip(points, simulated, strict=True):
        assert one.offered_per_s == point.summary["offered_per_s"]
        assert one.attainment.value == pytest.approx(point.summary["attainment"]["value"], abs=0.12)
    measured = capacity_at_slo(rate_points(points)).value
    assert simulated_capacity(points, SETTINGS, model) == pytest.approx(measured, rel=0.05)


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
