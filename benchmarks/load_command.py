"""One load run from options to files: records.jsonl, summary.json, summary.csv, and a few lines for people."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arrivals import ArrivalKind, ArrivalProcess, arrival_times
from benchmarks.load_run import LoadRun, Session, run_closed_loop, run_open_loop, run_sessions
from benchmarks.machine import describe_machine
from benchmarks.openai_client import Dialect, OpenAiClient
from benchmarks.request_record import write_records
from benchmarks.run_summary import (
    Distribution,
    RunSummary,
    Slo,
    summarise,
    to_json,
    write_summary_csv,
    write_summary_json,
)
from benchmarks.sweep_session import connected
from benchmarks.sweep_settings import mixed_seed
from benchmarks.traces import read_trace, scaled
from benchmarks.workload import LengthLaw, PlannedRequest, Workload, merged, plan_synthetic, plan_trace

ARRIVAL_KINDS: tuple[ArrivalKind, ...] = ("poisson", "gamma", "bursts", "constant")
CLOSED_LOOP_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the command was asked for. Exactly one of rate, concurrency, trace, classes; sessions come with a rate."""

    out: Path
    url: str
    rate_per_s: float
    concurrency: int
    trace: Path | None
    sessions: Path | None
    classes: tuple[str, ...]  # NAME=RATE,INPUT,OUTPUT
    arrivals: str
    cv: float
    burst_size: int
    time_factor: float
    length_factor: float
    duration_s: float
    num_requests: int
    num_warmup: int
    input_tokens: LengthLaw
    output_tokens: LengthLaw
    hit_rate: float
    ttft_ms: float
    tpot_ms: float
    seed: int
    content_seed: int
    model: str
    dialect: Dialect
    api_key: str

    @property
    def workload(self) -> Workload:
        return Workload(self.input_tokens, self.output_tokens, self.hit_rate)

    @property
    def is_closed_loop(self) -> bool:
        return self.concurrency > 0


async def run_load(options: LoadOptions) -> str:
    """Runs it, writes the files, gives the lines to print. Raises `ValueError` for options that contradict."""
    asked = (options.rate_per_s > 0, options.is_closed_loop, options.trace is not None, bool(options.classes))
    if sum(asked) != 1:
        raise ValueError("give exactly one of --rate, --concurrency, --trace and --class")
    if options.sessions is not None and not options.rate_per_s > 0:
        raise ValueError("--sessions needs --rate: how many dialogues start in a second")
    async with await connected(options.url, options.dialect, options.api_key, options.model) as client:
        run = await _run(options, client)
        model = client.endpoint.model
    summary = summarise(run, Slo(options.ttft_ms, options.tpot_ms), options.seed, is_closed_loop=options.is_closed_loop)
    _write(options, run, summary, model)
    return summary_lines(summary)


def summary_lines(summary: RunSummary) -> str:
    """What a person wants to see at once; the flags first."""
    lines = [
        "flags: " + ", ".join(flag.value for flag in summary.flags),
        f"requests: {summary.num_ok} of {summary.num_offered} ended well; offered {summary.offered_per_s:.2f}/s, "
        f"achieved {summary.achieved_per_s:.2f}/s, {summary.output_tokens_per_s:.1f} output tokens/s, "
        f"{summary.in_flight.mean:.1f} in flight",
    ]
    if summary.attainment is not None and summary.goodput_per_s is not None:
        share = summary.attainment
        lines.append(
            f"within the objective: {share.value:.0%} [{share.low:.0%}, {share.high:.0%}], "
            f"goodput {summary.goodput_per_s:.2f}/s"
        )
    for name, latency in (
        ("TTFT", summary.ttft_ms),
        ("ITL", summary.itl_ms),
        ("TPOT", summary.tpot_ms),
        ("latency", summary.latency_ms),
        ("dispatch delay", summary.dispatch_delay_ms),
    ):
        lines.append(f"{name} ms: {_quantiles(latency)}")
    if summary.num_tpot_not_applicable:
        lines.append(f"TPOT not applicable: {summary.num_tpot_not_applicable} answers came in one piece")
    if summary.extra_hit_rate is not None:
        lines.append(
            f"prefix cache: {summary.observed_hit_rate:.1%} of prompt tokens, {summary.extra_hit_rate:+.1%} "
            "against what this run shares by itself"
        )
    if not summary.are_counts_exact:
        lines.append("token counts are guessed: the server counts only at the end, and not one a chunk")
    return "\n".join(lines)


def read_sessions(path: Path, times_s: Sequence[float], output_tokens: int) -> list[Session]:
    """Dialogues from JSON Lines with a list `turns` each, taken in turn for as many starts as there are."""
    dialogues: list[tuple[str, ...]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                dialogues.append(tuple(str(turn) for turn in json.loads(line)["turns"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: no dialogue with `turns`: {error!r}") from error
    if not dialogues:
        raise ValueError(f"{path} has no dialogues")
    return [
        Session(index, float(time_s), "", dialogues[index % len(dialogues)], output_tokens)
        for index, time_s in enumerate(times_s)
    ]


async def _run(options: LoadOptions, client: OpenAiClient) -> LoadRun:
    if options.is_closed_loop:
        plan = plan_synthetic(options.workload, np.zeros(options.num_requests), options.seed, _content_seed(options))
        return await run_closed_loop(
            plan, client, options.concurrency, options.num_warmup, timeout_s=CLOSED_LOOP_TIMEOUT_S
        )
    if options.trace is not None:
        plan = _trace_plan(options, options.trace)
        return await run_open_loop(plan, client, options.duration_s)
    if options.classes:
        return await run_open_loop(_mixed_plan(options), client, options.duration_s)
    times_s = arrival_times(_process(options, options.rate_per_s), options.duration_s, options.seed)
    if options.sessions is not None:
        sessions = read_sessions(options.sessions, times_s.tolist(), options.output_tokens.high)
        return await run_sessions(sessions, client, options.duration_s)
    plan = plan_synthetic(options.workload, times_s, options.seed, _content_seed(options))
    return await run_open_loop(plan, client, options.duration_s)


def _trace_plan(options: LoadOptions, trace: Path) -> list[PlannedRequest]:
    """The trace's first `duration_s` seconds at its time factor."""
    requests = [
        scaled(request, options.length_factor, options.length_factor)
        for request in read_trace(trace)
        if request.time_s * options.time_factor < options.duration_s
    ]
    return plan_trace(requests, options.time_factor, _content_seed(options))


def _mixed_plan(options: LoadOptions) -> list[PlannedRequest]:
    """Each class with its own rate and lengths, its own arrivals and its own prompts."""
    plans = []
    for number, text in enumerate(options.classes):
        name, rate_per_s, workload = traffic_class(text, options.hit_rate)
        seed = mixed_seed(options.seed, number)
        times_s = arrival_times(_process(options, rate_per_s), options.duration_s, seed)
        plans.append(plan_synthetic(workload, times_s, seed, mixed_seed(_content_seed(options), name)))
    return merged(plans)


def traffic_class(text: str, hit_rate: float) -> tuple[str, float, Workload]:
    """Name, rate and workload of `NAME=RATE,INPUT,OUTPUT`. Raises `ValueError` saying what is wrong with it."""
    name, _, rest = text.partition("=")
    try:
        rate, inputs, outputs = rest.split(",")
        workload = Workload(parse_lengths(inputs), parse_lengths(outputs), hit_rate, traffic_class=name)
        return name, float(rate), workload
    except ValueError as error:
        raise ValueError(f"--class {text!r}: {error}; it is NAME=RATE,INPUT,OUTPUT such as long=0.5,2048,16") from None


def parse_lengths(text: str) -> LengthLaw:
    """`256`, or `128:384` for uniform."""
    low, _, high = text.partition(":")
    try:
        return LengthLaw(int(low), int(high or low))
    except ValueError:
        raise ValueError(f"{text!r} is no length: give one number, or low:high with 1 <= low <= high") from None


def _process(options: LoadOptions, rate_per_s: float) -> ArrivalProcess:
    for kind in ARRIVAL_KINDS:
        if kind == options.arrivals:
            return ArrivalProcess(kind, rate_per_s, options.cv, options.burst_size)
    raise ValueError(f"--arrivals is {options.arrivals!r}, must be one of {', '.join(ARRIVAL_KINDS)}")


def _content_seed(options: LoadOptions) -> int:
    return secrets.randbits(31) if options.content_seed < 0 else options.content_seed


def _write(options: LoadOptions, run: LoadRun, summary: RunSummary, model: str) -> None:
    (options.out / "records").mkdir(parents=True, exist_ok=True)
    point: dict[str, Any] = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(options).items()
        if name not in ("out", "url", "api_key", "model")
    } | {"model": model}
    write_records(
        options.out / "records" / "load.jsonl", {"load": point, "machine": asdict(describe_machine())}, run.records
    )
    rows = [(point, to_json(summary))]
    write_summary_json(options.out / "summary.json", rows)
    write_summary_csv(options.out / "summary.csv", rows)


def _quantiles(latency: Distribution) -> str:
    if not latency.count:
        return "none"
    return (
        f"mean {latency.mean.value:.1f}, p50 {latency.p50.value:.1f} [{latency.p50.low:.1f}, {latency.p50.high:.1f}], "
        f"p90 {latency.p90.value:.1f}, p99 {latency.p99.value:.1f} [{latency.p99.low:.1f}, {latency.p99.high:.1f}]"
    )
