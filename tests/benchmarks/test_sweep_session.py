"""A short sweep over sockets from the URL to the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.openai_client import Dialect
from benchmarks.report import export_report
from benchmarks.request_record import read_records
from benchmarks.scripted_server import Answer, ScriptedServer, token_stream
from benchmarks.sweep import Progress
from benchmarks.sweep_session import PoolLimits, SweepOptions, pool_limits, run_sweep
from benchmarks.sweep_settings import SweepSettings

SETTINGS = SweepSettings(
    input_low=32,
    input_high=32,
    output_low=4,
    output_high=4,
    ttft_ms=200.0,
    tpot_ms=50.0,
    run_s=0.3,
    min_requests=5,
    drain_s=5.0,
    resolution=1.5,
    rate_shares=(0.5, 1.0),
    prefill_lengths=(16, 32, 64),
    prefill_hit_rates=(0.0,),
    decode_batches=(1, 4),
    decode_contexts=(32, 64),
    decode_tokens=10,  # that a busy machine does not read all of them at once
    repeats=2,
)


class _OneQueue:
    """Prefill of 0.6 ms a token, first come first served; a token every 20 ms after it."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def __call__(self, number: int, body: dict[str, Any], now_s: float) -> Answer:
        if "prompt" not in body:
            return Answer(body=json.dumps({"data": [{"id": "scripted"}]}))
        self._free_s = max(self._free_s, now_s) + 0.0006 * len(body["prompt"])
        return token_stream((self._free_s + 0.02 * place for place in range(body["max_tokens"])), len(body["prompt"]))


async def test_a_sweep_over_sockets_ends_with_plan_policy_and_report(tmp_path: Path) -> None:
    dialect: Dialect = "vllm"
    async with ScriptedServer(_OneQueue()) as server:
        options = SweepOptions(tmp_path, SETTINGS, url=server.url, control_url=server.url, dialect=dialect)
        made, report = await run_sweep(options, Progress(lambda *_: None))
    # 32 tokens of 0.6 ms: more is impossible, less is what else this machine does.
    assert 0 < made.prefill_requests_per_s < 1.1 / 0.0192
    assert made.is_aggregated_measured
    assert made.prediction_error is not None
    assert made.check is not None
    assert made.check.simulated_per_s is not None
    page = report.read_text()
    for said in (made.verdict.value, "capacity at the objective", "<svg", "Goodput"):
        assert said in page
    # Self-contained: nothing is fetched from anywhere.
    assert "src=" not in page
    assert "<link" not in page
    for name in ("rate_latency.png", "goodput.png", "pareto.png", "ratio_heat_map.png", "timing_fits.png"):
        assert (tmp_path / name).stat().st_size > 1000
    assert json.loads((tmp_path / "pd_plan.json").read_text())["model"]["c1_ms"] > 0
    assert (tmp_path / "policy.yaml").is_file()
    header, records = read_records(next((tmp_path / "records").glob("coupled-*.jsonl")))
    assert header["stage"] == "coupled"
    assert records
    exported = export_report(tmp_path, tmp_path / "kept")
    assert {path.name for path in exported} > {"report.html", "summary.csv", "pd_plan.json"}
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert {row["point"]["stage"] for row in rows} > {"coupled", "control", "interference", "drift"}
    assert not any(row["point"]["is_simulated"] for row in rows)


def test_pool_limits_are_of_the_smallest_pool_that_decodes() -> None:
    workers = [
        {"role": "prefill", "block_tokens": 16, "load": {"total_blocks": 5}},
        {"role": "decode", "block_tokens": 16, "load": {"total_blocks": 100}, "details": {"max_sequences": "32"}},
        {"role": "decode", "block_tokens": 16, "load": {"total_blocks": 80}, "details": {"max_sequences": "48"}},
    ]
    assert pool_limits({"workers": workers}) == PoolLimits(1280, 32)
    assert pool_limits({}) == PoolLimits(0, 0)


def test_settings_of_a_quick_sweep_differ_in_size_only() -> None:
    from benchmarks.sweep_settings import QUICK

    quick = SweepSettings(**QUICK)
    assert quick.workload == SweepSettings().workload
    assert quick.slo == replace(quick, seed=5).slo
