"""A sweep from start to end: deployments up and down, measurements, plan, report. The commands call this."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster_under_test import started_cluster
from benchmarks.knee import capacity_at_slo
from benchmarks.machine import describe_machine
from benchmarks.openai_client import Dialect, Endpoint, OpenAiClient
from benchmarks.planner import CoupledCheck, PdPlan, plan, write_plan
from benchmarks.report import write_report
from benchmarks.same_arrivals import simulated_capacity
from benchmarks.sweep import (
    CONTROL,
    COUPLED,
    DRIFT,
    Progress,
    Sweep,
    drift_share,
    predicted_capacities,
    prediction_of_1p1d,
    rate_points,
    sweep_policy,
    with_slower_prompts,
)
from benchmarks.sweep_measurements import Target
from benchmarks.sweep_settings import SweepSettings
from benchmarks.sweep_store import SweepStore
from deploy.autoscaler.capacity import CapacityModel

DISAGGREGATED, AGGREGATED, SPECULATING = "1P1D", "2A", "1P1D+speculation"
# Two pools apart: what is predicted is that each does its own work only.
DISAGGREGATED_FLAGS = ("--prefill", "1", "--decode", "1", "--prefill-fallback", "deny")
# As many workers as the disaggregated deployment has: a fair control.
AGGREGATED_FLAGS = ("--prefill", "0", "--decode", "0", "--aggregated", "2")
NUM_CONTROL_WORKERS = 2
SPECULATING_FLAGS = (*DISAGGREGATED_FLAGS, "--speculation", "auto")
REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """What the command was asked for. Without a URL the deployments are started here."""

    out: Path
    settings: SweepSettings
    url: str = ""
    control_url: str = ""
    dialect: Dialect = "tandem"
    api_key: str = ""
    serve_flags: Sequence[str] = ()
    max_workers: int = 8
    measures_speculation: bool = True  # where the deployments are started here


async def run_sweep(options: SweepOptions, progress: Progress) -> tuple[PdPlan, Path]:
    """The plan and the report's path.

    Raises `ClusterError`, `ConnectionError`, `MeasurementFailed`, `SweepDirectoryError` with one line each.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    has_control = bool(options.control_url or not options.url)
    has_speculation = options.measures_speculation and not options.url
    settings = options.settings
    async with _deployment(options, options.url, DISAGGREGATED, DISAGGREGATED_FLAGS) as client:
        store = SweepStore(
            options.out, settings, describe_machine(), client.endpoint.model, serve_flags=options.serve_flags
        )
        sweep = Sweep(settings, store, progress)
        sweep.plan_time(has_control=has_control, has_speculation=has_speculation)
        target = Target(client, DISAGGREGATED, store.content_seed)
        limits = await _pool_limits(client)
        timings = await sweep.measure_timings(target, limits.kv_tokens, limits.max_batch)
        x_p, x_d = predicted_capacities(settings, timings.model)
        await sweep.search_prefill(target, x_p)
        await sweep.search_coupled(target, min(x_p, x_d))
        if has_speculation:
            await sweep.measure_speculation(target)
    control = None
    if has_control:
        flags = (*AGGREGATED_FLAGS, "--itl-slo-ms", f"{settings.tpot_ms:g}")
        async with _deployment(options, options.control_url, AGGREGATED, flags) as client:
            await sweep.search_control(Target(client, AGGREGATED, store.content_seed), min(x_p, x_d))
        # By the estimator that reads the coupled runs: a search's own end is the highest rate that it saw pass.
        control = capacity_at_slo(rate_points(store.points(CONTROL))).value / NUM_CONTROL_WORKERS
    if has_speculation:
        async with _deployment(options, "", SPECULATING, SPECULATING_FLAGS) as client:
            await sweep.measure_speculation(Target(client, SPECULATING, store.content_seed))
    made = _plan(options, sweep, store, timings.model, control)
    write_plan(options.out, made, sweep_policy(settings))
    return made, write_report(options.out)


def _plan(
    options: SweepOptions, sweep: Sweep, store: SweepStore, model: CapacityModel, control: float | None
) -> PdPlan:
    settings, coupled = options.settings, store.points(COUPLED)
    measured = capacity_at_slo(rate_points(coupled))
    # Of the machine as it was while the coupled runs went.
    model_then = with_slower_prompts(model, 1 + drift_share(store.points(DRIFT)))
    check = CoupledCheck(
        DISAGGREGATED,
        prediction_of_1p1d(settings, model_then),
        measured.value,
        measured.low,
        # Nothing failed: there is no upper bound, and JSON has no infinity.
        measured.value if math.isinf(measured.high) else measured.high,
        simulated_capacity(coupled, settings, model_then),
    )
    provenance = f"sweep of {store.model}"
    return plan(settings.traffic, model, sweep_policy(settings), options.max_workers, provenance, control, check)


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Of one decode worker; 0 is unknown."""

    kv_tokens: int = 0
    max_batch: int = 0


async def _pool_limits(client: OpenAiClient) -> PoolLimits:
    try:
        return pool_limits(await client.get_json("/statusz"))
    except (ConnectionError, ValueError):
        return PoolLimits()


def pool_limits(status: dict[str, Any]) -> PoolLimits:
    """From `/statusz`: the smallest pool of the workers that decode."""
    pools = [
        (int(worker["load"]["total_blocks"]) * int(worker["block_tokens"]), _max_sequences(worker))
        for worker in status.get("workers", [])
        if "prefill" not in str(worker.get("role") or (worker.get("identity") or {}).get("role", "")).lower()
        and worker.get("load", {}).get("total_blocks")
        and worker.get("block_tokens")
    ]
    if not pools:
        return PoolLimits()
    return PoolLimits(min(tokens for tokens, _ in pools), min(batch for _, batch in pools))


def _max_sequences(worker: dict[str, Any]) -> int:
    return int((worker.get("details") or {}).get("max_sequences", 0))


@asynccontextmanager
async def _deployment(options: SweepOptions, url: str, name: str, flags: Sequence[str]) -> AsyncIterator[OpenAiClient]:
    """A client of the given URL, or of a cluster that lives as long as the block."""
    if url:
        async with await connected(url, options.dialect, options.api_key) as client:
            yield client
        return
    with started_cluster((*flags, *options.serve_flags), options.out / f"{name}.log") as own_url:
        async with await connected(own_url, options.dialect, options.api_key) as client:
            yield client


async def connected(url: str, dialect: Dialect, api_key: str = "", model: str = "") -> OpenAiClient:
    """A client that knows the served model's name. Raises `ConnectionError` when nothing answers there."""
    if not model:
        async with OpenAiClient(Endpoint(url, "", dialect, api_key), timeout_s=30.0) as asking:
            models = await asking.get_json("/v1/models")
        model = str(models["data"][0]["id"])
    return OpenAiClient(Endpoint(url, model, dialect, api_key), REQUEST_TIMEOUT_S)
