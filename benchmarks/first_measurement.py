"""`make bench`: the handful of figures that every user of a machine asks for first, each a median of several runs.

    one stream       decode tokens/s, TTFT, ITL
    16 streams       decode tokens/s while all decode, TTFT, ITL p50 and p99
    prefill          tokens/s of a long prompt
    KV handoff       bytes and exposed transfer from the timelines, the transport's own rate from the status

Starts the default cluster by itself, or measures the server that `--url` names. Writes `first_measurement.json`, `.md`
and `.png`. Every run has its own prompts, so no prefix cache helps.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster_under_test import ClusterError, started_cluster
from benchmarks.first_measurement_report import write_report
from benchmarks.load_run import LoadRun, run_closed_loop
from benchmarks.machine import Machine, describe_machine
from benchmarks.openai_client import DIALECTS, Endpoint, OpenAiClient
from benchmarks.request_record import RequestRecord
from benchmarks.statistics import Interval, median_interval, percentile
from benchmarks.ttft_stages import TtftStages
from benchmarks.workload import LengthLaw, Workload, plan_synthetic

RUN_TIMEOUT_S = 300.0
MAX_BATCH_OUTPUT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is asked for. The defaults take about two minutes on two cores."""

    runs: int = 5
    prompt_tokens: int = 128
    single_output_tokens: int = 128
    batch_streams: int = 16
    batch_output_tokens: int = 64
    prefill_tokens: int = 2048


DEFAULT_SHAPE = Shape()


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity: the median of the runs between their least and their greatest."""

    name: str
    unit: str
    value: Interval
    runs: tuple[float, ...]


@dataclass(slots=True)
class Measurement:
    """All figures with what they were measured on, and what could not be measured with its reason."""

    machine: Machine
    model: str
    shape: Shape
    flags: tuple[str, ...] = ()
    figures: list[Figure] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    worker_details: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, name: str, unit: str, runs: Sequence[float]) -> None:
        self.figures.append(Figure(name, unit, median_interval(runs), tuple(runs)))


class RunFailed(RuntimeError):
    """A request of a measurement failed, so there is no figure."""


async def measure(endpoint: Endpoint, shape: Shape, progress: Callable[[str], None]) -> Measurement:
    """All stages, one after another. Raises `RunFailed` when a request fails."""
    measurement = Measurement(describe_machine(), endpoint.model, shape)
    async with OpenAiClient(endpoint, RUN_TIMEOUT_S) as client:
        progress("warm-up")
        await _run(client, 1, shape.prompt_tokens, 8, seed=999)
        await _measure_single_stream(client, shape, measurement, progress)
        await _measure_batch(client, shape, measurement, progress)
        await _measure_prefill(client, shape, measurement, progress)
        workers = await _worker_statuses(client)
    _add_transport_rates(measurement, workers)
    measurement.worker_details = _worker_details(workers)
    return measurement


async def _measure_single_stream(
    client: OpenAiClient, shape: Shape, measurement: Measurement, progress: Callable[[str], None]
) -> None:
    records: list[RequestRecord] = []
    for run in range(shape.runs):
        progress(f"one stream, run {run + 1} of {shape.runs}")
        records += (await _run(client, 1, shape.prompt_tokens, shape.single_output_tokens, seed=run)).records
    measurement.add("one stream: decode", "tokens/s", [1 / (record.tpot_s or np.inf) for record in records])
    measurement.add("one stream: TTFT", "ms", [_ttft_ms(record) for record in records])
    _add_itl(measurement, "one stream", [[record] for record in records])


async def _measure_batch(
    client: OpenAiClient, shape: Shape, measurement: Measurement, progress: Callable[[str], None]
) -> None:
    output_tokens = shape.batch_output_tokens
    runs: list[list[RequestRecord]] = []
    while len(runs) < shape.runs:
        progress(f"{shape.batch_streams} streams of {output_tokens} tokens, run {len(runs) + 1} of {shape.runs}")
        # A seed is used once: a prompt that was sent before could be in a prefix cache.
        seed = 1000 * output_tokens + len(runs)
        load = await _run(client, shape.batch_streams, shape.prompt_tokens, output_tokens, seed)
        if common_decode_window(load.records) is None:
            # The first stream was through before the last had begun: longer answers, and all runs anew.
            output_tokens, runs = 2 * output_tokens, []
            if output_tokens > MAX_BATCH_OUTPUT_TOKENS:
                raise RunFailed(f"{shape.batch_streams} streams never decode together: prefill is too slow for it")
            continue
        runs.append(load.records)
    name = f"{shape.batch_streams} streams"
    measurement.add(f"{name}: decode while all decode", "tokens/s", [rate_while_all_decode(one) for one in runs])
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        measurement.add(f"{name}: TTFT {label}", "ms", [percentile([_ttft_ms(r) for r in one], share) for one in runs])
    _add_itl(measurement, name, runs)


async def _measure_prefill(
    client: OpenAiClient, shape: Shape, measurement: Measurement, progress: Callable[[str], None]
) -> None:
    rates, ttfts_ms = [], []
    stages: list[TtftStages] = []
    for run in range(shape.runs):
        progress(f"prefill of {shape.prefill_tokens} tokens, run {run + 1} of {shape.runs}")
        (record,) = (await _run(client, 1, shape.prefill_tokens, 1, seed=200 + run)).records
        ttfts_ms.append(_ttft_ms(record))
        rates.append(shape.prefill_tokens / ttfts_ms[-1] * 1e3)
        if record.stages is not None:
            stages.append(record.stages)
    measurement.add(f"prefill of {shape.prefill_tokens} tokens, by TTFT", "tokens/s", rates)
    measurement.add(f"TTFT of a {shape.prefill_tokens}-token prompt", "ms", ttfts_ms)
    _add_handoff(measurement, f"KV handoff of {shape.prefill_tokens} tokens", stages)


def _add_handoff(measurement: Measurement, name: str, stages: Sequence[TtftStages]) -> None:
    if not stages:
        measurement.missing[name] = "the server tells no timeline"
        return
    if not all(one.transport for one in stages):
        measurement.missing[name] = "the prompts were prefilled where they were decoded: nothing was handed over"
        return
    measurement.add(f"{name} over {stages[0].transport}: size", "MB", [one.kv_bytes / 1e6 for one in stages])
    measurement.add(f"{name}: exposed transfer", "ms", [one.exposed_transfer_ms for one in stages])
    measurement.add(f"{name}: prefill compute", "ms", [one.prefill_compute_ms for one in stages])


def _add_transport_rates(measurement: Measurement, workers: Sequence[dict[str, Any]]) -> None:
    rates = [
        float(peer["measured_gb_per_s"])
        for worker in workers
        for peer in worker.get("peers", [])
        if peer.get("measured_gb_per_s")
    ]
    if rates:
        measurement.add("KV transport alone, as the workers measured it", "GB/s", rates)
    else:
        measurement.missing["KV transport alone"] = "the workers report no measured rate"


def common_decode_window(records: Sequence[RequestRecord]) -> tuple[float, float] | None:
    """From the last first token to the first end: all decode, nothing prefills, nothing has thinned out."""
    start_s = max(record.chunk_times_s[0] for record in records)
    end_s = min(record.chunk_times_s[-1] for record in records)
    return (start_s, end_s) if end_s > start_s else None


def rate_while_all_decode(records: Sequence[RequestRecord]) -> float:
    """Tokens a second in the window in which all streams decode. Raises `RunFailed` when there is none."""
    window = common_decode_window(records)
    if window is None:
        raise RunFailed("the first stream ended before the last began: there was no moment at which all decoded")
    start_s, end_s = window
    num_tokens = sum(
        tokens
        for record in records
        for time_s, tokens in zip(record.chunk_times_s, record.chunk_tokens, strict=True)
        if start_s < time_s <= end_s
    )
    return num_tokens / (end_s - start_s)


async def _run(client: OpenAiClient, streams: int, prompt_tokens: int, output_tokens: int, seed: int) -> LoadRun:
    """`streams` requests at once. Raises `RunFailed` with the first failure."""
    plan = plan_synthetic(_shape(prompt_tokens, output_tokens), np.zeros(streams), seed)
    run = await run_closed_loop(plan, client, streams, num_warmup=0, timeout_s=RUN_TIMEOUT_S)
    for record in run.records:
        if not record.is_ok:
            raise RunFailed(f"a request failed: {record.outcome.value} {record.http_status} {record.detail}")
        if record.num_output_tokens != output_tokens:
            raise RunFailed(f"a request brought {record.num_output_tokens} tokens, {output_tokens} were asked for")
    return run


def _shape(prompt_tokens: int, output_tokens: int) -> Workload:
    return Workload(LengthLaw(prompt_tokens, prompt_tokens), LengthLaw(output_tokens, output_tokens))


def _ttft_ms(record: RequestRecord) -> float:
    if record.ttft_s is None:
        raise RunFailed("a request brought no token")
    return record.ttft_s * 1e3


def _add_itl(measurement: Measurement, name: str, runs: Sequence[Sequence[RequestRecord]]) -> None:
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        values = []
        for records in runs:
            gaps = [gap for record in records for gap in record.itl_gaps_s()]
            values.append(percentile([gap_s * 1e3 for gap_s, _ in gaps], share, [weight for _, weight in gaps]))
        measurement.add(f"{name}: ITL {label}", "ms", values)


async def _worker_statuses(client: OpenAiClient) -> list[dict[str, Any]]:
    """The workers of `/statusz`; none where the server has no such page (a peer does not)."""
    try:
        status = await client.get_json("/statusz")
    except (ConnectionError, ValueError):
        return []
    return list(status.get("workers", []))


def _worker_details(workers: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """What each worker says of itself (backend, threads, dtype): the figures mean nothing without it."""
    return {
        str(worker.get("worker_id") or worker.get("identity", {}).get("worker_id")): {
            "dtype": str(worker.get("dtype", "")),
            **{str(name): str(value) for name, value in (worker.get("details") or {}).items() if name != "pid"},
        }
        for worker in workers
    }


async def _served_model(url: str) -> str:
    async with OpenAiClient(Endpoint(url, ""), timeout_s=30.0) as client:
        models = await client.get_json("/v1/models")
    return str(models["data"][0]["id"])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_measurement", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="directory for the results")
    parser.add_argument("--url", default="", help="measure this server instead of starting a cluster")
    parser.add_argument("--dialect", choices=DIALECTS, default="tandem", help="how the server counts tokens")
    parser.add_argument("--serve-flag", action="append", default=[], help="passed on to `tandem serve`; repeatable")
    parser.add_argument("--runs", type=int, default=DEFAULT_SHAPE.runs)
    parser.add_argument("--streams", type=int, default=DEFAULT_SHAPE.batch_streams)
    parser.add_argument("--prefill-tokens", type=int, default=DEFAULT_SHAPE.prefill_tokens)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with results written, 2 with one line that says why there are none."""
    arguments = _arguments(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    shape = Shape(runs=arguments.runs, batch_streams=arguments.streams, prefill_tokens=arguments.prefill_tokens)
    given = nullcontext(arguments.url)
    source = given if arguments.url else started_cluster(arguments.serve_flag, arguments.out / "cluster.log")
    try:
        with source as url:
            endpoint = Endpoint(url, asyncio.run(_served_model(url)), arguments.dialect)
            measurement = asyncio.run(measure(endpoint, shape, _say))
            measurement.flags = tuple(arguments.serve_flag)
    except (ClusterError, ConnectionError, RunFailed) as error:
        print(f"first measurement: {error}", file=sys.stderr)
        return 2
    print(write_report(arguments.out, measurement))
    return 0


def _say(stage: str) -> None:
    print(f"measuring: {stage}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
