"""How many prefill, how many decode, or neither: from timing models, a workload and an objective to a plan.

    X_p   requests/s of one prefill worker within the TTFT objective     (pool_capacity)
    X_d   requests/s of one decode worker within the ITL objective
    N_p / N_d = X_d / X_p; integers within a budget: the best min(prefill pool, decode pool) per worker
    coupled check: what 1P1D carried over what was predicted for it; the split is corrected by that
    aggregated: the same workers doing both; disaggregation is recommended from 1.05 x on

The plan says when the objective cannot be met at all and why. Pure functions; only `write_plan` touches files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from benchmarks.pool_capacity import (
    TARGET_ATTAINMENT,
    Objective,
    TrafficShape,
    decode_pool_capacity,
    prefill_pool_capacity,
    service_times_ms,
)
from deploy.autoscaler.capacity import CapacityModel, largest_batch
from deploy.autoscaler.policy import Policy

SCHEMA_VERSION = 2
# Disaggregation has costs that no model holds (two pools to operate): below this gain it is not worth them.
MIN_DISAGGREGATION_GAIN = 1.05
# A measured capacity further from the prediction than this makes the plan say so.
MAX_PREDICTION_ERROR = 0.15


class Verdict(Enum):
    DISAGGREGATE = "disaggregate"
    AGGREGATE = "aggregated is better"
    INFEASIBLE = "this SLO cannot be met"


@dataclass(frozen=True, slots=True)
class Split:
    """Workers of each role and what they carry."""

    prefill: int
    decode: int
    requests_per_s: float

    @property
    def per_worker(self) -> float:
        return self.requests_per_s / (self.prefill + self.decode)


@dataclass(frozen=True, slots=True)
class CoupledCheck:
    """What a deployment that was measured, 1P1D, carried against what the models said that it would."""

    deployment: str
    predicted_per_s: float
    measured_per_s: float
    measured_low_per_s: float
    measured_high_per_s: float
    simulated_per_s: float | None = None  # by the same models in these runs' own arrivals: their luck taken out

    @property
    def share(self) -> float:
        return self.measured_per_s / self.predicted_per_s if self.predicted_per_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PdPlan:
    """The answer with everything that it rests on."""

    verdict: Verdict
    reason: str
    traffic: TrafficShape
    ttft_slo_ms: float
    itl_slo_ms: float
    prefill_requests_per_s: float  # X_p
    decode_requests_per_s: float  # X_d
    ratio: float  # N_p / N_d
    split: Split | None
    aggregated_requests_per_s: float  # of one worker; measured where there is a control, else by the model
    is_aggregated_measured: bool
    gain: float | None  # split per worker over aggregated per worker; None: aggregated carries nothing
    model: CapacityModel
    provenance: str  # where the coefficients come from
    check: CoupledCheck | None = None

    @property
    def prediction_error(self) -> float | None:
        """Measured over predicted, less one; None without a check."""
        return None if self.check is None else self.check.share - 1

    @property
    def warning(self) -> str:
        """Why the plan should not be relied on; empty when the coupled check agrees, or there was none."""
        error = self.prediction_error
        if error is None or abs(error) <= MAX_PREDICTION_ERROR:
            return ""
        return (
            f"the coupled run carried {error:+.0%} of what was predicted, more than {MAX_PREDICTION_ERROR:.0%} off: "
            "the models do not hold for this deployment, so measure the split itself before relying on it"
        )


def plan(
    traffic: TrafficShape,
    model: CapacityModel,
    policy: Policy,
    max_workers: int,
    provenance: str,
    measured_aggregated_per_s: float | None = None,
    check: CoupledCheck | None = None,
) -> PdPlan:
    """The best split of at most `max_workers` workers. `measured_aggregated_per_s` is the control's, per worker."""
    if max_workers < 2:
        raise ValueError(f"max_workers is {max_workers}: a prefill and a decode worker are two")
    prefill_of, decode_of = pool_capacities(traffic, model, policy)
    x_p, x_d = prefill_of(1), decode_of(1)
    aggregated = (
        aggregated_capacity(traffic, model, policy) if measured_aggregated_per_s is None else measured_aggregated_per_s
    )
    obstacle = infeasible_because(traffic, model, policy)
    split = None if obstacle else best_split(prefill_of, decode_of, max_workers)
    if split is not None and check is not None and check.measured_per_s > 0:
        split = replace(split, requests_per_s=split.requests_per_s * check.share)
    gain = split.per_worker / aggregated if split is not None and aggregated > 0 else None
    verdict, reason = _verdict(split, gain, aggregated, obstacle)
    return PdPlan(
        verdict=verdict,
        reason=reason,
        traffic=traffic,
        ttft_slo_ms=policy.slo.ttft_ms,
        itl_slo_ms=policy.slo.itl_ms,
        prefill_requests_per_s=x_p,
        decode_requests_per_s=x_d,
        ratio=prefill_per_decode(x_p, x_d),
        split=split,
        aggregated_requests_per_s=aggregated,
        is_aggregated_measured=measured_aggregated_per_s is not None,
        gain=gain,
        model=model,
        provenance=provenance,
        check=check,
    )


PoolCapacity = Callable[[int], float]  # workers of one pool -> requests a second


def pool_capacities(traffic: TrafficShape, model: CapacityModel, policy: Policy) -> tuple[PoolCapacity, PoolCapacity]:
    """What prefill and decode pools of any size carry within the policy's objective."""
    objective = Objective(policy.slo.ttft_ms, policy.slo.itl_ms)
    return (
        lambda num_workers: prefill_pool_capacity(traffic, model, objective, num_workers),
        lambda num_workers: decode_pool_capacity(traffic, model, objective, num_workers, policy.kv_utilisation),
    )


def _verdict(split: Split | None, gain: float | None, aggregated: float, obstacle: str) -> tuple[Verdict, str]:
    if split is None:
        return Verdict.INFEASIBLE, obstacle
    name, carried = f"{split.prefill}P{split.decode}D", f"{split.per_worker:.3g} requests/s a worker"
    if gain is None:
        return Verdict.DISAGGREGATE, (
            f"{name} is predicted to carry {carried}; aggregated workers met the objective at no rate that was tried"
        )
    if gain < MIN_DISAGGREGATION_GAIN:
        return Verdict.AGGREGATE, (
            f"{name} carries {carried}, an aggregated worker {aggregated:.3g}: {gain:.2f} x, "
            f"below {MIN_DISAGGREGATION_GAIN} x"
        )
    return Verdict.DISAGGREGATE, f"{name} carries {carried}, {gain:.2f} x an aggregated worker's {aggregated:.3g}"


def prefill_per_decode(prefill_requests_per_s: float, decode_requests_per_s: float) -> float:
    """Prefill workers for each decode worker so that neither waits for the other; 0 where nothing can be prefilled."""
    return decode_requests_per_s / prefill_requests_per_s if prefill_requests_per_s > 0 else 0.0


def best_split(prefill_of: PoolCapacity, decode_of: PoolCapacity, max_workers: int) -> Split:
    """Integers with P + D <= max_workers: the most requests a second per worker, then in all; of equals the fewest."""
    carried_prefill = [prefill_of(num_workers) for num_workers in range(1, max_workers)]
    carried_decode = [decode_of(num_workers) for num_workers in range(1, max_workers)]
    splits = [
        Split(prefill, decode, min(carried_prefill[prefill - 1], carried_decode[decode - 1]))
        for prefill in range(1, max_workers)
        for decode in range(1, max_workers - prefill + 1)
    ]
    # Equal up to rounding noise must not decide.
    return max(splits, key=lambda one: (round(one.per_worker, 9), round(one.requests_per_s, 9), -one.prefill))


def infeasible_because(traffic: TrafficShape, model: CapacityModel, policy: Policy) -> str:
    """Why no number of workers meets the objective; empty when some does."""
    times_ms = service_times_ms(traffic, model)
    # The shortest prompts are nine tenths of all at this one: it must be in time on an idle worker.
    place = min(len(times_ms) - 1, int(TARGET_ATTAINMENT * len(times_ms)))
    compute_ms, length = float(times_ms[place]), sorted(traffic.lengths)[place]
    if compute_ms + model.exposed_transfer_ms > policy.slo.ttft_ms:
        return (
            f"a prompt of {length * (1 - traffic.hit_rate):.0f} uncached tokens takes {compute_ms:.0f} ms of "
            f"prefill and {model.exposed_transfer_ms:.0f} ms of transfer on an idle worker; the TTFT objective is "
            f"{policy.slo.ttft_ms:.0f} ms: shorten prompts, raise the hit rate, or use a faster device"
        )
    context = traffic.context_tokens
    if model.tpot_ms(1, context) > policy.slo.itl_ms:
        return (
            f"one sequence alone takes {model.tpot_ms(1, context):.1f} ms a token; the ITL objective is "
            f"{policy.slo.itl_ms:.1f} ms: quantise, speculate, or use a faster device"
        )
    if context > model.kv_tokens:
        return f"one sequence of {context:.0f} tokens does not fit into a pool of {model.kv_tokens} KV tokens"
    return ""


def aggregated_capacity(traffic: TrafficShape, model: CapacityModel, policy: Policy) -> float:
    """Requests a second of one worker that does both, with chunked prefill filling its steps up to the ITL objective.

    A request costs its prefill and its share of decode steps. The batch is what fits while each step also carries its
    share of prefill: batch B gives B / (out TPOT) requests a second, so a step computes B t_p / out of prefill beside.
    """
    service_ms = float(service_times_ms(traffic, model).mean())
    context = traffic.context_tokens
    outputs = max(traffic.output_tokens, 1.0)
    # Each sequence of the batch brings its own share of prefill into every step: the model with a larger beta.
    loaded = replace(model, beta_ms=model.beta_ms + service_ms * model.accepted_tokens / outputs)
    batch = min(
        largest_batch(context, loaded, policy.slo.itl_ms),
        max(1, int(policy.kv_utilisation * model.kv_tokens / max(context, 1.0))),
    )
    tpot_ms = loaded.tpot_ms(batch, context)
    return 1e3 * batch / (outputs * tpot_ms) * policy.utilisation_max


def write_plan(directory: Path, pd_plan: PdPlan, policy: Policy) -> tuple[Path, Path]:
    """Writes `pd_plan.json` and `policy.yaml`; gives both paths.

    The policy has the objective, the split as the starting bounds, and a budget when the split fills one.
    """
    plan_path, policy_path = directory / "pd_plan.json", directory / "policy.yaml"
    document: dict[str, Any] = {"schema": "tandem.pd_plan", "version": SCHEMA_VERSION, **asdict(pd_plan)}
    document["verdict"] = pd_plan.verdict.value
    document["prediction_error"] = pd_plan.prediction_error
    document["warning"] = pd_plan.warning
    plan_path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    policy_path.write_text(_policy_text(pd_plan, policy), encoding="utf-8")
    return plan_path, policy_path


def traffic_from_json(row: dict[str, Any]) -> TrafficShape:
    """As `pd_plan.json` holds it."""
    return TrafficShape(**row | {"input_lengths": tuple(row["input_lengths"])})


def _policy_text(pd_plan: PdPlan, policy: Policy) -> str:
    values = policy.model_dump(mode="json", exclude_defaults=True)
    values |= {"version": 1, "name": "planned", "slo": {"ttft_ms": pd_plan.ttft_slo_ms, "itl_ms": pd_plan.itl_slo_ms}}
    if pd_plan.split is not None and pd_plan.verdict is Verdict.DISAGGREGATE:
        replicas = pd_plan.split.prefill + pd_plan.split.decode
        values["prefill"] = {"min": 1, "max": max(1, replicas - 1)}
        values["decode"] = {"min": 1, "max": max(1, replicas - 1)}
        values["budget"] = {"replicas": replicas}
    return f"# {pd_plan.verdict.value}: {pd_plan.reason}.\n" + yaml.safe_dump(values, sort_keys=False)
