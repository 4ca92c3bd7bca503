"""How many replicas a demand needs: queueing for prefill, KV and batch size for decode.

Times are milliseconds. The models are those of the saturation sweep:
    prefill  t_p(u, c) = c0 + c1 u + c2 u (c + u/2)       u uncached, c cached prompt tokens
    decode   t_s(B, K) = alpha + beta B + gamma K         B sequences, K tokens of KV in the batch
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deploy.autoscaler.policy import Policy
from deploy.autoscaler.signals import Demand

MAX_BATCH = 4096


@dataclass(frozen=True, slots=True)
class CapacityModel:
    """Coefficients of one worker of each kind, and what speculation gives."""

    c0_ms: float
    c1_ms: float
    c2_ms: float
    alpha_ms: float
    beta_ms: float
    gamma_ms: float
    kv_tokens: int  # KV tokens that one decode worker holds
    max_batch: int  # sequences that one decode worker takes
    accepted_tokens: float = 1.0  # tokens of one step and sequence
    exposed_transfer_ms: float = 0.0

    def prefill_ms(self, uncached: float, cached: float) -> float:
        return self.c0_ms + self.c1_ms * uncached + self.c2_ms * uncached * (cached + uncached / 2)

    def tpot_ms(self, batch: float, context: float) -> float:
        """Time per output token of `batch` sequences with `context` KV tokens each."""
        return (self.alpha_ms + self.beta_ms * batch + self.gamma_ms * batch * context) / self.accepted_tokens


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas wanted, not yet bounded, and the reason in words."""

    replicas: int
    reason: str


def prefill_need(demand: Demand, model: CapacityModel, policy: Policy) -> Need:
    """Replicas so that the mean wait of an M/D/1 queue stays within what the SLO leaves of TTFT."""
    if demand.requests_per_s == 0:
        return Need(0, "no arrivals")
    service_ms = model.prefill_ms(demand.uncached_tokens_per_request, demand.cached_tokens_per_request)
    utilisation = target_utilisation(service_ms, model, policy)
    offered = demand.requests_per_s * service_ms / 1000
    replicas = math.ceil(offered / utilisation - 1e-9)
    return Need(replicas, f"{offered:.2f} busy prefill workers at a target utilisation of {utilisation:.2f}")


def target_utilisation(service_ms: float, model: CapacityModel, policy: Policy) -> float:
    """Utilisation at which the M/D/1 wait `rho S / (2 (1 - rho))` equals the budget: `rho = 2 b / (S + 2 b)`."""
    budget_ms = policy.slo.ttft_ms - service_ms - model.exposed_transfer_ms
    rho = 2 * budget_ms / (service_ms + 2 * budget_ms) if budget_ms > 0 else 0.0
    return min(policy.utilisation_max, max(policy.utilisation_min, rho))


def decode_need(demand: Demand, model: CapacityModel, policy: Policy) -> Need:
    """The larger of two needs: KV for all that run at once, and batches within the ITL SLO."""
    if demand.requests_per_s == 0:
        return Need(0, "no arrivals")
    context = mean_context(demand)
    batch = largest_batch(context, model, policy.slo.itl_ms)
    # Little's law: sequences in flight = arrivals x time each one stays.
    in_flight = demand.requests_per_s * demand.output_tokens_per_request * model.tpot_ms(batch, context) / 1000
    by_batch = in_flight / batch
    by_kv = in_flight * context / (policy.kv_utilisation * model.kv_tokens)
    if by_kv > by_batch:
        return Need(math.ceil(by_kv - 1e-9), f"KV of {in_flight:.1f} sequences of {context:.0f} tokens")
    return Need(math.ceil(by_batch - 1e-9), f"{in_flight:.1f} sequences in batches of {batch}")


def largest_batch(context: float, model: CapacityModel, itl_ms: float) -> int:
    """Sequences at most whose time per output token stays within the SLO; at least one."""
    per_sequence = model.beta_ms + model.gamma_ms * context
    room_ms = itl_ms * model.accepted_tokens - model.alpha_ms
    fitting = room_ms / per_sequence if per_sequence > 0 else MAX_BATCH
    return int(max(1, min(fitting, model.max_batch, MAX_BATCH)))


def prefill_capacity(demand: Demand, model: CapacityModel, policy: Policy) -> float:
    """Requests a second that one prefill worker takes within the SLO."""
    service_ms = model.prefill_ms(demand.uncached_tokens_per_request, demand.cached_tokens_per_request)
    return 1000 * target_utilisation(service_ms, model, policy) / service_ms


def decode_capacity(demand: Demand, model: CapacityModel, policy: Policy) -> float:
    """Requests a second that one decode worker takes within the SLO."""
    context = mean_context(demand)
    batch = min(
        largest_batch(context, model, policy.slo.itl_ms),
        max(1, int(policy.kv_utilisation * model.kv_tokens / max(context, 1.0))),
    )
    return 1000 * batch / (max(demand.output_tokens_per_request, 1.0) * model.tpot_ms(batch, context))


def mean_context(demand: Demand) -> float:
    """KV tokens of a sequence half way through its answer."""
    prompt = demand.uncached_tokens_per_request + demand.cached_tokens_per_request
    return prompt + demand.output_tokens_per_request / 2
