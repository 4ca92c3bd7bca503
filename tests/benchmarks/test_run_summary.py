"""A run's row: what is counted, what is flagged, and how it is written."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.load_run import LoadRun
from benchmarks.request_record import Outcome, RecordsError, RequestRecord, read_records, write_records
from benchmarks.run_summary import (
    SCHEMA_VERSION,
    Flag,
    Slo,
    summarise,
    to_json,
    write_summary_csv,
    write_summary_json,
)
from benchmarks.ttft_stages import TtftStages
from tests.benchmarks.made_records import made_record

STAGES = TtftStages(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7, "shm")


def _run(records: list[RequestRecord], duration_s: float = 20.0, *, hit_limit: bool = False) -> LoadRun:
    return LoadRun(records, 0.0, duration_s, peak_in_flight=1, hit_in_flight_limit=hit_limit)


def _steady() -> list[RequestRecord]:
    return [made_record(place, place / 10) for place in range(200)]


def test_a_steady_run_is_ok_with_its_rates_and_latencies() -> None:
    summary = summarise(_run(_steady()), Slo(ttft_ms=120.0, tpot_ms=60.0))
    assert summary.flags == (Flag.OK,)
    assert summary.offered_per_s == pytest.approx(10.0)
    assert summary.achieved_per_s == pytest.approx(10.0, rel=0.02)
    assert summary.output_tokens_per_s == pytest.approx(20.0, rel=0.02)
    assert summary.ttft_ms.p99.value == pytest.approx(100.0)
    assert summary.itl_ms.p50.value == pytest.approx(50.0)
    assert summary.goodput_per_s == pytest.approx(10.0)
    assert summary.attainment is not None
    assert summary.attainment.value == 1.0


def test_b14_one_token_answers_have_no_tpot_and_pass_no_objective_by_it() -> None:
    one_token = [
        made_record(place, place / 10, chunk_times_s=(place / 10 + 0.1,), chunk_tokens=(1,)) for place in range(200)
    ]
    summary = summarise(_run(one_token), Slo(ttft_ms=120.0, tpot_ms=60.0))
    assert summary.tpot_ms.count == 0
    assert np.isnan(summary.tpot_ms.p50.value)
    assert summary.num_tpot_not_applicable == 200
    late = summarise(_run(one_token), Slo(ttft_ms=90.0, tpot_ms=60.0))
    assert late.goodput_per_s == 0.0


def test_failed_and_unfinished_requests_miss_the_objective_by_class() -> None:
    records = _steady()
    for place in range(0, 200, 4):
        records[place] = replace(records[place], outcome=Outcome.UNFINISHED, traffic_class="long")
    summary = summarise(_run(records), Slo(ttft_ms=120.0, tpot_ms=60.0))
    assert Flag.ERRORS in summary.flags
    assert summary.by_class["long"].attainment == 0.0
    assert summary.by_class["default"].attainment == 1.0
    assert summary.attainment is not None
    assert summary.attainment.value == pytest.approx(0.75)


def test_a_late_client_is_flagged() -> None:
    late = [replace(record, sent_s=record.sent_s + 0.05) for record in _steady()]
    assert summarise(_run(late)).flags == (Flag.CLIENT_LIMITED,)
    assert Flag.CLIENT_LIMITED in summarise(_run(_steady(), hit_limit=True)).flags


def test_a_growing_queue_is_saturated_and_unsteady() -> None:
    growing = [
        replace(record, ended_s=record.ended_s + 0.6 * record.intended_s, chunk_times_s=(), chunk_tokens=())
        for record in _steady()
    ]
    assert {Flag.SATURATED, Flag.UNSTEADY} <= set(summarise(_run(growing)).flags)


def test_a_handful_of_requests_shows_no_trend() -> None:
    few = [replace(one, ended_s=one.ended_s + 0.6 * one.intended_s) for one in _steady()[:150:15]]
    assert not {Flag.SATURATED, Flag.UNSTEADY} & set(summarise(_run(few, 15.0)).flags)


def test_warm_up_is_cut_from_an_open_loop() -> None:
    slow_start = [
        replace(record, ended_s=record.ended_s + 5.0) if record.index < 20 else record for record in _steady()
    ]
    summary = summarise(_run(slow_start))
    assert summary.warmup_s == pytest.approx(2.0)
    assert summary.latency_ms.maximum == pytest.approx(150.0)


def test_hits_beyond_the_runs_own_sharing_are_flagged() -> None:
    own = [replace(record, cached_tokens=5, shareable_tokens=5) for record in _steady()]
    assert summarise(_run(own)).flags == (Flag.OK,)
    warm = [replace(record, cached_tokens=9) for record in own]
    assert summarise(_run(warm)).flags == (Flag.CACHE_WARM,)
    assert summarise(_run(warm)).extra_hit_rate == pytest.approx(0.4)


def test_hits_on_a_sessions_own_turns_are_no_warm_cache() -> None:
    turns = [
        replace(one, cached_tokens=2 if one.index % 2 == 0 else 6, shareable_tokens=None if one.index % 2 == 0 else 6)
        for one in _steady()
    ]
    assert summarise(_run(turns)).flags == (Flag.OK,)


def test_written_rows_carry_the_schema_version_and_no_nan(tmp_path: Path) -> None:
    one_token = [made_record(place, place / 10, chunk_times_s=(), chunk_tokens=()) for place in range(30)]
    rows = [({"rate_per_s": 10.0, "name": "a"}, to_json(summarise(_run(one_token, 3.0))))]
    write_summary_json(tmp_path / "summary.json", rows)
    write_summary_csv(tmp_path / "summary.csv", rows)
    document = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert document["version"] == SCHEMA_VERSION
    assert document["rows"][0]["summary"]["tpot_ms"]["p50"]["value"] is None
    with (tmp_path / "summary.csv").open(newline="") as lines:
        (row,) = csv.DictReader(lines)
    assert row["schema_version"] == str(SCHEMA_VERSION)
    assert float(row["latency_ms.p50.value"]) == pytest.approx(150.0)


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    records = [*_steady()[:3], made_record(3, 0.3, outcome=Outcome.TIMEOUT, cached_tokens=4, stages=STAGES)]
    write_records(tmp_path / "records.jsonl", {"seed": 7}, records)
    header, read = read_records(tmp_path / "records.jsonl")
    assert header["seed"] == 7
    assert read == records
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


def test_records_of_another_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text('{"version": 99}\n')
    with pytest.raises(RecordsError, match="99"):
        read_records(tmp_path / "old.jsonl")
