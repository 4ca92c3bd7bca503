"""How many prefill, how many decode, or neither: from timing models, a workload and an objective to a plan.

    X_p   requests/s of one prefill worker within the TTFT objective     (deploy.autoscaler.capacity)
    X_d   requests/s of one decode worker within the ITL objective
    N_p / N_d = X_d / X_p; integers within a budget: the best min(P X_p, D X_d) per worker
    aggregated: the same workers doing both; disaggregation is recommended from 1.05 x on

The plan says when the objective cannot be met at all and why. Pure functions; only `write_plan` touches files.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from deploy.autoscaler.capacity import CapacityModel, decode_capacity, largest_batch, prefill_capacity
from deploy.autoscaler.policy import Policy
from deploy.autoscaler.signals import Demand

SCHEMA_VERSION = 1
# Disaggregation has costs that no model holds (two pools to operate): below this gain it is not worth them.
MIN_DISAGGREGATION_GAIN = 1.05
# A measured capacity further from the prediction than this makes the plan say so.
MAX_PREDICTION_ERROR = 0.15


class Verdict(Enum):
    DISAGGREGATE = "disaggregate"
    AGGREGATE = "aggregated is better"
    INFEASIBLE = "this SLO cannot be met"


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """Mean request of a workload."""

    input_tokens: float
    output_tokens: float
    hit_rate: float = 0.0

    @property
    def demand(self) -> Demand:
        """For one request a second."""
        return Demand(
            requests_per_s=1.0,
            uncached_tokens_per_request=self.input_tokens * (1 - self.hit_rate),
            cached_tokens_per_request=self.input_tokens * self.hit_rate,
            output_tokens_per_request=self.output_tokens,
        )


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
    measured_requests_per_s: float | None = None  # of the split, in the coupled check

    @property
    def prediction_error(self) -> float | None:
        """Measured over predicted, less one."""
        if self.measured_requests_per_s is None or self.split is None:
            return None
        return self.measured_requests_per_s / self.split.requests_per_s - 1

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
) -> PdPlan:
    """The best split of at most `max_workers` workers. `measured_aggregated_per_s` is the control's, per worker."""
    if max_workers < 2:
        raise ValueError(f"max_workers is {max_workers}: a prefill and a decode worker are two")
    demand = traffic.demand
    x_p, x_d = prefill_capacity(demand, model, policy), decode_capacity(demand, model, policy)
    aggregated = (
        aggregated_capacity(traffic, model, policy) if measured_aggregated_per_s is None else measured_aggregated_per_s
    )
    split = best_split(x_p, x_d, max_workers)
    gain = split.per_worker / aggregated if aggregated > 0 else None
    obstacle = infeasible_because(traffic, model, policy)
    if obstacle:
        verdict, reason = Verdict.INFEASIBLE, obstacle
    elif gain is None:
        verdict = Verdict.DISAGGREGATE
        reason = (
            f"{split.prefill}P{split.decode}D is predicted to carry {split.per_worker:.2f} requests/s a worker; "
            "aggregated workers met the objective at no rate that was tried"
        )
    elif gain < MIN_DISAGGREGATION_GAIN:
        verdict = Verdict.AGGREGATE
        reason = (
            f"{split.prefill}P{split.decode}D carries {split.per_worker:.2f} requests/s a worker, an aggregated worker "
            f"{aggregated:.2f}: {gain:.2f} x, below {MIN_DISAGGREGATION_GAIN} x"
        )
    else:
        verdict = Verdict.DISAGGREGATE
        reason = (
            f"{split.prefill}P{split.decode}D carries {split.per_worker:.2f} requests/s a worker, "
            f"{gain:.2f} x an aggregated worker's {aggregated:.2f}"
        )
    return PdPlan(
        verdict=verdict,
        reason=reason,
        traffic=traffic,
        ttft_slo_ms=policy.slo.ttft_ms,
        itl_slo_ms=policy.slo.itl_ms,
        prefill_requests_per_s=x_p,
        decode_requests_per_s=x_d,
        ratio=prefill_per_decode(x_p, x_d),
        split=None if obstacle else split,
        aggregated_requests_per_s=aggregated,
        is_aggregated_measured=measured_aggregated_per_s is not None,
        gain=gain,
        model=model,
        provenance=provenance,
    )


def prefill_per_decode(prefill_requests_per_s: float, decode_requests_per_s: float) -> float:
    """Prefill workers for each decode worker so that neither waits for the other."""
    return decode_requests_per_s / prefill_requests_per_s


def decode_requests_per_s(batch: int, tpot_ms: float, output_tokens: float) -> float:
    """Requests a second of one decode worker that keeps `batch` sequences busy."""
    return batch / (output_tokens * tpot_ms / 1e3)


def best_split(prefill_requests_per_s: float, decode_requests_per_s: float, max_workers: int) -> Split:
    """Integers with P + D <= max_workers: the most requests a second per worker, then in all; of equals the fewest."""
    splits = [
        Split(prefill, decode, min(prefill * prefill_requests_per_s, decode * decode_requests_per_s))
        for prefill in range(1, max_workers)
        for decode in range(1, max_workers - prefill + 1)
    ]
    # Equal up to rounding noise must not decide.
    return max(splits, key=lambda one: (round(one.per_worker, 9), round(one.requests_per_s, 9), -one.prefill))


def infeasible_because(traffic: TrafficShape, model: CapacityModel, policy: Policy) -> str:
    """Why no number of workers meets the objective; empty when some does."""
    demand = traffic.demand
    compute_ms = model.prefill_ms(demand.uncached_tokens_per_request, demand.cached_tokens_per_request)
    if compute_ms + model.exposed_transfer_ms > policy.slo.ttft_ms:
        return (
            f"a prompt of {demand.uncached_tokens_per_request:.0f} uncached tokens takes {compute_ms:.0f} ms of "
            f"prefill and {model.exposed_transfer_ms:.0f} ms of transfer on an idle worker; the TTFT objective is "
            f"{policy.slo.ttft_ms:.0f} ms: shorten prompts, raise the hit rate, or use a faster device"
        )
    context = traffic.input_tokens + traffic.output_tokens / 2
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
    demand = traffic.demand
    service_ms = model.prefill_ms(demand.uncached_tokens_per_request, demand.cached_tokens_per_request)
    context = traffic.input_tokens + traffic.output_tokens / 2
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


def _policy_text(pd_plan: PdPlan, policy: Policy) -> str:
    values = policy.model_dump(mode="json", exclude_defaults=True)
    values |= {"version": 1, "name": "planned", "slo": {"ttft_ms": pd_plan.ttft_slo_ms, "itl_ms": pd_plan.itl_slo_ms}}
    if pd_plan.split is not None and pd_plan.verdict is Verdict.DISAGGREGATE:
        replicas = pd_plan.split.prefill + pd_plan.split.decode
        values["prefill"] = {"min": 1, "max": max(1, replicas - 1)}
        values["decode"] = {"min": 1, "max": max(1, replicas - 1)}
        values["budget"] = {"replicas": replicas}
    return f"# {pd_plan.verdict.value}: {pd_plan.reason}.\n" + yaml.safe_dump(values, sort_keys=False)
