"""`tandem plan` from options to a plan: the model of a sweep, or a prior from data sheets."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.device_advice import Replica, advice_lines
from benchmarks.hardware_catalogue import DEVICES
from benchmarks.hardware_prior import QUANTISATIONS, capacity_prior
from benchmarks.model_arithmetic import MODELS
from benchmarks.planner import CoupledCheck, PdPlan, plan, traffic_from_json, write_plan
from benchmarks.pool_capacity import TrafficShape, equally_likely
from benchmarks.sweep_store import SweepDirectoryError, read_manifest
from benchmarks.traces import read_trace, shareable_tokens
from deploy.autoscaler.capacity import CapacityModel
from deploy.autoscaler.policy import Policy, Slo

# For a model that was never measured and a user who says nothing: a chat's shape and objective.
DEFAULT_INPUT_TOKENS, DEFAULT_OUTPUT_TOKENS = 1024.0, 256.0
DEFAULT_TTFT_MS, DEFAULT_TPOT_MS = 1000.0, 50.0


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the command was asked for; 0 (hit rate: -1) is as the sweep had it."""

    directory: Path | None
    model: str
    device: str
    num_devices: int
    quantisation: str
    input_tokens: float
    output_tokens: float
    hit_rate: float
    ttft_ms: float
    tpot_ms: float
    trace: Path | None
    max_workers: int
    out: Path | None
    input_lengths: tuple[float, ...] = ()  # a trace's


def make_plan(options: PlanOptions) -> tuple[PdPlan, list[str]]:
    """The plan, and notes to print above it. Raises `ValueError` or `SweepDirectoryError` saying what to do."""
    if (options.directory is None) == (not options.model):
        raise ValueError("give a sweep's directory, or --model and --device of the catalogue")
    if options.trace is not None:
        options = _like_trace(options, options.trace)
    made, policy, notes = _from_sweep(options, options.directory) if options.directory else _from_catalogue(options)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        notes += [f"wrote {path}" for path in write_plan(options.out, made, policy)]
    return made, notes


def _like_trace(options: PlanOptions, path: Path) -> PlanOptions:
    """With the trace's mean lengths, and the hit rate that an unbounded prefix cache would have."""
    trace = read_trace(path)
    num_input = sum(request.input_tokens for request in trace)
    num_output = sum(request.output_tokens for request in trace)
    return replace(
        options,
        input_lengths=equally_likely([request.input_tokens for request in trace]),
        input_tokens=num_input / len(trace),
        output_tokens=num_output / len(trace),
        hit_rate=sum(shareable_tokens(trace)) / num_input,
    )


def _from_sweep(options: PlanOptions, directory: Path) -> tuple[PdPlan, Policy, list[str]]:
    settings = read_manifest(directory)["settings"]
    path = directory / "pd_plan.json"
    if not path.is_file():
        raise SweepDirectoryError(f"{directory} holds an unfinished sweep: run it again with the same --out")
    held = json.loads(path.read_text(encoding="utf-8"))
    swept = traffic_from_json(held["traffic"])
    traffic = TrafficShape(
        options.input_tokens or swept.input_tokens,
        options.output_tokens or swept.output_tokens,
        swept.hit_rate if options.hit_rate < 0 else options.hit_rate,
        options.input_lengths or (() if options.input_tokens else swept.input_lengths),
    )
    policy = Policy(
        slo=Slo(ttft_ms=options.ttft_ms or settings["ttft_ms"], itl_ms=options.tpot_ms or settings["tpot_ms"])
    )
    # The control was measured for the sweep's own workload and objective, and for no other.
    is_same = traffic == swept and policy.slo == Slo(ttft_ms=held["ttft_slo_ms"], itl_ms=held["itl_slo_ms"])
    control = held["aggregated_requests_per_s"] if is_same and held["is_aggregated_measured"] else None
    model = CapacityModel(**held["model"])
    check = CoupledCheck(**held["check"]) if is_same and held["check"] else None
    made = plan(traffic, model, policy, options.max_workers, held["provenance"], control, check)
    notes = [] if control is not None else ["aggregated: by the model, no control was measured for this workload"]
    return made, policy, notes


def _from_catalogue(options: PlanOptions) -> tuple[PdPlan, Policy, list[str]]:
    shape = MODELS.get(options.model)
    device = DEVICES.get(options.device)
    quantisation = next((one for one in QUANTISATIONS if one.name == options.quantisation), None)
    if shape is None:
        raise ValueError(f"no model {options.model!r} in the catalogue: {', '.join(MODELS)}")
    if device is None:
        raise ValueError(f"no device {options.device!r} in the catalogue: {', '.join(DEVICES)}")
    if quantisation is None:
        raise ValueError(f"--quantisation is {options.quantisation!r}: {', '.join(q.name for q in QUANTISATIONS)}")
    traffic = TrafficShape(
        options.input_tokens or DEFAULT_INPUT_TOKENS,
        options.output_tokens or DEFAULT_OUTPUT_TOKENS,
        max(0.0, options.hit_rate),
        options.input_lengths,
    )
    policy = Policy(slo=Slo(ttft_ms=options.ttft_ms or DEFAULT_TTFT_MS, itl_ms=options.tpot_ms or DEFAULT_TPOT_MS))
    model = capacity_prior(shape, device, quantisation, options.num_devices)
    replica = Replica(shape, device, options.num_devices, quantisation)
    notes = ["", *advice_lines(replica, traffic, policy.slo.itl_ms)]
    made = plan(traffic, model, policy, options.max_workers, f"data sheet of {replica.name}")
    return made, policy, notes
