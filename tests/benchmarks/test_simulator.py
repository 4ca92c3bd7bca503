"""Simulated clusters whose answer is known; and the planner's arithmetic against them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.arrivals import ArrivalProcess, arrival_times
from benchmarks.planner import pool_capacities
from benchmarks.pool_capacity import TrafficShape
from benchmarks.request_record import Outcome, RequestRecord
from benchmarks.run_summary import Slo, summarise
from benchmarks.simulator.agreement import POINTS, agree
from benchmarks.simulator.event_queue import EventQueue
from benchmarks.simulator.simulate_command import predicted_per_s, split_capacity
from benchmarks.simulator.simulated_traffic import (
    OWNER,
    SimulatedArrival,
    TenantShare,
    day_times,
    of_tenants,
    synthetic_arrivals,
    trace_arrivals,
)
from benchmarks.simulator.simulation import SimulationResult, simulate
from benchmarks.simulator.simulation_settings import Faults, SimulationSettings
from benchmarks.traces import TraceRequest
from benchmarks.workload import LengthLaw, Workload
from cluster.identity import Tenant
from deploy.autoscaler.capacity import CapacityModel
from deploy.autoscaler.policy import Policy, PoolBounds, ScaleDown
from deploy.autoscaler.policy import Slo as PolicySlo
from router.tenant_limits import TenantLimit
from router.timing_model import TimingPrior

# 100 tokens take 1 + 10 ms of prefill; a decode step takes 10 ms and 0.1 for each sequence.
MODEL = CapacityModel(1.0, 0.1, 0.0, 10.0, 0.1, 0.0, kv_tokens=100_000, max_batch=64)
SETTINGS = SimulationSettings(
    MODEL, Slo(500.0, 40.0), 1, 1, allows_local_prefill=False, route_ms=1.0, round_trip_ms=0.0, link_bytes_per_ms=1e12
)


def _arrival(index: int, time_s: float, num_prompt: int, num_output: int, prefix: int = 0) -> SimulatedArrival:
    shared = ((7, prefix),) if prefix else ()
    return SimulatedArrival(index, time_s, num_output, (*shared, (1000 + index, num_prompt - prefix)))


def _run(settings: SimulationSettings, arrivals: list[SimulatedArrival], duration_s: float = 10.0) -> SimulationResult:
    return simulate(settings, arrivals, duration_s)


def _poisson(rate_per_s: float, duration_s: float, workload: Workload, seed: int = 1) -> list[SimulatedArrival]:
    times = arrival_times(ArrivalProcess("poisson", rate_per_s), duration_s, seed)
    return synthetic_arrivals(workload, times, seed)


def _ttft_ms(record: RequestRecord) -> float:
    assert record.ttft_s is not None
    return record.ttft_s * 1e3


@pytest.mark.parametrize("max_leap", [1, 16])
def test_a_request_alone_takes_what_the_timing_model_says(max_leap: int) -> None:
    (record,) = _run(replace(SETTINGS, max_leap=max_leap), [_arrival(0, 1.0, 100, 21)]).run.records
    assert record.is_ok
    assert _ttft_ms(record) == pytest.approx(1.0 + 11.0, abs=0.01)  # routed, prefilled
    assert record.tpot_s == pytest.approx(0.0101)  # 20 steps of one sequence
    assert record.num_output_tokens == 21
    assert record.stages is not None
    assert record.stages.prefill_compute_ms == pytest.approx(11.0)


@pytest.mark.parametrize("max_leap", [1, 16])
def test_an_arrival_joins_at_the_step_in_progress_also_within_a_leap(max_leap: int) -> None:
    settings = replace(SETTINGS, max_leap=max_leap, num_prefill=2)
    first, second = _run(settings, [_arrival(0, 0.0, 100, 41), _arrival(1, 0.105, 100, 11)]).run.records
    # The second lands at 117 ms, in the middle of a step of the first; from then on steps take 10.2 ms.
    assert second.chunk_times_s[0] == pytest.approx(0.117)
    assert second.tpot_s == pytest.approx((0.0102 * 10 + (0.012 + 0.0101 * 11 - 0.117)) / 10, rel=0.01)
    assert first.ended_s == pytest.approx(0.012 + 0.0101 * 30 + 0.0102 * 10, rel=0.01)


def test_leaps_change_no_result_that_counts() -> None:
    arrivals = _poisson(30.0, 10.0, Workload(LengthLaw(50, 150), LengthLaw(10, 90)))
    small, large = (summarise(_run(replace(SETTINGS, max_leap=leap), arrivals).run) for leap in (1, 16))
    assert large.ttft_ms.p50.value == pytest.approx(small.ttft_ms.p50.value, rel=0.02)
    assert large.tpot_ms.p50.value == pytest.approx(small.tpot_ms.p50.value, rel=0.01)
    assert large.output_tokens_per_s == pytest.approx(small.output_tokens_per_s, rel=0.01)


def test_one_prefill_worker_is_an_m_d_1_queue() -> None:
    # Constant prompts of 11 ms, one token each, one prompt a step: the wait is rho S / (2 (1 - rho)).
    rate_per_s, service_s = 60.0, 0.011
    settings = replace(SETTINGS, max_batch_tokens=100, model=replace(MODEL, max_batch=64), placement="round_robin")
    arrivals = _poisson(rate_per_s, 100.0, Workload(LengthLaw(100, 100), LengthLaw(1, 1)))
    records = _run(settings, arrivals, 100.0).run.records
    waits = [_ttft_ms(record) - 12.0 for record in records[500:]]
    rho = rate_per_s * service_s
    assert sum(waits) / len(waits) == pytest.approx(1e3 * rho * service_s / (2 * (1 - rho)), rel=0.15)


def test_a_shared_prefix_is_computed_once_and_its_holder_is_found() -> None:
    settings = replace(SETTINGS, num_prefill=4)
    arrivals = [_arrival(index, 0.5 * index, 200, 1, prefix=160) for index in range(6)]
    records = _run(settings, arrivals).run.records
    assert [record.cached_tokens for record in records] == [0] + [160] * 5
    # Without its cache the router finds the holder by chance only.
    blind = _run(replace(settings, placement="round_robin"), arrivals).run.records
    assert sum(record.cached_tokens or 0 for record in blind) < sum(record.cached_tokens or 0 for record in records)


def test_lost_events_cost_time_and_nothing_else() -> None:
    workload = Workload(LengthLaw(400, 400), LengthLaw(2, 2), hit_rate=0.8, num_prefixes=6)
    settings = replace(SETTINGS, num_prefill=4, faults=Faults(event_loss=0.5))
    records = _run(settings, _poisson(20.0, 20.0, workload), 20.0).run.records
    assert all(record.is_ok for record in records)


def test_a_failed_worker_loses_no_request_and_comes_back() -> None:
    settings = replace(SETTINGS, num_prefill=3, num_decode=3, faults=Faults(worker_mtbf_s=20.0), start_delay_s=2.0)
    result = _run(settings, _poisson(20.0, 60.0, Workload(LengthLaw(100, 100), LengthLaw(40, 40))), 60.0)
    assert result.num_failures > 5
    assert result.num_moved > 3
    assert all(record.num_output_tokens == 40 for record in result.run.records if record.is_ok)
    lost = [record for record in result.run.records if not record.is_ok]
    assert len(lost) < 0.02 * len(result.run.records)  # moved more often than a router tries


def test_without_workers_a_request_waits_and_is_refused() -> None:
    (record,) = _run(replace(SETTINGS, num_prefill=0, num_decode=0), [_arrival(0, 0.0, 10, 1)]).run.records
    assert record.outcome is Outcome.HTTP_ERROR
    assert "no decode worker" in record.detail


# 100-token prompts of 11 ms: one worker computes 91 a second.
OVERLOADED = replace(SETTINGS, admission_ttft_ms=500.0, max_worker_queue_ms=50.0)


def test_overload_is_refused_where_the_first_token_would_be_late() -> None:
    arrivals = _poisson(200.0, 8.0, Workload(LengthLaw(100, 100), LengthLaw(2, 2)))
    records = _run(OVERLOADED, arrivals, 8.0).run.records
    served = [record for record in records if record.is_ok]
    assert 0.3 < len(served) / len(records) < 0.7
    assert max(map(_ttft_ms, served)) < 1100  # twice what the door was told, and what was under way
    refused = [record for record in records if not record.is_ok]
    assert {(record.outcome, record.http_status) for record in refused} == {(Outcome.HTTP_ERROR, 503)}
    assert all("too late for this priority" in record.detail for record in refused)
    # What waits in the router is a part of the first token's time, told apart from what waits on the worker.
    late = max(served, key=_ttft_ms)
    assert late.stages is not None
    assert late.stages.route_ms > 10 * late.stages.prefill_queue_ms


def test_who_may_wait_less_is_refused_first() -> None:
    shares = [TenantShare(Tenant("critical"), 1, priority=-1), TenantShare(Tenant("sheddable"), 3, priority=1)]
    arrivals = of_tenants(_poisson(150.0, 8.0, Workload(LengthLaw(100, 100), LengthLaw(2, 2))), shares, seed=1)
    records = _run(OVERLOADED, arrivals, 8.0).run.records
    critical = [record for record in records if record.traffic_class == "critical"]
    sheddable = [record for record in records if record.traffic_class == "sheddable"]
    assert 2 < len(sheddable) / len(critical) < 4
    assert all(record.is_ok for record in critical)
    assert max(map(_ttft_ms, critical)) < 250  # the half of it that is critical never queues for long
    assert 0.3 < sum(record.is_ok for record in sheddable) / len(sheddable) < 0.7


def _flooded(
    settings: SimulationSettings, num_tokens: int, small_per_s: float, flood_per_s: float, duration_s: float
) -> SimulationResult:
    lengths = Workload(LengthLaw(num_tokens, num_tokens), LengthLaw(1, 1))
    small = [replace(one, tenant=Tenant("small")) for one in _poisson(small_per_s, duration_s, lengths)]
    flood = [replace(one, tenant=Tenant("flood")) for one in _poisson(flood_per_s, duration_s, lengths, seed=2)]
    arrivals = [replace(one, index=index) for index, one in enumerate([*small, *flood])]
    return _run(settings, arrivals, duration_s)


def test_a_tenants_flood_does_not_delay_another_tenant() -> None:
    by_tenant = summarise(_flooded(OVERLOADED, 100, 20.0, 300.0, 4.0).run, Slo(200.0, 40.0)).by_class
    assert by_tenant["small"].attainment > 0.95
    assert by_tenant["flood"].attainment < 0.5


def test_f32_nor_does_a_flood_that_nobody_refuses_and_that_has_grown_old() -> None:
    # Prompts of 101 ms, three times as many as one worker computes: after 12 s the flood's wait for 8 s.
    patient = replace(OVERLOADED, admission_ttft_ms=0.0)
    records = _flooded(patient, 1000, 1.0, 30.0, 12.0).run.records
    waits = {name: [_ttft_ms(one) for one in records if one.traffic_class == name] for name in ("small", "flood")}
    assert max(waits["flood"]) > 10_000
    # What is computed, what is booked ahead, and one of the flood's in turn.
    assert max(waits["small"]) < 600


def test_a_tenants_limit_is_kept() -> None:
    arrivals = _poisson(50.0, 8.0, Workload(LengthLaw(10, 10), LengthLaw(1, 1)))
    settings = replace(SETTINGS, tenant_limits={OWNER: TenantLimit(requests_per_s=10.0)})
    records = _run(settings, arrivals, 8.0).run.records
    assert sum(record.is_ok for record in records) == pytest.approx(80, abs=12)
    assert {record.http_status for record in records} == {200, 429}


def test_prompts_that_land_at_once_share_the_decode_workers_link() -> None:
    # 100 tokens of 1 kB at 1 kB/ms: 100 ms alone, of which 11 ms hide behind the compute.
    slow = replace(SETTINGS, kv_bytes_per_token=1_000, link_bytes_per_ms=1e3, num_layers=32, num_prefill=4)
    together = [_arrival(index, 0.0, 100, 2) for index in range(4)]
    alone = _run(slow, together[:1]).run.records[0]
    assert _ttft_ms(alone) == pytest.approx(1.0 + 100.0 + 11.0 / 32, abs=0.5)
    records = _run(slow, together).run.records
    assert max(map(_ttft_ms, records)) == pytest.approx(1.0 + 400.0, abs=2.0)
    # As many decode workers: each has its own link, until all cross one fabric.
    spread = replace(slow, num_decode=4)
    assert max(map(_ttft_ms, _run(spread, together).run.records)) == pytest.approx(_ttft_ms(alone), abs=0.5)
    crossing = replace(spread, fabric_bytes_per_ms=1e3)
    assert max(map(_ttft_ms, _run(crossing, together).run.records)) == pytest.approx(1.0 + 400.0, abs=2.0)


# One AVX-512 core and SmolLM2-135M: 2,048 tokens take 3.1 s of prefill, a step of eight streams 27 ms.
CPU_MODEL = CapacityModel(2.0, 1.17, 3.6e-4, 14.0, 1.3, 1.8e-3, kv_tokens=40_000, max_batch=64)
CPU_SETTINGS = SimulationSettings(CPU_MODEL, Slo(20_000.0, 100.0), 1, 1, max_batch_tokens=512, max_leap=1)


def _streams_beside_long_prompts(settings: SimulationSettings) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """Eight streams, and a prompt of 2,048 tokens every 2 s: 1.5 times what the prefill worker computes."""
    streams = [_arrival(index, 0.0, 128, 1500) for index in range(8)]
    prompts = [_arrival(100 + number, 4.0 + 2 * number, 2048, 8) for number in range(10)]
    records = _run(settings, streams + prompts, 24.0).run.records
    return [one for one in records if one.index < 100], [one for one in records if one.index >= 100]


def _mean_ttft_ms(records: list[RequestRecord]) -> float:
    return sum(map(_ttft_ms, records)) / len(records)


@pytest.mark.parametrize("itl_slo_ms", [80.0, 100.0, 140.0])
def test_prompts_beside_streams_keep_their_objective(itl_slo_ms: float) -> None:
    streams, prompts = _streams_beside_long_prompts(replace(CPU_SETTINGS, itl_slo_ms=itl_slo_ms))
    gaps_ms = [
        (after - before) * 1e3
        for record in streams
        for before, after in pairwise(record.chunk_times_s)
        if 4.0 < after < 22.0
    ]
    assert max(gaps_ms) <= itl_slo_ms
    assert all(record.is_ok for record in prompts)
    computed_by = [record.stages.prefill_compute_ms for record in prompts if record.stages is not None]
    assert sum(compute_ms > 3500 for compute_ms in computed_by) >= 2  # beside streams
    assert sum(compute_ms < 3500 for compute_ms in computed_by) >= 4  # on the prefill worker


def test_a_decode_workers_spare_time_shortens_the_prefill_pools_queue() -> None:
    _, apart = _streams_beside_long_prompts(replace(CPU_SETTINGS, allows_local_prefill=False))
    _, shared = _streams_beside_long_prompts(CPU_SETTINGS)
    assert _mean_ttft_ms(shared) < 0.6 * _mean_ttft_ms(apart)


@pytest.mark.parametrize("factor", [0.02, 0.4, 5.0])
def test_a_router_that_begins_with_a_wrong_model_of_the_machine_places_as_well(factor: float) -> None:
    prior = TimingPrior((2.0 * factor, 1.17 * factor, 3.6e-4 * factor), (14.0 * factor, 1.3 * factor, 1.8e-3 * factor))
    _, told = _streams_beside_long_prompts(CPU_SETTINGS)
    _, wrong = _streams_beside_long_prompts(replace(CPU_SETTINGS, router_prior=prior))
    assert _mean_ttft_ms(wrong) < 1.15 * _mean_ttft_ms(told)


def test_the_autoscaler_grows_the_pool_that_lacks_and_shrinks_it_again() -> None:
    policy = Policy(
        slo=PolicySlo(ttft_ms=500.0, itl_ms=40.0),
        prefill=PoolBounds(min=1, max=8),
        decode=PoolBounds(min=1, max=8),
        scale_down=ScaleDown(window_s=60.0, cooldown_s=10.0, after_up_s=20.0),
    )
    busy = _poisson(120.0, 40.0, Workload(LengthLaw(100, 100), LengthLaw(4, 4)))
    quiet = [
        replace(arrival, index=len(busy) + arrival.index, time_s=40.0 + arrival.time_s)
        for arrival in _poisson(1.0, 300.0, Workload(LengthLaw(100, 100), LengthLaw(4, 4)))
    ]
    result = _run(replace(SETTINGS, policy=policy, start_delay_s=3.0), busy + quiet, 340.0)
    assert max(sample.prefill for sample in result.fleet) >= 2
    assert result.fleet[-1].prefill == 1
    late = [record for record in result.run.records if 32.0 < record.intended_s < 40.0]
    assert sum(_ttft_ms(record) < 500 for record in late) > 0.95 * len(late)


def test_a_thousand_workers_for_ten_minutes_with_failures_and_lost_events() -> None:
    """A day of them: docs/planning.md."""
    settings = replace(
        SETTINGS,
        num_prefill=650,
        num_decode=350,
        block_tokens=64,
        max_leap=64,
        faults=Faults(worker_mtbf_s=100_000.0, event_loss=0.01),
    )
    workload = Workload(LengthLaw(500, 1500), LengthLaw(50, 150), hit_rate=0.25, num_prefixes=2)
    result = _run(settings, _poisson(0.5, 600.0, workload), 600.0)
    records = result.run.records
    assert len(records) > 250
    assert all(record.is_ok for record in records)
    assert 1 <= result.num_failures <= 20
    assert result.worker_s == pytest.approx(1000 * result.virtual_s, rel=0.01)
    # The few who hold one of the two prefixes are found among the others.
    assert sum(bool(record.cached_tokens) for record in records) > 0.6 * len(records)


def test_tokens_of_a_sequence_that_sat_out_a_step_have_their_own_times() -> None:
    # Room for three sequences' prompts, not for their answers: somebody sits out or is put back, and goes on later.
    tight = replace(MODEL, kv_tokens=432)
    settings = replace(SETTINGS, model=tight, num_prefill=0, num_decode=0, num_aggregated=1, max_leap=1)
    arrivals = [_arrival(index, 0.0, 100, 60) for index in range(3)]
    records = _run(settings, arrivals).run.records
    assert all(record.is_ok and record.num_output_tokens == 60 for record in records)
    for record in records:
        assert list(record.chunk_times_s) == sorted(set(record.chunk_times_s))
        assert len(record.chunk_times_s) == 60
    longest_s = max(later - earlier for record in records for earlier, later in pairwise(record.chunk_times_s))
    assert longest_s > 0.1  # a wait that no step explains: it was put back


def test_equal_runs_are_equal() -> None:
    arrivals = _poisson(20.0, 5.0, Workload(LengthLaw(50, 150), LengthLaw(5, 25)))
    settings = replace(SETTINGS, num_prefill=2, num_decode=2, faults=Faults(worker_mtbf_s=10.0, event_loss=0.1))
    assert _run(settings, arrivals).run.records == _run(settings, arrivals).run.records


def test_a_trace_keeps_what_its_prompts_share() -> None:
    trace = [TraceRequest(0.0, 1200, 5, (1, 2, 3)), TraceRequest(1.0, 1300, 5, (1, 2, 9))]
    first, second = trace_arrivals(trace, time_factor=2.0)
    assert (first.num_prompt_tokens, second.num_prompt_tokens, second.time_s) == (1200, 1300, 2.0)
    assert (first.token_ids()[:1024] == second.token_ids()[:1024]).all()
    assert (first.token_ids()[1024:1200] != second.token_ids()[1024:1200]).all()
    assert second.shareable_tokens == 1024


def test_a_day_is_quiet_at_its_ends_and_busy_in_its_middle() -> None:
    times = day_times(1.0, 86_400.0, seed=3)
    night, noon = (times < 3600).sum(), (abs(times - 43_200) < 1800).sum()
    assert len(times) == pytest.approx(86_400, rel=0.03)
    assert noon > 3.5 * night


def test_time_never_goes_back_and_cancelled_things_never_happen() -> None:
    events = EventQueue()
    seen: list[float] = []
    events.at(2.0, lambda: seen.append(events.now_s))

    def late() -> None:
        events.at(0.5, lambda: seen.append(events.now_s))

    events.at(1.0, late)
    events.at(1.5, lambda: seen.append(-1.0)).cancel()
    events.run(10.0)
    assert seen == [1.0, 2.0]
    assert events.now_s == 10.0


@pytest.mark.parametrize("point", [POINTS[5], POINTS[17]])
def test_planner_and_simulator_choose_the_same_split_within_one_worker(point: tuple[int, int, float]) -> None:
    # All twenty: python -m benchmarks.simulator.agreement
    assert agree(point, num_requests=120).difference <= 1


def test_predicted_capacity_is_what_a_simulated_pair_carries() -> None:
    policy = Policy(slo=PolicySlo(ttft_ms=120.0, itl_ms=40.0))
    prefill_of, decode_of = pool_capacities(TrafficShape(100, 30), MODEL, policy)
    predicted = min(prefill_of(1), decode_of(1))
    workload = Workload(LengthLaw(100, 100), LengthLaw(30, 30))
    slo = Slo(120.0, 40.0)
    kept = {}
    for share in (0.9, 1.12):
        arrivals = _poisson(share * predicted, 15.0, workload)
        records = _run(replace(SETTINGS, slo=slo, max_batch_tokens=100), arrivals, 15.0).run.records
        kept[share] = sum(slo.is_met(record) for record in records) / len(records)
    assert kept[0.9] >= 0.9 > kept[1.12]


@pytest.mark.parametrize("fixed_ms", [0.0, 1.0])
def test_a_splits_capacity_is_found_from_the_planners_prediction_with_or_without_a_fixed_cost(fixed_ms: float) -> None:
    # 20 tokens of 5 ms: ten requests a second at most.
    settings = replace(SETTINGS, model=replace(MODEL, c0_ms=fixed_ms, c1_ms=5.0), slo=Slo(400.0, 40.0))
    workload = Workload(LengthLaw(20, 20), LengthLaw(2, 2))
    predicted = predicted_per_s(settings, workload)
    found, summary = split_capacity(settings, workload)
    assert found == pytest.approx(predicted, rel=0.2)
    assert summary.attainment is not None
    assert summary.attainment.value >= 0.85  # of the counted ones
    hopeless = replace(settings, slo=Slo(1.0, 40.0))
    assert split_capacity(hopeless, workload)[0] == 0.0


def test_the_command_writes_a_report_whose_rows_say_that_they_are_simulated(tmp_path: Path) -> None:
    import typer

    from benchmarks.commands import simulate as command

    app = typer.Typer()
    app.command()(command)
    flags = ["--model", "Llama-3.1-8B", "--out", str(tmp_path), "--rates", "4,8", "--duration-s", "10",
             "--output-tokens", "16"]  # fmt: skip
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 0, result.output
    assert "every figure is simulated" in result.output
    page = (tmp_path / "report.html").read_text()
    assert "coupled-simulated_1P1D-rate4" in page
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert [row["point"]["is_simulated"] for row in rows] == [True, True]
    assert "Simulated on a virtual clock" in page
    assert not math.isnan(rows[0]["summary"]["ttft_ms"]["p50"]["value"])
    # Into a finished directory only splits are added, and its plan stays.
    before = (tmp_path / "pd_plan.json").read_text()
    mixed = CliRunner().invoke(app, [str(tmp_path), "--out", str(tmp_path)])
    assert mixed.exit_code == 2
    assert "--splits" in mixed.output
    added = CliRunner().invoke(app, [str(tmp_path), "--out", str(tmp_path), "--splits", "2", "--output-tokens", "2"])
    assert added.exit_code == 0, added.output
    assert "simulated 1P1D:" in added.output
    assert (tmp_path / "pd_plan.json").read_text() == before
    refused = CliRunner().invoke(app, ["--out", str(tmp_path)])
    assert refused.exit_code == 2
    assert "--model and --device" in refused.output
