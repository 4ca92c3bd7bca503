"""Arrivals of a simulation: times, lengths and what prompts share, without any text.

A prompt is a list of (content id, number of tokens): equal leading parts are equal tokens, which is all that a prefix
cache can see. Built when it arrives, so that a day of traffic needs no memory for its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from benchmarks.arrivals import ArrivalProcess, FloatArray, arrival_times
from benchmarks.traces import TraceRequest, shareable_tokens
from benchmarks.workload import Workload
from cluster.identity import Tenant

# Content ids are folded into 31 bits; private ones lie above every id that traces use.
PRIVATE_BASE = 1 << 28
ID_MASK = (1 << 31) - 1
DAY_S = 86_400.0
# Share of a day's mean rate by which it swings: a quiet night is a fifth of the busiest hour.
DAY_SWING = 2 / 3
OWNER = Tenant("default")


@dataclass(frozen=True, slots=True)
class SimulatedArrival:
    """One request. `parts` are (content id, tokens) in order."""

    index: int
    time_s: float
    output_tokens: int
    parts: tuple[tuple[int, int], ...]
    shareable_tokens: int = 0
    tenant: Tenant = OWNER
    priority: int = 0  # lower runs first

    @property
    def num_prompt_tokens(self) -> int:
        return sum(count for _, count in self.parts)

    def token_ids(self) -> npt.NDArray[np.int32]:
        ids, counts = zip(*self.parts, strict=True)
        return np.repeat(np.array(ids, dtype=np.int32), counts)


def synthetic_arrivals(workload: Workload, times_s: FloatArray, seed: int) -> list[SimulatedArrival]:
    """The same law as `workload.plan_synthetic`: a share of each prompt is one of a few common prefixes."""
    rng = np.random.default_rng((seed, 1))
    count = len(times_s)
    inputs, outputs = workload.input_tokens.draw(rng, count), workload.output_tokens.draw(rng, count)
    prefixes = rng.integers(0, workload.num_prefixes, count)
    longest_seen: dict[int, int] = {}
    arrivals = []
    for index in range(count):
        num_tokens, prefix = int(inputs[index]), int(prefixes[index])
        num_shared = int(num_tokens * workload.hit_rate)
        parts = ((prefix + 1, num_shared), (PRIVATE_BASE + index, num_tokens - num_shared))
        shareable = min(num_shared, longest_seen.get(prefix, 0))
        longest_seen[prefix] = max(num_shared, longest_seen.get(prefix, 0))
        kept = tuple(part for part in parts if part[1])
        arrivals.append(SimulatedArrival(index, float(times_s[index]), int(outputs[index]), kept, shareable))
    return arrivals


def trace_arrivals(trace: Sequence[TraceRequest], time_factor: float = 1.0) -> list[SimulatedArrival]:
    """A trace's requests with the prefixes that they share; `time_factor` stretches its gaps."""
    if not time_factor > 0:
        raise ValueError(f"time_factor is {time_factor}, must be above 0")
    return [
        SimulatedArrival(index, request.time_s * time_factor, request.output_tokens, _parts(request, index), shareable)
        for index, (request, shareable) in enumerate(zip(trace, shareable_tokens(trace), strict=True))
    ]


@dataclass(frozen=True, slots=True)
class TenantShare:
    """One tenant's share of the requests, in units of the others'."""

    tenant: Tenant
    share: float
    priority: int = 0


def of_tenants(
    arrivals: Sequence[SimulatedArrival], shares: Sequence[TenantShare], seed: int
) -> list[SimulatedArrival]:
    """The same arrivals, each of a tenant drawn by its share."""
    weights = np.array([one.share for one in shares])
    if not len(weights) or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError(f"shares of tenants are {weights.tolist()}: at least one must be above 0, none below")
    drawn = np.random.default_rng((seed, 3)).choice(len(shares), len(arrivals), p=weights / weights.sum())
    return [
        replace(arrival, tenant=shares[place].tenant, priority=shares[place].priority)
        for arrival, place in zip(arrivals, drawn, strict=True)
    ]


def day_times(mean_rate_per_s: float, duration_s: float, seed: int) -> FloatArray:
    """Poisson arrivals whose rate follows a day: lowest at its start and end, highest in its middle (thinning)."""
    peak = 1 + DAY_SWING
    times = arrival_times(ArrivalProcess("poisson", mean_rate_per_s * peak), duration_s, seed)
    wave = 1 - DAY_SWING * np.cos(2 * math.pi * times / DAY_S)
    kept: FloatArray = times[np.random.default_rng((seed, 2)).random(len(times)) * peak < wave]
    return kept


def _parts(request: TraceRequest, index: int) -> tuple[tuple[int, int], ...]:
    private = PRIVATE_BASE + index
    if not request.block_ids:
        return ((private, request.input_tokens),)
    parts, left = [], request.input_tokens
    for block_id in request.block_ids:
        count = min(left, request.block_tokens)
        if count > 0:
            parts.append((1 + block_id & ID_MASK, count))
        left -= count
    return (*parts, (private, left)) if left > 0 else tuple(parts)
