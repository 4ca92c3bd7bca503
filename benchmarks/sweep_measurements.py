"""The single measurements of a sweep: one prompt alone, one decode batch, one open-loop rate. Each gives a point and
its records.

Pools are measured from outside, through the front: prefill alone asks for one token, so decode has nothing to do;
decode alone sends prompts whose KV the decode worker has in its prefix cache, so prefill has nothing to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.arrivals import ArrivalProcess, FloatArray, arrival_times
from benchmarks.load_run import LoadRun, RunLimits, Sender, run_closed_loop, run_open_loop
from benchmarks.request_record import RequestRecord
from benchmarks.run_summary import RunSummary, summarise, to_json
from benchmarks.statistics import percentile
from benchmarks.sweep_settings import SweepSettings, mixed_seed
from benchmarks.sweep_store import Point
from benchmarks.ttft_stages import STAGES
from benchmarks.workload import ChatMessage, LengthLaw, PlannedRequest, Workload, block_token_ids, plan_synthetic
from cluster.ended_tasks import end_tasks

POINT_TIMEOUT_S = 300.0
# A background stream's length, and how often it may start over while the prompts beside it are timed.
BACKGROUND_TOKENS = 128
MAX_BACKGROUND_ROUNDS = 64
INTERFERENCE_TURNS = 2
# Text whose answer repeats it: editing and quoting, where drafts come from the prompt.
REPEATING_PROMPTS = (
    "Repeat this list word for word, then repeat it again: red apple, green pear, yellow banana, blue plum.",
    "Copy this code exactly, twice: def add(a, b): return a + b; def sub(a, b): return a - b;",
    "Write the numbers from 1 to 60 in order, separated by commas, without any other words.",
    "Say this sentence five times, each time on its own line: The quick brown fox jumps over the lazy dog.",
)


class MeasurementFailed(RuntimeError):
    """A point could not be measured; the message has the server's own words."""


@dataclass(frozen=True, slots=True)
class Target:
    """A deployment that is measured: its client, its name such as `1P1D`, and the seed of all prompts sent to it."""

    sender: Sender
    deployment: str
    content_seed: int


Measured = tuple[Point, Sequence[RequestRecord]]


async def measure_prefill(target: Target, settings: SweepSettings, length: int, hit_rate: float) -> Measured:
    """Time of one prompt on an idle server, `hit_rate` of it cached: the median of the repeats."""
    params = {"input": float(length), "hit": hit_rate}
    num_cached = int(length * hit_rate)
    seed = mixed_seed(target.content_seed, "prefill", length, hit_rate)
    shared = block_token_ids(seed, 0, num_cached, settings.token_range)
    plan = [
        PlannedRequest(
            index=repeat,
            intended_s=0.0,
            output_tokens=1,
            token_ids=shared + block_token_ids(seed, 1 + repeat, length - num_cached, settings.token_range),
            shareable_tokens=num_cached if repeat else 0,
        )
        # The first one only fills the cache.
        for repeat in range(settings.repeats + 1)
    ]
    run = await run_closed_loop(plan, target.sender, concurrency=1, num_warmup=1, timeout_s=POINT_TIMEOUT_S)
    return _prefill_point("prefill_time", target, params, settings, run)


async def measure_drift(target: Target, settings: SweepSettings, length: int, turn: int) -> Measured:
    """Time of one prompt on an idle server, at the `turn`-th moment of the sweep."""
    plan = _prompts(target, settings, "drift", length, 3 * settings.repeats, turn)
    run = await run_closed_loop(plan, target.sender, concurrency=1, num_warmup=1, timeout_s=POINT_TIMEOUT_S)
    return _prefill_point("drift", target, {"input": float(length), "turn": float(turn)}, settings, run)


async def measure_interference(target: Target, settings: SweepSettings, length: int, batch: int) -> Measured:
    """Time of one prompt beside `batch` sequences that decode all the while, in turns with its time alone.

    Where pools share cores, memory or links it is longer, and what is predicted for both together must know. In turns,
    so that what else the machine does in these seconds is not taken for interference."""
    params = {"input": float(length), "batch": float(batch)}
    alone: list[RequestRecord] = []
    runs = []
    for turn in range(INTERFERENCE_TURNS):
        # Alone first, then beside; the next turn the other way round: a machine that slows down cancels out.
        for is_beside in (False, True) if turn % 2 == 0 else (True, False):
            plan = _prompts(target, settings, f"beside {is_beside}", length, 3 * settings.repeats, turn)
            async with _decoding(target, settings, batch if is_beside else 0):
                run = await run_closed_loop(plan, target.sender, 1, num_warmup=1, timeout_s=POINT_TIMEOUT_S)
            _check(run.records)
            if is_beside:
                runs.append(run)
            else:
                alone += [record for record in run.records if not record.is_warmup]
    beside = replace(
        runs[0], records=[record for run in runs for record in run.records], window_end_s=runs[-1].window_end_s
    )
    point, records = _prefill_point("interference", target, params, settings, beside)
    alone_ms = float(np.median([_prefill_ms(record) for record in alone]))
    return replace(point, measured=point.measured | {"alone_ms": alone_ms}), [*alone, *records]


@asynccontextmanager
async def _decoding(target: Target, settings: SweepSettings, batch: int) -> AsyncIterator[None]:
    """Inside, `batch` sequences decode (0: none); their prompts are cached: prefill has nothing to do with them."""
    if not batch:
        yield
        return
    prompt = _prompts(target, settings, "background", settings.input_low, 1)[0]
    streams = [replace(prompt, index=place, output_tokens=BACKGROUND_TOKENS) for place in range(batch)]
    background = asyncio.create_task(
        run_closed_loop(streams * MAX_BACKGROUND_ROUNDS, target.sender, batch, 0, POINT_TIMEOUT_S)
    )
    try:
        yield
    finally:
        await end_tasks(background)


async def measure_speculation(target: Target, settings: SweepSettings, batch: int) -> Measured:
    """Time per token of answers that repeat their prompt in part, `batch` at a time: what drafts can guess."""
    params = {"batch": float(batch)}
    plan = [
        PlannedRequest(
            place,
            0.0,
            settings.decode_tokens * 2,
            messages=(ChatMessage("user", REPEATING_PROMPTS[place % len(REPEATING_PROMPTS)]),),
            shareable_tokens=None,
        )
        for place in range(batch + max(batch, settings.speculation_requests))
    ]
    run = await run_closed_loop(plan, target.sender, batch, num_warmup=batch, timeout_s=POINT_TIMEOUT_S)
    _check(run.records)
    kept = [record for record in run.records if not record.is_warmup]
    tpot_ms = [record.tpot_s * 1e3 for record in kept if record.tpot_s is not None]
    if not tpot_ms:
        raise MeasurementFailed(f"batch {batch}: the answers came in one piece each, so no token time can be seen")
    summary = summarise(run, settings.slo, is_closed_loop=True)
    measured = {
        "tpot_ms": float(np.median(tpot_ms)),
        "tokens_per_chunk": float(np.mean([r.num_output_tokens / len(r.chunk_tokens) for r in kept])),
    }
    return _point("speculation", target, params, summary, kept, measured), run.records


async def measure_decode(target: Target, settings: SweepSettings, batch: int, context: int) -> Measured:
    """Time of one token of `batch` sequences that decode together, each with `context` prompt tokens from cache."""
    params = {"batch": float(batch), "context": float(context)}
    prompt = block_token_ids(
        mixed_seed(target.content_seed, "decode", batch, context), 0, context, settings.token_range
    )
    warmup = PlannedRequest(0, 0.0, output_tokens=1, token_ids=prompt)
    plan = [
        PlannedRequest(1 + place, 0.0, settings.decode_tokens, prompt, shareable_tokens=context)
        for place in range(batch)
    ]
    _check((await run_closed_loop([warmup], target.sender, 1, num_warmup=0, timeout_s=POINT_TIMEOUT_S)).records)
    run = await run_closed_loop(plan, target.sender, batch, num_warmup=0, timeout_s=POINT_TIMEOUT_S)
    _check(run.records)
    gaps = [gap for record in run.records for gap in record.itl_gaps_s()]
    if not gaps:
        raise MeasurementFailed(f"batch {batch}: the answers came in one piece each, so no step time can be seen")
    step_ms = percentile([gap_s * 1e3 for gap_s, _ in gaps], 0.5, [weight for _, weight in gaps])
    measured = {"step_ms": step_ms, "kv_tokens": batch * (context + settings.decode_tokens / 2)}
    summary = summarise(run, settings.slo, is_closed_loop=True)
    return _point("decode_step", target, params, summary, run.records, measured), run.records


async def measure_rate(
    target: Target, settings: SweepSettings, stage: str, workload: Workload, rate_per_s: float, repeat: int
) -> Measured:
    """One open-loop run of Poisson arrivals."""
    params = {"rate": rate_per_s, "repeat": float(repeat)}
    seed, times_s = run_arrivals(settings, rate_per_s, repeat)
    # With the stage: what one stage left in the prefix cache must not serve the next one's runs at the same rate.
    content_seed = mixed_seed(target.content_seed, stage, round(rate_per_s, 6), repeat)
    plan = plan_synthetic(workload, times_s, seed, content_seed)
    limits = RunLimits(drain_timeout_s=settings.drain_s)
    run = await run_open_loop(plan, target.sender, settings.duration_s(rate_per_s), limits)
    summary = summarise(run, settings.slo, seed)
    kept = [record for record in run.records if record.is_ok]
    return _point(stage, target, params, summary, kept, {}), run.records


def run_arrivals(settings: SweepSettings, rate_per_s: float, repeat: int) -> tuple[int, FloatArray]:
    """A run's seed, which also draws its lengths, and when its requests are due."""
    seed = settings.seed_of("rate", round(rate_per_s, 6), repeat)
    return seed, arrival_times(ArrivalProcess("poisson", rate_per_s), settings.duration_s(rate_per_s), seed)


def prefill_only(workload: Workload) -> Workload:
    """The workload with answers of one token: what prefill alone carries."""
    return replace(workload, output_tokens=LengthLaw(1, 1))


def _prompts(
    target: Target, settings: SweepSettings, what: str, length: int, count: int, *parts: object
) -> list[PlannedRequest]:
    """Prompts of one length that share nothing, with answers of one token; one more than `count`, to warm up."""
    return [
        PlannedRequest(
            place,
            0.0,
            1,
            block_token_ids(mixed_seed(target.content_seed, what, length, *parts), place, length, settings.token_range),
        )
        for place in range(count + 1)
    ]


def _prefill_point(
    stage: str, target: Target, params: dict[str, float], settings: SweepSettings, run: LoadRun
) -> Measured:
    """The median compute time of the run's prompts, and how much of them was cached."""
    _check(run.records)
    kept = [record for record in run.records if not record.is_warmup]
    uncached = float(np.median([record.prompt_tokens - (record.cached_tokens or 0) for record in kept]))
    measured = {
        "prefill_ms": float(np.median([_prefill_ms(record) for record in kept])),
        "uncached": uncached,
        "cached": params["input"] - uncached,
    }
    summary = summarise(run, settings.slo, is_closed_loop=True)
    return _point(stage, target, params, summary, kept, measured), run.records


def _prefill_ms(record: RequestRecord) -> float:
    """The worker's own compute time where the server tells it; else the TTFT, which holds everything."""
    if record.stages is not None and record.stages.prefill_compute_ms > 0:
        return record.stages.prefill_compute_ms
    return (record.ttft_s or 0.0) * 1e3


def _point(
    stage: str,
    target: Target,
    params: dict[str, float],
    summary: RunSummary,
    kept: Sequence[RequestRecord],
    measured: dict[str, float],
) -> Point:
    return Point(stage, target.deployment, params, to_json(summary), measured, point_stages_ms(kept))


def point_stages_ms(kept: Sequence[RequestRecord]) -> dict[str, float]:
    """Medians of the TTFT's stages; empty where the server does not tell them."""
    told = [record.stages for record in kept if record.stages is not None]
    return {name: float(np.median([one.stage_ms(name) for one in told])) for name in STAGES} if told else {}


def _check(records: Sequence[RequestRecord]) -> None:
    for record in records:
        if not record.is_ok:
            raise MeasurementFailed(f"a request failed: {record.outcome.value} {record.http_status} {record.detail}")
