"""`tandem bench ...` and `tandem plan`: what the `tandem` command loads through the entry points `tandem.commands`.

Importing this is cheap: each command imports what it needs when it runs. Exit status: 0 done, 1 B is worse than A or
the plan says no, 2 it could not run (one line says why and what to do).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.router_settings import RouterLimits

if TYPE_CHECKING:
    from benchmarks.openai_client import Dialect
    from benchmarks.planner import PdPlan
    from benchmarks.sweep import Progress

EXIT_WORSE, EXIT_CANNOT_RUN = 1, 2
DEFAULT_LIMITS = RouterLimits()

bench = typer.Typer(no_args_is_help=True, help="Measure a cluster, or any OpenAI-compatible server, honestly.")

Url = Annotated[str, typer.Option(help="server to measure; empty: start a cluster for it", envvar="TANDEM_URL")]
ApiKey = Annotated[str, typer.Option(help="for a server with API keys", envvar="OPENAI_API_KEY", show_default=False)]
DialectName = Annotated[str, typer.Option(help="how the server counts tokens: tandem, vllm, llamacpp, openai")]
Lengths = Annotated[str, typer.Option(help="tokens: one number, or low:high for uniform")]
ServeFlag = Annotated[list[str], typer.Option(help="passed on to `tandem serve`; repeatable", show_default=False)]
Seed = Annotated[int, typer.Option(help="of arrivals and lengths: the same seed is the same load")]
TtftSlo = Annotated[float, typer.Option(help="objective: time to first token", min=1)]
TpotSlo = Annotated[float, typer.Option(help="objective: time per output token", min=0.1)]


@bench.command("sweep")
def sweep(
    out: Annotated[Path, typer.Option(help="results; an interrupted sweep goes on in the same directory")],
    url: Url = "",
    control_url: Annotated[str, typer.Option(help="the same workers aggregated; with --url")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="a few minutes, coarser")] = False,
    input_tokens: Lengths = "128:384",
    output_tokens: Lengths = "24:72",
    hit_rate: Annotated[float, typer.Option(help="share of a prompt that others have too", min=0, max=0.99)] = 0.0,
    ttft_ms: TtftSlo = 1000.0,
    tpot_ms: TpotSlo = 100.0,
    rates: Annotated[str, typer.Option(help="coupled rates such as 1,2,4, to compare with another sweep")] = "",
    max_workers: Annotated[int, typer.Option(help="that the plan may use", min=2)] = 8,
    seed: Seed = 0,
    dialect: DialectName = "tandem",
    api_key: ApiKey = "",
    speculation: Annotated[
        bool, typer.Option(help="also measure with drafts, where the cluster is started here")
    ] = True,
    serve_flag: ServeFlag = [],  # noqa: B006  typer copies it
) -> None:
    """Find what the pools take alone and together, plan their ratio, write report.html.

    [dim]tandem bench sweep --out sweep-1 --quick[/dim]  starts 1P1D, then two aggregated workers as the control

    [dim]tandem bench sweep --out sweep-2 --url http://127.0.0.1:8000 --rates 1,2,4[/dim]
    """
    with _one_line_errors():
        from benchmarks.load_command import parse_lengths
        from benchmarks.sweep_session import SweepOptions, run_sweep
        from benchmarks.sweep_settings import QUICK, SweepSettings

        inputs, outputs = parse_lengths(input_tokens), parse_lengths(output_tokens)
        settings = replace(
            SweepSettings(**(QUICK if quick else {})),
            input_low=inputs.low,
            input_high=inputs.high,
            output_low=outputs.low,
            output_high=outputs.high,
            hit_rate=hit_rate,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            seed=seed,
            rates_per_s=_numbers(rates),
        )
        options = SweepOptions(
            out, settings, url, control_url, _dialect(dialect), api_key, tuple(serve_flag), max_workers, speculation
        )
        with _progress_bar() as progress:
            made, report = asyncio.run(run_sweep(options, progress))
    _print_plan(made)
    typer.echo(f"report: {report}")


@bench.command("load")
def load(
    out: Annotated[Path, typer.Option(help="records and summary of this run")],
    url: Annotated[str, typer.Option(help="server to load", envvar="TANDEM_URL")] = "http://127.0.0.1:8000",
    rate: Annotated[float, typer.Option(help="open loop: requests/s", min=0)] = 0.0,
    concurrency: Annotated[int, typer.Option(help="closed loop: requests in flight", min=0)] = 0,
    trace: Annotated[Path | None, typer.Option(help="open loop: Mooncake .jsonl or Azure .csv", exists=True)] = None,
    sessions: Annotated[
        Path | None, typer.Option(help="dialogues: .jsonl with `turns`; needs --rate", exists=True)
    ] = None,
    traffic_class: Annotated[
        list[str], typer.Option("--class", help="open loop: NAME=RATE,INPUT,OUTPUT; repeatable", show_default=False)
    ] = [],  # noqa: B006  typer copies it
    arrivals: Annotated[str, typer.Option(help="poisson, gamma, bursts, constant")] = "poisson",
    cv: Annotated[float, typer.Option(help="gamma: variation of the gaps")] = 2.0,
    burst_size: Annotated[int, typer.Option(help="bursts: requests at once", min=1)] = 8,
    time_factor: Annotated[float, typer.Option(help="trace: its gaps times this")] = 1.0,
    length_factor: Annotated[float, typer.Option(help="trace: its lengths times this, blocks too")] = 1.0,
    duration_s: Annotated[float, typer.Option(help="of the arrivals", min=0.1)] = 30.0,
    num_requests: Annotated[int, typer.Option(help="closed loop: in all", min=1)] = 64,
    warmup: Annotated[int, typer.Option(help="closed loop: requests not measured", min=0)] = 8,
    input_tokens: Lengths = "128:384",
    output_tokens: Lengths = "24:72",
    hit_rate: Annotated[float, typer.Option(help="share of a prompt that others have too", min=0, max=0.99)] = 0.0,
    ttft_ms: TtftSlo = 1000.0,
    tpot_ms: TpotSlo = 100.0,
    seed: Seed = 0,
    content_seed: Annotated[int, typer.Option(help="of the prompts' tokens; -1: new each time")] = -1,
    model: Annotated[str, typer.Option(help="served model; empty: the first that the server lists")] = "",
    dialect: DialectName = "tandem",
    api_key: ApiKey = "",
) -> None:
    """Send one load and say what came back, with every latency from the intended send time.

    [dim]tandem bench load --out run --rate 4[/dim]  Poisson arrivals

    [dim]tandem bench load --out run --concurrency 16 --output-tokens 64[/dim]  sixteen in flight

    [dim]tandem bench load --out run --class chat=2,128:384,24:72 --class long=0.5,2048,16[/dim]

    [dim]tandem bench load --out run --trace conversation_trace.jsonl --time-factor 4 --length-factor 0.1[/dim]
    """
    with _one_line_errors():
        from benchmarks.load_command import LoadOptions, parse_lengths, run_load

        options = LoadOptions(
            out=out, url=url, rate_per_s=rate, concurrency=concurrency, trace=trace, sessions=sessions,
            classes=tuple(traffic_class),
            arrivals=arrivals, cv=cv, burst_size=burst_size, time_factor=time_factor, length_factor=length_factor,
            duration_s=duration_s, num_requests=num_requests, num_warmup=warmup,
            input_tokens=parse_lengths(input_tokens), output_tokens=parse_lengths(output_tokens),
            hit_rate=hit_rate, ttft_ms=ttft_ms, tpot_ms=tpot_ms, seed=seed,
            content_seed=content_seed, model=model, dialect=_dialect(dialect), api_key=api_key,
        )  # fmt: skip
        typer.echo(asyncio.run(run_load(options)))


@bench.command("report")
def report(
    directory: Annotated[Path, typer.Argument(help="of a sweep or a simulation")],
    export: Annotated[
        Path | None, typer.Option(help="also copy report, summary and plan there, without records")
    ] = None,
) -> None:
    """Draw a sweep's report again, also of one that is not finished.

    [dim]tandem bench report sweep-1 --export docs/sweep[/dim]  what is small enough to commit
    """
    with _one_line_errors():
        from benchmarks.report import export_report, write_report

        for path in [write_report(directory)] if export is None else export_report(directory, export):
            typer.echo(str(path))


@bench.command("compare")
def compare(
    first: Annotated[Path, typer.Argument(exists=True, help="A: a sweep or a load run")],
    second: Annotated[Path, typer.Argument(exists=True, help="B: the same loads on another build or deployment")],
    tolerance: Annotated[float, typer.Option(help="B may be slower by this share", min=0)] = 0.05,
) -> None:
    """Compare B with A request by request; ends with status 1 when B is worse.

    [dim]tandem bench compare before after[/dim]
    """
    with _one_line_errors():
        from benchmarks.comparison import compare_directories, comparison_markdown

        result = compare_directories(first, second, tolerance)
    typer.echo(comparison_markdown(result))
    if result.is_worse:
        raise typer.Exit(EXIT_WORSE)


def plan(
    directory: Annotated[Path | None, typer.Argument(help="of a sweep: its fits are the model")] = None,
    model: Annotated[str, typer.Option(help="never measured: a model of the catalogue")] = "",
    device: Annotated[str, typer.Option(help="never measured: a device of the catalogue")] = "H100",
    num_devices: Annotated[int, typer.Option(help="of one replica", min=1)] = 1,
    quantisation: Annotated[str, typer.Option(help="bf16, fp8, int8, int4")] = "bf16",
    input_tokens: Annotated[float, typer.Option(help="mean prompt; 0: as the sweep had it", min=0)] = 0.0,
    output_tokens: Annotated[float, typer.Option(help="mean answer; 0: as the sweep had it", min=0)] = 0.0,
    hit_rate: Annotated[float, typer.Option(help="-1: as the sweep had it", min=-1, max=1)] = -1.0,
    ttft_ms: Annotated[float, typer.Option(help="0: as the sweep had it", min=0)] = 0.0,
    tpot_ms: Annotated[float, typer.Option(help="0: as the sweep had it", min=0)] = 0.0,
    trace: Annotated[Path | None, typer.Option(help="lengths and hit rate of a trace", exists=True)] = None,
    max_workers: Annotated[int, typer.Option(help="that the plan may use", min=2)] = 8,
    out: Annotated[Path | None, typer.Option(help="where pd_plan.json and policy.yaml go")] = None,
) -> None:
    """How many prefill, how many decode, or neither: from a sweep, or from data sheets.

    [dim]tandem plan sweep-1 --max-workers 16 --input-tokens 2000[/dim]  the sweep's models, another workload

    [dim]tandem plan --model Llama-3-70B --device H200 --num-devices 4 --input-tokens 4000 --output-tokens 300[/dim]
    """
    with _one_line_errors():
        from benchmarks.plan_command import PlanOptions, make_plan

        options = PlanOptions(
            directory, model, device, num_devices, quantisation, input_tokens, output_tokens, hit_rate, ttft_ms,
            tpot_ms, trace, max_workers, out,
        )  # fmt: skip
        made, notes = make_plan(options)
    _print_plan(made)
    for note in notes:
        typer.echo(note)


def simulate(
    out: Annotated[Path, typer.Option(help="points, summary, report; may be the sweep's own directory with --splits")],
    sweep_directory: Annotated[Path | None, typer.Argument(help="of a sweep: its fits are the timing model")] = None,
    model: Annotated[str, typer.Option(help="never measured: a model of the catalogue")] = "",
    device: Annotated[str, typer.Option(help="never measured: a device of the catalogue")] = "H100",
    num_devices: Annotated[int, typer.Option(help="of one worker", min=1)] = 1,
    quantisation: Annotated[str, typer.Option(help="bf16, fp8, int8, int4")] = "bf16",
    prefill: Annotated[int, typer.Option(help="prefill workers", min=0)] = 1,
    decode: Annotated[int, typer.Option(help="decode workers", min=0)] = 1,
    aggregated: Annotated[int, typer.Option(help="workers that do both", min=0)] = 0,
    rates: Annotated[str, typer.Option(help="requests/s such as 1,2,4, one run each")] = "1",
    day: Annotated[bool, typer.Option("--day", help="the rate swings over 24 hours around its mean")] = False,
    trace: Annotated[Path | None, typer.Option(help="replay: Mooncake .jsonl or Azure .csv", exists=True)] = None,
    time_factor: Annotated[float, typer.Option(help="trace: its gaps times this")] = 1.0,
    duration_s: Annotated[float, typer.Option(help="of the arrivals; --day: 86400 is a whole one", min=1)] = 600.0,
    input_tokens: Annotated[str, typer.Option(help="one number, or low:high; empty: as the sweep had it")] = "",
    output_tokens: Annotated[str, typer.Option(help="one number, or low:high; empty: as the sweep had it")] = "",
    hit_rate: Annotated[float, typer.Option(help="-1: as the sweep had it", min=-1, max=0.99)] = -1.0,
    ttft_ms: Annotated[float, typer.Option(help="0: as the sweep had it", min=0)] = 0.0,
    tpot_ms: Annotated[float, typer.Option(help="0: as the sweep had it", min=0)] = 0.0,
    splits: Annotated[
        int, typer.Option(help="instead of a load: the capacity of every split of up to so many workers", min=0, max=16)
    ] = 0,
    policy: Annotated[Path | None, typer.Option(help="autoscaler policy that moves the pools", exists=True)] = None,
    start_delay_s: Annotated[float, typer.Option(help="from a decision to a ready worker", min=0)] = 30.0,
    mtbf_s: Annotated[float, typer.Option(help="mean time between two failures of one worker; 0: none", min=0)] = 0.0,
    event_loss: Annotated[float, typer.Option(help="share of KV events that are lost", min=0, max=0.9)] = 0.0,
    placement: Annotated[str, typer.Option(help="cache_aware, least_loaded, round_robin")] = "cache_aware",
    local_prefill: Annotated[bool, typer.Option(help="decode workers may prefill where that is cheaper")] = True,
    tenant: Annotated[
        list[str], typer.Option(help="NAME=SHARE[,PRIORITY[,WEIGHT]]: who sends the requests; repeatable")
    ] = [],  # noqa: B006  typer copies it
    admission_ttft_ms: Annotated[
        float,
        typer.Option(help="the router's ttft_slo_ms: refused above twice that, sheddable above once; 0: never", min=0),
    ] = DEFAULT_LIMITS.ttft_slo_ms,
    max_worker_queue_ms: Annotated[
        float, typer.Option(help="prefill booked on a worker before requests wait in the router", min=0.001)
    ] = DEFAULT_LIMITS.max_worker_queue_ms,
    fabric_gb_per_s: Annotated[float, typer.Option(help="that all transfers share; 0: nothing", min=0)] = 0.0,
    block_tokens: Annotated[int, typer.Option(help="larger is faster to simulate and coarser", min=1)] = 16,
    max_leap: Annotated[int, typer.Option(help="decode steps taken as one event; 1: each by itself", min=1)] = 16,
    seed: Seed = 0,
) -> None:
    """Run a cluster that you do not have: the real routing, scheduling and scaling on a virtual clock.

    Only time is modelled: by the fits of a sweep, or by data sheets. Every figure is labelled simulated.

    [dim]tandem simulate sweep-1 --out what-if --prefill 3 --decode 1 --rates 2,4,6[/dim]  another split

    [dim]tandem simulate sweep-1 --out sweep-1 --splits 6[/dim]  all splits, into the sweep's heat map

    [dim]tandem simulate --model Llama-3.1-8B --out replay --prefill 4 --decode 2 --trace conversation_trace.jsonl
    --block-tokens 256 --ttft-ms 2000 --tpot-ms 40[/dim]

    [dim]tandem simulate --model Llama-3.1-8B --out day --day --duration-s 86400 --rates 20 --policy policy.yaml
    --mtbf-s 36000 --event-loss 0.01[/dim]  a day with failures
    """
    with _one_line_errors():
        from benchmarks.load_command import parse_lengths
        from benchmarks.simulator.simulate_command import SimulateOptions, run_simulations, sweep_defaults
        from benchmarks.simulator.simulation_settings import Faults
        from benchmarks.workload import LengthLaw

        inputs, outputs, hits, ttft, tpot = LengthLaw(1024, 1024), LengthLaw(256, 256), 0.0, 1000.0, 50.0
        if sweep_directory is not None:
            inputs, outputs, hits, ttft, tpot = sweep_defaults(sweep_directory)
        options = SimulateOptions(
            out=out, sweep=sweep_directory, model=model, device=device, num_devices=num_devices,
            quantisation=quantisation, num_prefill=prefill, num_decode=decode, num_aggregated=aggregated,
            rates_per_s=_numbers(rates), is_day=day, trace=trace, time_factor=time_factor,
            inputs=parse_lengths(input_tokens) if input_tokens else inputs,
            outputs=parse_lengths(output_tokens) if output_tokens else outputs,
            hit_rate=hits if hit_rate < 0 else hit_rate, duration_s=duration_s,
            ttft_ms=ttft_ms or ttft, tpot_ms=tpot_ms or tpot, policy=policy, splits=splits,
            tenants=tuple(tenant),
            changes={
                "start_delay_s": start_delay_s, "faults": Faults(mtbf_s, event_loss), "placement": placement,
                "allows_local_prefill": local_prefill, "fabric_bytes_per_ms": fabric_gb_per_s * 1e6,
                "admission_ttft_ms": admission_ttft_ms, "max_worker_queue_ms": max_worker_queue_ms,
                "block_tokens": block_tokens, "max_leap": max_leap, "seed": seed,
            },
        )  # fmt: skip
        for line in run_simulations(options):
            typer.echo(line)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """What a user can mend becomes one line and status 2; anything else is our bug and keeps its traceback."""
    from benchmarks.cluster_under_test import ClusterError
    from benchmarks.sweep_measurements import MeasurementFailed
    from benchmarks.sweep_store import SweepDirectoryError

    try:
        yield
    except (ClusterError, MeasurementFailed, SweepDirectoryError, ConnectionError, FileNotFoundError) as error:
        _refuse(str(error))
    except ValueError as error:
        # Ranges are checked where the values live.
        _refuse(str(error))
    except ModuleNotFoundError as error:
        _refuse(f"{error.name} is not installed: pip install 'tandem-serve[bench]'")


def _refuse(message: str) -> None:
    sys.stderr.write(f"tandem: {message}\n")
    raise typer.Exit(EXIT_CANNOT_RUN)


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """A bar with the time left, from the seconds that are planned to be measured."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from benchmarks.sweep import Progress

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=1.0, left="")

        def report(what: str, done_s: float, total_s: float) -> None:
            # What is planned is measured in seconds, so what is left of it is the time left.
            minutes, seconds = divmod(max(0, round(total_s - done_s)), 60)
            left = f"at most {minutes}:{seconds:02} left"
            bar.update(task, description=what, completed=done_s, total=max(total_s, 1e-9), left=left)

        yield Progress(report)


def _print_plan(made: PdPlan) -> None:
    typer.echo(f"{made.verdict.value}: {made.reason}")
    if made.split is not None:
        split = made.split
        typer.echo(
            f"{split.prefill} prefill and {split.decode} decode workers carry {split.requests_per_s:.2f} requests/s "
            f"within TTFT {made.ttft_slo_ms:g} ms and {made.itl_slo_ms:g} ms a token, by {made.provenance}"
        )
    typer.echo(
        f"one prefill worker {made.prefill_requests_per_s:.2f} requests/s, one decode worker "
        f"{made.decode_requests_per_s:.2f} requests/s: {made.ratio:.2f} prefill for each decode"
    )
    if made.check is not None:
        typer.echo(
            f"coupled check: {made.check.deployment} carried {made.check.measured_per_s:.2f} requests/s, predicted "
            f"{made.check.predicted_per_s:.2f}: {made.check.share - 1:+.0%}"
        )
        if made.check.simulated_per_s is not None:
            typer.echo(f"  simulated with these runs' own arrivals: {made.check.simulated_per_s:.2f} requests/s")
    if made.warning:
        typer.echo(f"careful: {made.warning}")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{text!r} are no rates: give numbers with commas between them") from None


def _dialect(name: str) -> Dialect:
    from benchmarks.openai_client import DIALECTS

    for dialect in DIALECTS:
        if dialect == name:
            return dialect
    raise ValueError(f"--dialect is {name!r}, must be one of {', '.join(DIALECTS)}")
