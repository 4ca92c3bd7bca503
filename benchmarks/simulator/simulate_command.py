"""`tandem simulate` from options to a directory like a sweep's: points, records, summaries, report; all simulated."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.arrivals import ArrivalProcess, arrival_times
from benchmarks.hardware_catalogue import DEVICES
from benchmarks.hardware_prior import QUANTISATIONS, capacity_prior
from benchmarks.load_run import LoadRun
from benchmarks.machine import describe_machine
from benchmarks.model_arithmetic import MODELS
from benchmarks.planner import plan, pool_capacities, traffic_from_json, write_plan
from benchmarks.pool_capacity import TARGET_ATTAINMENT, TrafficShape, service_times_ms, uniform_lengths
from benchmarks.report import FLEET_FILE, write_report
from benchmarks.run_summary import RunSummary, Slo, summarise, to_json
from benchmarks.simulator.simulated_traffic import (
    SimulatedArrival,
    TenantShare,
    day_times,
    of_tenants,
    synthetic_arrivals,
    trace_arrivals,
)
from benchmarks.simulator.simulation import SimulationResult, simulate
from benchmarks.simulator.simulation_settings import DEFAULT_KV_BYTES_PER_TOKEN, DEFAULT_NUM_LAYERS, SimulationSettings
from benchmarks.sweep import CONTROL, COUPLED, SIMULATED
from benchmarks.sweep_measurements import point_stages_ms
from benchmarks.sweep_settings import SweepSettings
from benchmarks.sweep_store import Point, SweepDirectoryError, SweepStore, read_manifest
from benchmarks.traces import read_trace
from benchmarks.workload import LengthLaw, Workload
from cluster.identity import Tenant
from deploy.autoscaler.capacity import CapacityModel
from deploy.autoscaler.policy import Policy
from deploy.autoscaler.policy import Slo as PolicySlo
from deploy.autoscaler.policy_file import load_policy
from router.tenant_limits import TenantLimit

# Beyond it raw records are left out: a day of traffic would write gigabytes.
MAX_RECORDED = 20_000
SPLIT_REQUESTS = 400
MAX_SPLIT_RUNS = 16
SPLIT_RESOLUTION = 1.03
SPLIT_STEP = 1.25  # until both a rate that passes and one that does not are known


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What the command was asked for."""

    out: Path
    sweep: Path | None  # its fits are the timing model; else a model and a device of the catalogue
    model: str
    device: str
    num_devices: int
    quantisation: str
    num_prefill: int
    num_decode: int
    num_aggregated: int
    rates_per_s: tuple[float, ...]
    is_day: bool
    trace: Path | None
    time_factor: float
    inputs: LengthLaw
    outputs: LengthLaw
    hit_rate: float
    duration_s: float
    ttft_ms: float
    tpot_ms: float
    policy: Path | None
    splits: int
    tenants: tuple[str, ...]  # NAME=SHARE[,PRIORITY[,WEIGHT]]
    changes: dict[str, object]  # of `SimulationSettings`: faults, delays, placement


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the timing model comes from."""

    model: CapacityModel
    name: str
    kv_bytes_per_token: int = DEFAULT_KV_BYTES_PER_TOKEN
    num_layers: int = DEFAULT_NUM_LAYERS


def run_simulations(options: SimulateOptions) -> list[str]:
    """Lines that say what came out. Raises `ValueError` or `SweepDirectoryError` saying what to do."""
    origin = _origin(options)
    settings = _settings(options, origin)
    lines = [f"timing: {origin.name}; every figure is simulated"]
    if options.sweep is not None and options.out.resolve() == options.sweep.resolve():
        return lines + _add_splits(options, settings)
    sweep_settings = _sweep_settings(options, settings)
    options.out.mkdir(parents=True, exist_ok=True)
    store = SweepStore(options.out, sweep_settings, describe_machine(), f"{origin.name}, simulated")
    lines += (_simulate_splits if options.splits else _simulate_loads)(options, settings, store)
    policy = Policy(slo=PolicySlo(ttft_ms=options.ttft_ms, itl_ms=options.tpot_ms))
    made = plan(sweep_settings.traffic, origin.model, policy, max(2, options.splits or 8), origin.name)
    write_plan(options.out, made, policy)
    return [*lines, f"report: {write_report(options.out)}"]


def _add_splits(options: SimulateOptions, settings: SimulationSettings) -> list[str]:
    """Simulated splits beside a sweep's own points; its plan and its measurements stay as they are."""
    if not options.splits:
        raise ValueError(f"{options.out} holds measurements: choose another --out, or add splits to it with --splits")
    manifest = read_manifest(options.out)
    held = SweepSettings(**manifest["settings"])
    store = SweepStore(
        options.out, held, describe_machine(), manifest["model"], serve_flags=manifest.get("serve_flags", ())
    )
    return [*_simulate_splits(options, settings, store), f"report: {write_report(options.out)}"]


def _simulate_loads(options: SimulateOptions, settings: SimulationSettings, store: SweepStore) -> list[str]:
    lines: list[str] = []
    for rate_per_s, arrivals, duration_s in _loads(options, settings.seed):
        if options.tenants:
            arrivals = of_tenants(arrivals, [parse_tenant(text).share for text in options.tenants], settings.seed)
        result = simulate(settings, arrivals, duration_s)
        summary = summarise(result.run, settings.slo, settings.seed)
        point = _put(store, COUPLED if settings.num_prefill else CONTROL, settings, rate_per_s, result, summary)
        _write_fleet(options.out / FLEET_FILE, result)
        lines += _told(point, summary, result, len(arrivals))
    return lines


def _simulate_splits(options: SimulateOptions, settings: SimulationSettings, store: SweepStore) -> list[str]:
    """The capacity of every split of the budget: what the report's heat map shows instead of the models' prediction."""
    workload = Workload(options.inputs, options.outputs, options.hit_rate)
    lines = []
    for workers in range(2, options.splits + 1):
        for num_prefill in range(1, workers):
            split = _changed(settings, num_prefill=num_prefill, num_decode=workers - num_prefill)
            params = {"prefill": float(num_prefill), "decode": float(workers - num_prefill)}
            carried, summary = split_capacity(split, workload)
            point = Point(SIMULATED, split.name, params, to_json(summary), {"requests_per_s": carried})
            store.put(point, [])
            lines.append(f"{split.name}: {carried:.2f} requests/s, {carried / workers:.2f} a worker")
    return lines


def split_capacity(settings: SimulationSettings, workload: Workload) -> tuple[float, RunSummary]:
    """The highest simulated rate at which nine of ten requests keep the objective, and that run's summary."""
    low, high = 0.0, math.inf
    rate_per_s = predicted_per_s(settings, workload)
    best: LoadRun | None = None
    for _ in range(MAX_SPLIT_RUNS):
        run = _run_at(settings, workload, rate_per_s)
        if sum(map(settings.slo.is_met, run.records)) >= TARGET_ATTAINMENT * len(run.records):
            low, best = rate_per_s, run
        else:
            high = rate_per_s
        if low > 0 and high / low < SPLIT_RESOLUTION:
            break
        rate_per_s = (low + high) / 2 if low and high < math.inf else low * SPLIT_STEP or high / SPLIT_STEP
    return low, summarise(best or run, settings.slo, settings.seed)


def predicted_per_s(settings: SimulationSettings, workload: Workload) -> float:
    """Where a search begins: what the planner says, or half load where it says that nothing is carried."""
    model, inputs = settings.model, workload.input_tokens
    lengths = uniform_lengths(inputs.low, inputs.high)
    traffic = TrafficShape(inputs.mean, workload.output_tokens.mean, workload.hit_rate, lengths)
    policy = Policy(slo=PolicySlo(ttft_ms=settings.slo.ttft_ms, itl_ms=settings.slo.tpot_ms))
    prefill_of, decode_of = pool_capacities(traffic, model, policy)
    predicted = min(prefill_of(settings.num_prefill), decode_of(settings.num_decode))
    return predicted or 500 * settings.num_prefill / float(service_times_ms(traffic, model).mean())


def _run_at(settings: SimulationSettings, workload: Workload, rate_per_s: float) -> LoadRun:
    duration_s = SPLIT_REQUESTS / rate_per_s
    times = arrival_times(ArrivalProcess("poisson", rate_per_s), duration_s, settings.seed)
    return simulate(settings, synthetic_arrivals(workload, times, settings.seed), duration_s).run


def _loads(options: SimulateOptions, seed: int) -> list[tuple[float, list[SimulatedArrival], float]]:
    if options.trace is not None:
        trace = read_trace(options.trace)
        arrivals = trace_arrivals(trace, options.time_factor)
        duration_s = max(1.0, arrivals[-1].time_s)
        return [(len(arrivals) / duration_s, arrivals, duration_s)]
    workload = Workload(options.inputs, options.outputs, options.hit_rate)
    loads = []
    for rate_per_s in options.rates_per_s:
        if options.is_day:
            times = day_times(rate_per_s, options.duration_s, seed)
        else:
            times = arrival_times(ArrivalProcess("poisson", rate_per_s), options.duration_s, seed)
        loads.append((rate_per_s, synthetic_arrivals(workload, times, seed), options.duration_s))
    return loads


def _put(
    store: SweepStore,
    stage: str,
    settings: SimulationSettings,
    rate_per_s: float,
    result: SimulationResult,
    summary: RunSummary,
) -> Point:
    records = result.run.records
    measured = {
        "failures": float(result.num_failures),
        "moved": float(result.num_moved),
        "worker_hours": result.worker_s / 3600,
        "virtual_s": result.virtual_s,
        "wall_s": result.wall_s,
    }
    stages_ms = point_stages_ms([record for record in records if record.is_ok])
    point = Point(stage, settings.name, {"rate": rate_per_s, "repeat": 0.0}, to_json(summary), measured, stages_ms)
    store.put(point, records if len(records) <= MAX_RECORDED else [])
    return point


def _told(point: Point, summary: RunSummary, result: SimulationResult, num_requests: int) -> list[str]:
    kept = summary.attainment.value if summary.attainment else 0.0
    line = (
        f"{point.deployment} at {point.params['rate']:.2f} requests/s: {kept:.1%} within the objective, TTFT p50 "
        f"{summary.ttft_ms.p50.value:.0f} ms p99 {summary.ttft_ms.p99.value:.0f} ms, TPOT p50 "
        f"{summary.tpot_ms.p50.value:.1f} ms, {', '.join(flag.value for flag in summary.flags)}"
    )
    cost = (
        f"  {num_requests} requests, {result.virtual_s:.0f} s of virtual time in {result.wall_s:.0f} s; "
        f"{result.num_failures} workers failed, {result.num_moved} requests went on elsewhere; "
        f"{result.worker_s / 3600:.1f} worker hours"
    )
    if num_requests > MAX_RECORDED:
        cost += f"; no raw records of more than {MAX_RECORDED} requests are kept"
    return [line, cost]


def _write_fleet(path: Path, result: SimulationResult) -> None:
    rows = [asdict(sample) for sample in result.fleet]
    if not rows:
        return
    with path.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _origin(options: SimulateOptions) -> Origin:
    if (options.sweep is None) == (not options.model):
        raise ValueError("give a sweep's directory, or --model and --device of the catalogue")
    if options.sweep is not None:
        path = options.sweep / "pd_plan.json"
        if not path.is_file():
            raise SweepDirectoryError(f"{options.sweep} holds no plan: `tandem bench sweep --out {options.sweep}`")
        held = json.loads(path.read_text(encoding="utf-8"))
        return Origin(CapacityModel(**held["model"]), str(held["provenance"]))
    shape, device = MODELS.get(options.model), DEVICES.get(options.device)
    quantisation = next((one for one in QUANTISATIONS if one.name == options.quantisation), None)
    if shape is None:
        raise ValueError(f"no model {options.model!r} in the catalogue: {', '.join(MODELS)}")
    if device is None:
        raise ValueError(f"no device {options.device!r} in the catalogue: {', '.join(DEVICES)}")
    if quantisation is None:
        raise ValueError(f"--quantisation is {options.quantisation!r}: {', '.join(q.name for q in QUANTISATIONS)}")
    model = capacity_prior(shape, device, quantisation, options.num_devices)
    name = f"{shape.name} in {quantisation.name} on {options.num_devices} x {device.name}, by data sheets"
    return Origin(model, name, int(shape.kv_bytes_per_token()), shape.num_layers)


def _settings(options: SimulateOptions, origin: Origin) -> SimulationSettings:
    values: dict[str, object] = {
        "model": origin.model,
        "slo": Slo(options.ttft_ms, options.tpot_ms),
        "num_prefill": options.num_prefill,
        "num_decode": options.num_decode,
        "num_aggregated": options.num_aggregated,
        "policy": load_policy(options.policy) if options.policy is not None else None,
        "kv_bytes_per_token": origin.kv_bytes_per_token,
        "num_layers": origin.num_layers,
    }
    values["tenant_limits"] = {tenant.share.tenant: tenant.limit for tenant in map(parse_tenant, options.tenants)}
    return SimulationSettings(**values | options.changes)  # type: ignore[arg-type]


def _changed(settings: SimulationSettings, num_prefill: int, num_decode: int) -> SimulationSettings:
    # Splits are compared as splits: nobody prefills where it decodes.
    return replace(settings, num_prefill=num_prefill, num_decode=num_decode, allows_local_prefill=False)


@dataclass(frozen=True, slots=True)
class SimulatedTenant:
    """Who sends a share of the requests, and what its key would say."""

    share: TenantShare
    limit: TenantLimit


def parse_tenant(text: str) -> SimulatedTenant:
    """NAME=SHARE[,PRIORITY[,WEIGHT]]. Raises `ValueError` saying what is wrong."""
    name, _, numbers = text.partition("=")
    given = numbers.split(",")
    try:
        share, priority, weight = map(float, (*given, "0", "1")[:3] if len(given) != 2 else (*given, "1"))
    except ValueError:
        forms = "NAME=SHARE, NAME=SHARE,PRIORITY or NAME=SHARE,PRIORITY,WEIGHT"
        raise ValueError(f"--tenant is {text!r}: give {forms}") from None
    tenant = Tenant(name)
    return SimulatedTenant(TenantShare(tenant, share, int(priority)), TenantLimit(weight=weight, may_be_critical=True))


def _sweep_settings(options: SimulateOptions, settings: SimulationSettings) -> SweepSettings:
    return SweepSettings(
        input_low=options.inputs.low,
        input_high=options.inputs.high,
        output_low=options.outputs.low,
        output_high=options.outputs.high,
        hit_rate=options.hit_rate,
        ttft_ms=options.ttft_ms,
        tpot_ms=options.tpot_ms,
        seed=settings.seed,
        run_s=options.duration_s,
        rates_per_s=tuple(options.rates_per_s),
    )


def sweep_defaults(directory: Path) -> tuple[LengthLaw, LengthLaw, float, float, float]:
    """Inputs, outputs, hit rate and objective of a sweep: what a simulation of it takes where nothing else is said."""
    path = directory / "pd_plan.json"
    if not path.is_file():
        raise SweepDirectoryError(f"{directory} holds no plan: `tandem bench sweep --out {directory}` makes one")
    held = json.loads(path.read_text(encoding="utf-8"))
    traffic = traffic_from_json(held["traffic"])
    lengths: Sequence[float] = traffic.lengths
    inputs = LengthLaw(max(1, round(min(lengths))), max(1, round(max(lengths))))
    outputs = LengthLaw(max(1, round(traffic.output_tokens)), max(1, round(traffic.output_tokens)))
    return inputs, outputs, traffic.hit_rate, float(held["ttft_slo_ms"]), float(held["itl_slo_ms"])
