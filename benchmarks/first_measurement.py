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
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.cluster_under_test import ClusterError, started_cluster
from benchmarks.first_measurement_report import write_report
from benchmarks.machine import describe_machine
from benchmarks.measurement import DEFAULT_SHAPE, Measurement, RunFailed, Shape
from benchmarks.measurement_stages import RUN_TIMEOUT_S, STAGES, Progress, warm_up
from benchmarks.openai_client import DIALECTS, Endpoint, OpenAiClient

DEFAULT_STAGES = ("decode", "batch", "prefill")


async def measure(
    endpoint: Endpoint, shape: Shape, progress: Progress, stages: Sequence[str] = DEFAULT_STAGES
) -> Measurement:
    """All stages, one after another. Raises `RunFailed` when a request fails."""
    measurement = Measurement(describe_machine(), endpoint.model, shape)
    async with OpenAiClient(endpoint, RUN_TIMEOUT_S) as client:
        progress("warm-up")
        await warm_up(client, shape)
        for stage in stages:
            await STAGES[stage](client, shape, measurement, progress)
        workers = await _worker_statuses(client)
    _add_transport_rates(measurement, workers)
    measurement.worker_details = _worker_details(workers)
    return measurement


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
    parser.add_argument(
        "--stage",
        action="append",
        choices=tuple(STAGES),
        help=f"what to measure; repeatable ({', '.join(DEFAULT_STAGES)})",
    )
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
            measurement = asyncio.run(measure(endpoint, shape, _say, arguments.stage or DEFAULT_STAGES))
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
