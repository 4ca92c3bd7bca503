"""Whether the planner's arithmetic and the simulator say the same: `python -m benchmarks.simulator.agreement`

For each (input, output, hit rate) the planner gives the best split of a budget and the rate that it carries; the
simulator then runs that split and its neighbours at that rate and above, and goes on towards the better one: the one
that keeps the objective for most requests is its answer. A table in Markdown goes to standard output; the status is 1
when a split differs by more than one worker.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.arrivals import ArrivalProcess, arrival_times
from benchmarks.planner import Split, pool_capacities
from benchmarks.pool_capacity import TrafficShape
from benchmarks.run_summary import Slo
from benchmarks.simulator.simulated_traffic import synthetic_arrivals
from benchmarks.simulator.simulation import simulate
from benchmarks.simulator.simulation_settings import SimulationSettings
from benchmarks.workload import LengthLaw, Workload
from deploy.autoscaler.capacity import CapacityModel
from deploy.autoscaler.policy import Policy
from deploy.autoscaler.policy import Slo as PolicySlo

# About an 8B model in bf16 on one H100: `hardware_prior.capacity_prior` gives these within rounding.
MODEL = CapacityModel(
    c0_ms=7.0, c1_ms=0.03, c2_ms=1e-6, alpha_ms=7.0, beta_ms=0.03, gamma_ms=5e-5, kv_tokens=400_000, max_batch=256
)
SLO = Slo(ttft_ms=600.0, tpot_ms=25.0)
NUM_WORKERS = 6
NUM_REQUESTS = 500
# Of the planned rate: at the plan's own rate several splits may keep the objective for everybody.
RATE_SHARES = (1.0, 1.15, 1.3)
# The first ones find an empty cluster.
WARMUP_SHARE = 0.25
BLOCK_TOKENS = 64
POINTS: tuple[tuple[int, int, float], ...] = (
    (256, 64, 0.0), (512, 64, 0.0), (1024, 64, 0.0), (2048, 64, 0.0),
    (512, 128, 0.0), (1024, 128, 0.0), (2048, 128, 0.0), (4096, 128, 0.0),
    (1024, 256, 0.0), (2048, 256, 0.0), (4096, 256, 0.0), (8192, 256, 0.0),
    (1024, 64, 0.5), (2048, 128, 0.5), (4096, 128, 0.5), (8192, 256, 0.5),
    (2048, 64, 0.9), (4096, 128, 0.9), (8192, 128, 0.9), (8192, 256, 0.9),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Agreement:
    """One point: the planner's split and the simulator's."""

    point: tuple[int, int, float]
    planned: Split
    simulated: tuple[int, int]
    attainment: dict[tuple[int, int], float]  # mean share of requests in time, by split

    @property
    def difference(self) -> int:
        """Workers that would change pools."""
        return abs(self.planned.prefill - self.simulated[0])


def main() -> None:
    found = [agree(point) for point in POINTS]
    sys.stdout.write(agreement_markdown(found))
    sys.exit(any(one.difference > 1 for one in found))


def agree(point: tuple[int, int, float], num_workers: int = NUM_WORKERS, num_requests: int = NUM_REQUESTS) -> Agreement:
    """Both answers for one point of the workload."""
    num_input, num_output, hit_rate = point
    traffic = TrafficShape(num_input, num_output, hit_rate)
    policy = Policy(slo=PolicySlo(ttft_ms=SLO.ttft_ms, itl_ms=SLO.tpot_ms))
    prefill_of, decode_of = pool_capacities(traffic, MODEL, policy)
    # All workers are used: the question is how.
    splits = [(prefill, num_workers - prefill) for prefill in range(1, num_workers)]
    carried = {split: min(prefill_of(split[0]), decode_of(split[1])) for split in splits}
    best = max(splits, key=lambda split: carried[split])
    planned = Split(*best, carried[best])
    attainment: dict[tuple[int, int], float] = {}

    def kept(split: tuple[int, int]) -> float:
        if split not in attainment:
            shares = [_kept(split, point, planned, share, num_requests) for share in RATE_SHARES]
            attainment[split] = sum(shares) / len(shares)
        return attainment[split]

    found = _highest(splits, splits.index(best), kept)
    return Agreement(point, planned, found, dict(sorted(attainment.items())))


def _highest(splits: list[tuple[int, int]], start: int, kept: Callable[[tuple[int, int]], float]) -> tuple[int, int]:
    """From the start towards the better neighbour, until none is better: one pool lacks on either side of the best."""
    place = start
    while True:
        near = [at for at in (place, place - 1, place + 1) if 0 <= at < len(splits)]
        better = max(near, key=lambda at: kept(splits[at]))
        if better == place:
            return splits[place]
        place = better


def _kept(
    split: tuple[int, int], point: tuple[int, int, float], planned: Split, rate_share: float, num_requests: int
) -> float:
    """Share of the requests that keep the objective at that share of the planned rate, after the warm-up."""
    num_input, num_output, hit_rate = point
    workload = Workload(LengthLaw(num_input, num_input), LengthLaw(num_output, num_output), hit_rate)
    rate_per_s = rate_share * planned.requests_per_s
    duration_s = num_requests / rate_per_s
    times = arrival_times(ArrivalProcess("poisson", rate_per_s), duration_s, seed=1)
    settings = SimulationSettings(MODEL, SLO, *split, allows_local_prefill=False, block_tokens=BLOCK_TOKENS)
    records = simulate(settings, synthetic_arrivals(workload, times, seed=1), duration_s).run.records
    counted = [record for record in records if record.intended_s >= WARMUP_SHARE * duration_s]
    return sum(SLO.is_met(record) for record in counted) / len(counted)


def agreement_markdown(found: list[Agreement]) -> str:
    lines = [
        "| input | output | hit rate | planner | requests/s | simulator (simulated) | objective kept (simulated) | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        shares = ", ".join(f"{p}P{d}D {share:.0%}" for (p, d), share in one.attainment.items())
        lines.append(
            f"| {one.point[0]} | {one.point[1]} | {one.point[2]:g} | {one.planned.prefill}P{one.planned.decode}D | "
            f"{one.planned.requests_per_s:.1f} | {one.simulated[0]}P{one.simulated[1]}D | {shares} | "
            f"{'same' if not one.difference else f'{one.difference} off'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
