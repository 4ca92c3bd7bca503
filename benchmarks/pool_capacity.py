"""What a pool carries while nine of ten requests keep the objective: queueing for prefill, batches for decode.

    prefill   M/G/P, first come first served: P(wait > t) = C exp(-t / theta), C by Erlang, theta by the spread of the
              service times; a request keeps the objective when wait + its own service + transfer do
    decode    requests in the batch vary as arrivals do: their mean plus 1.28 deviations must fit the objective's batch

The autoscaler's `deploy.autoscaler.capacity` aims at means and keeps a margin; a sweep measures shares of requests, so
what it is compared with must predict shares. Pure functions over the same timing models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.arrivals import FloatArray
from deploy.autoscaler.capacity import CapacityModel, largest_batch

TARGET_ATTAINMENT = 0.90
NORMAL_90 = 1.2816  # the normal distribution's 90 % quantile
# A request sees the batch's mean over its own stay, not its momentary size: for stays of one length the variance of
# that mean is two thirds of the batch's.
STAY_AVERAGING = 2 / 3
NUM_LENGTHS = 16
BISECTIONS = 50


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """A workload's requests. `input_lengths` are equally likely prompt lengths; empty: all have the mean."""

    input_tokens: float
    output_tokens: float
    hit_rate: float = 0.0
    input_lengths: tuple[float, ...] = ()

    @property
    def lengths(self) -> tuple[float, ...]:
        return self.input_lengths or (self.input_tokens,)

    @property
    def context_tokens(self) -> float:
        """KV tokens of a sequence half way through its answer."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Objective:
    """What nine of ten requests shall keep."""

    ttft_ms: float
    tpot_ms: float


def uniform_lengths(low: float, high: float) -> tuple[float, ...]:
    """Equally likely lengths that stand for a uniform law."""
    if low == high:
        return (float(low),)
    return tuple(low + (high - low) * (place + 0.5) / NUM_LENGTHS for place in range(NUM_LENGTHS))


def equally_likely(lengths: Sequence[float]) -> tuple[float, ...]:
    """A few lengths that stand for many: the middles of equal shares of the sorted ones."""
    shares = (np.arange(NUM_LENGTHS) + 0.5) / NUM_LENGTHS
    return tuple(float(value) for value in np.quantile(np.array(lengths), shares))


def service_times_ms(traffic: TrafficShape, model: CapacityModel) -> FloatArray:
    """Prefill times of the workload's equally likely prompts, ascending."""
    times = [model.prefill_ms(length * (1 - traffic.hit_rate), length * traffic.hit_rate) for length in traffic.lengths]
    return np.sort(np.array(times))


def prefill_pool_capacity(traffic: TrafficShape, model: CapacityModel, objective: Objective, num_workers: int) -> float:
    """Requests a second of `num_workers` prefill workers; 0 when even idle ones miss the objective too often."""
    service_ms = service_times_ms(traffic, model)
    budget_ms = objective.ttft_ms - model.exposed_transfer_ms - service_ms
    mean_ms = float(service_ms.mean())
    spread = float((service_ms**2).mean()) / (2 * mean_ms**2)  # half of 1 + squared variation

    def keeps(utilisation: float) -> bool:
        theta_ms = spread * mean_ms / (num_workers * (1 - utilisation))
        waits = _erlang_c(num_workers, utilisation * num_workers)
        within = np.where(budget_ms >= 0, 1 - waits * np.exp(-np.maximum(budget_ms, 0.0) / theta_ms), 0.0)
        return float(within.mean()) >= TARGET_ATTAINMENT

    return _highest(keeps) * num_workers * 1e3 / mean_ms


def decode_pool_capacity(
    traffic: TrafficShape, model: CapacityModel, objective: Objective, num_workers: int, kv_share: float
) -> float:
    """Requests a second of `num_workers` decode workers; 0 when a sequence alone is too slow."""
    context = traffic.context_tokens
    if model.tpot_ms(1, context) > objective.tpot_ms:
        return 0.0
    by_objective = largest_batch(context, model, objective.tpot_ms)
    by_memory = max(1, int(kv_share * model.kv_tokens / max(context, 1.0)))
    limit = min(by_objective, by_memory)
    # m + 1.28 sqrt(2/3 m / D) = limit, for a pool that is balanced as one queue is. The batch is at least the request
    # itself, which sees the others beside it.
    slack = NORMAL_90 * math.sqrt(STAY_AVERAGING / num_workers)
    batch = max(((-slack + math.sqrt(slack**2 + 4 * limit)) / 2) ** 2, min(1.0, float(limit)))
    return num_workers * decode_requests_per_s(batch, model.tpot_ms(batch, context), traffic.output_tokens)


def decode_requests_per_s(batch: float, tpot_ms: float, output_tokens: float) -> float:
    """Requests a second of one decode worker that keeps `batch` sequences busy."""
    return batch / (max(output_tokens, 1.0) * tpot_ms / 1e3)


def _highest(keeps: Callable[[float], bool]) -> float:
    """The highest utilisation below 1 that keeps the objective; 0 when none does."""
    low, high = 0.0, 1.0 - 1e-6
    if not keeps(1e-6):
        return 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def _erlang_c(num_workers: int, offered: float) -> float:
    """Share of arrivals that wait at `num_workers` servers with `offered` of them busy on average."""
    blocked = 1.0
    for count in range(1, num_workers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - offered / num_workers * (1 - blocked))
