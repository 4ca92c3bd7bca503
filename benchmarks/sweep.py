"""The saturation sweep: what the pools take alone, what they carry together, what the same workers carry aggregated.

    prefill and decode grids  ->  timing fits
    interference: the same prompts beside decoding sequences  ->  predicted X_p, X_d
    prefill alone: bisection   ->  measured X_p
    coupled: shares of the prediction, bisection, confirmation  ->  capacity, knees
    drift: one prompt timed beside the grids, before and after the coupled runs  ->  whether the machine stayed the same
    aggregated control: the same search on the same number of workers
    speculation: closed loops with and without drafts
    -> plan (`planner`), report (`report`)

Every point is stored when it is done; a sweep that was interrupted goes on. This file orders the measurements; what one
is stands in `sweep_measurements`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.capacity_search import Phase, Probe, max_probes, next_probe
from benchmarks.knee import RatePoint
from benchmarks.planner import pool_capacities
from benchmarks.pool_capacity import decode_requests_per_s, service_times_ms
from benchmarks.run_summary import Flag
from benchmarks.statistics import Interval
from benchmarks.sweep_measurements import (
    Measured,
    Target,
    measure_decode,
    measure_drift,
    measure_interference,
    measure_prefill,
    measure_rate,
    measure_speculation,
    prefill_only,
)
from benchmarks.sweep_settings import SweepSettings
from benchmarks.sweep_store import Point, SweepStore, point_key
from benchmarks.timing_fit import PrefillSample, StepSample, TimingFit, fit_decode, fit_prefill
from benchmarks.workload import Workload
from deploy.autoscaler.capacity import CapacityModel
from deploy.autoscaler.policy import Policy
from deploy.autoscaler.policy import Slo as PolicySlo

PREFILL_TIME, DECODE_STEP = "prefill_time", "decode_step"
INTERFERENCE, DRIFT, SPECULATION = "interference", "drift", "speculation"
PREFILL_RATE, COUPLED, CONTROL = "prefill_rate", "coupled", "control"
SIMULATED = "simulated"
# When the drift's prompt is timed.
GRIDS_TURN, BEFORE_COUPLED_TURN, AFTER_COUPLED_TURN = 0, 1, 2
LITTLE_ROUNDS = 20
# Of a point that is no open-loop run, for the time left.
GRID_POINT_S = 3.0
# Nobody knows a pool's size where the server does not say: then KV never binds.
UNKNOWN_KV_TOKENS = 1 << 40


class Progress:
    """How far a sweep is, in seconds of planned measuring. The command shows it; tests look at it."""

    def __init__(self, report: Callable[[str, float, float], None]) -> None:
        self._report = report
        self.total_s = 0.0
        self.done_s = 0.0

    def plan(self, seconds: float) -> None:
        self.total_s += seconds

    def advance(self, what: str, seconds: float) -> None:
        self.done_s = min(self.done_s + seconds, self.total_s)
        self._report(what, self.done_s, self.total_s)


@dataclass(frozen=True, slots=True)
class PoolTimings:
    """The fits of a deployment's pools, how much the pools slow each other down, and the model that they make."""

    prefill: TimingFit
    decode: TimingFit
    interference: float  # prefill time while both pools work over prefill time alone, at least 1
    model: CapacityModel  # of the pools while both work


class Sweep:
    """One sweep over one store. `Target`s come in: whoever calls starts and stops the deployments."""

    def __init__(self, settings: SweepSettings, store: SweepStore, progress: Progress) -> None:
        self.settings = settings
        self._store = store
        self._progress = progress

    def plan_time(self, *, has_control: bool, has_speculation: bool) -> None:
        """Tells the progress how long everything takes at most."""
        settings = self.settings
        grid = len(grid_lengths(settings)) * len(settings.prefill_hit_rates)
        grid += len(settings.decode_batches) * len(settings.decode_contexts)
        grid += 4 + 2 * len(settings.speculation_batches) * has_speculation
        searches = 3 if has_control else 2
        shares = len(settings.rates_per_s or settings.rate_shares)
        self._progress.plan(grid * GRID_POINT_S + shares * settings.longest_run_s + searches * self._search_s)

    @property
    def _search_s(self) -> float:
        """Of one search, at most."""
        return max_probes(self.settings.search_shares, self.settings.resolution) * self.settings.longest_run_s

    async def measure_timings(self, target: Target, kv_tokens: int, max_batch: int) -> PoolTimings:
        """Both grids and their fits. `kv_tokens`: of one decode worker's pool."""
        settings = self.settings
        for hit_rate in settings.prefill_hit_rates:
            for length in grid_lengths(settings):
                await self._grid_point(
                    PREFILL_TIME,
                    target,
                    {"input": float(length), "hit": hit_rate},
                    partial(measure_prefill, target, settings, length, hit_rate),
                )
        for context in settings.decode_contexts:
            for batch in settings.decode_batches:
                await self._grid_point(
                    DECODE_STEP,
                    target,
                    {"batch": float(batch), "context": float(context)},
                    partial(measure_decode, target, settings, batch, context),
                )
        await self.measure_drift(target, GRIDS_TURN)
        alone = self._timings_alone(target.deployment, kv_tokens, max_batch)
        length = round(settings.workload.input_tokens.mean)
        batch = decoding_batch(settings, alone.model)
        await self._grid_point(
            INTERFERENCE,
            target,
            {"input": float(length), "batch": float(batch)},
            partial(measure_interference, target, settings, length, batch),
        )
        return self.timings(target.deployment, kv_tokens, max_batch)

    async def measure_drift(self, target: Target, turn: int) -> None:
        """The same prompt's time at another moment: whether the machine is still as it was when the grids ran."""
        length = round(self.settings.workload.input_tokens.mean)
        await self._grid_point(
            DRIFT,
            target,
            {"input": float(length), "turn": float(turn)},
            partial(measure_drift, target, self.settings, length, turn),
        )

    async def measure_speculation(self, target: Target) -> None:
        """Time per token of text that repeats itself, at each batch."""
        for batch in self.settings.speculation_batches:
            await self._grid_point(
                SPECULATION,
                target,
                {"batch": float(batch)},
                partial(measure_speculation, target, self.settings, batch),
            )

    def timings(self, deployment: str, kv_tokens: int, max_batch: int) -> PoolTimings:
        """The fits of what the store holds, and what the pools do to each other."""
        alone = self._timings_alone(deployment, kv_tokens, max_batch)
        slower = mean_slow_down(self._store.points(INTERFERENCE, deployment), self.settings, alone.model)
        return replace(alone, interference=slower, model=with_slower_prompts(alone.model, slower))

    def _timings_alone(self, deployment: str, kv_tokens: int, max_batch: int) -> PoolTimings:
        prefill_points = self._store.points(PREFILL_TIME, deployment)
        prefill = fit_prefill([prefill_sample(point) for point in prefill_points])
        decode = fit_decode(
            [
                StepSample(p.params["batch"], p.measured["kv_tokens"], p.measured["step_ms"])
                for p in self._store.points(DECODE_STEP, deployment)
            ]
        )
        exposed = [p.stages_ms["exposed_transfer"] for p in prefill_points if p.stages_ms]
        (c0, c1, c2), (alpha, beta, gamma) = prefill.coefficients, decode.coefficients
        model = CapacityModel(
            c0_ms=c0,
            c1_ms=c1,
            c2_ms=c2,
            alpha_ms=alpha,
            beta_ms=beta,
            gamma_ms=gamma,
            kv_tokens=kv_tokens or UNKNOWN_KV_TOKENS,
            max_batch=max_batch or self.settings.max_batch,
            exposed_transfer_ms=sorted(exposed)[len(exposed) // 2] if exposed else 0.0,
        )
        return PoolTimings(prefill, decode, 1.0, model)

    async def search_prefill(self, target: Target, predicted_per_s: float) -> float:
        """Measured X_p: the highest Poisson rate of one-token answers within the objective."""
        return await self._search(PREFILL_RATE, target, prefill_only(self.settings.workload), predicted_per_s)

    async def search_coupled(self, target: Target, predicted_per_s: float) -> float:
        """The given rates or the shares of the prediction, then the search: the coupled capacity. Between two looks at
        how fast the machine is, for the prediction is of the machine that the grids saw."""
        await self.measure_drift(target, BEFORE_COUPLED_TURN)
        shares = [_rounded(share * predicted_per_s) for share in self.settings.rate_shares]
        for rate_per_s in self.settings.rates_per_s or shares:
            await self._rate(COUPLED, target, self.settings.workload, rate_per_s, 0)
        capacity = await self._search(COUPLED, target, self.settings.workload, predicted_per_s)
        await self.measure_drift(target, AFTER_COUPLED_TURN)
        return capacity

    async def search_control(self, target: Target, predicted_per_s: float) -> float:
        """The same search on the aggregated deployment."""
        return await self._search(CONTROL, target, self.settings.workload, predicted_per_s)

    async def _search(self, stage: str, target: Target, workload: Workload, predicted_per_s: float) -> float:
        grid = [_rounded(share * predicted_per_s) for share in self.settings.search_shares]
        planned_s = self._search_s
        # What the shares have shown already, in this run or in an earlier one.
        probes = [_probe(point) for point in self._store.points(stage, target.deployment)]
        while (step := next_probe(grid, probes, self.settings.resolution)).phase is not Phase.DONE:
            point = await self._rate(stage, target, workload, _rounded(step.rate_per_s), step.repeat)
            probes.append(_probe(point))
            planned_s -= self.settings.duration_s(step.rate_per_s)
        self._progress.plan(-planned_s)  # fewer runs than it could have taken, or longer ones
        return step.rate_per_s

    async def _rate(self, stage: str, target: Target, workload: Workload, rate_per_s: float, repeat: int) -> Point:
        params = {"rate": rate_per_s, "repeat": float(repeat)}
        return await self._point(
            point_key(stage, target.deployment, params),
            f"{stage} {target.deployment}: {rate_per_s:.2f} requests/s",
            self.settings.duration_s(rate_per_s),
            partial(measure_rate, target, self.settings, stage, workload, rate_per_s, repeat),
        )

    async def _grid_point(
        self, stage: str, target: Target, params: dict[str, float], measure: Callable[[], Awaitable[Measured]]
    ) -> Point:
        what = f"{stage} {target.deployment}: " + ", ".join(f"{name} {value:g}" for name, value in params.items())
        return await self._point(point_key(stage, target.deployment, params), what, GRID_POINT_S, measure)

    async def _point(self, key: str, what: str, planned_s: float, measure: Callable[[], Awaitable[Measured]]) -> Point:
        """The stored point, or a new one."""
        point = self._store.get(key)
        if point is None:
            point, records = await measure()
            self._store.put(point, records)
        self._progress.advance(what, planned_s)
        return point


def rate_points(points: Sequence[Point]) -> list[RatePoint]:
    """Open-loop points as the knee's estimators take them."""
    return [
        RatePoint(
            offered_per_s=point.summary["offered_per_s"],
            achieved_per_s=point.summary["achieved_per_s"],
            attainment=Interval(**point.summary["attainment"]),
            flags=frozenset(Flag(flag) for flag in point.summary["flags"]),
            num_requests=point.summary["num_offered"],
        )
        for point in points
    ]


def sweep_policy(settings: SweepSettings) -> Policy:
    """The objective as the autoscaler's policy states it."""
    return Policy(slo=PolicySlo(ttft_ms=settings.ttft_ms, itl_ms=settings.tpot_ms))


def predicted_capacities(settings: SweepSettings, model: CapacityModel) -> tuple[float, float]:
    """X_p and X_d by the fitted models, requests a second of one worker each. Where the models say that the objective
    cannot be met, the search still needs a place to start: what the workers carry at half load."""
    prefill_of, decode_of = pool_capacities(settings.traffic, model, sweep_policy(settings))
    service_ms = float(service_times_ms(settings.traffic, model).mean())
    step_ms = model.tpot_ms(1, settings.traffic.context_tokens)
    x_d = decode_of(1) or decode_requests_per_s(1, step_ms, settings.traffic.output_tokens)
    return prefill_of(1) or 500 / service_ms, x_d


def prediction_of_1p1d(settings: SweepSettings, model: CapacityModel) -> float:
    """What the models say that a pair of workers carries within the objective; 0: nothing."""
    prefill_of, decode_of = pool_capacities(settings.traffic, model, sweep_policy(settings))
    return min(prefill_of(1), decode_of(1))


def drift_share(points: Sequence[Point]) -> float:
    """How much slower (above 0) or faster the same prompt was while the coupled runs went than beside the grids."""
    beside_grids = [_prompt_ms(point) for point in points if point.params["turn"] == GRIDS_TURN]
    beside_runs = [_prompt_ms(point) for point in points if point.params["turn"] != GRIDS_TURN]
    if not beside_grids or not beside_runs:
        return 0.0
    return statistics.mean(beside_runs) / beside_grids[0] - 1


def with_slower_prompts(model: CapacityModel, factor: float) -> CapacityModel:
    """The model of workers that need `factor` times as long for a prompt."""
    return replace(model, c0_ms=model.c0_ms * factor, c1_ms=model.c1_ms * factor, c2_ms=model.c2_ms * factor)


def grid_lengths(settings: SweepSettings) -> list[int]:
    """The grid's lengths and the workload's own: a fit is best where it was measured."""
    law = settings.workload.input_tokens
    return sorted({*settings.prefill_lengths, law.low, round(law.mean), law.high})


def mean_decoding(settings: SweepSettings, model: CapacityModel) -> float:
    """Sequences that decode on average at the rate that a pair is predicted to carry, by Little's law."""
    rate_per_s = min(predicted_capacities(settings, model))
    traffic, batch = settings.traffic, 1.0
    for _ in range(LITTLE_ROUNDS):
        step_ms = model.tpot_ms(max(batch, 1.0), traffic.context_tokens)
        batch = min(rate_per_s * traffic.output_tokens * step_ms / 1e3, float(model.max_batch))
    return batch


def decoding_batch(settings: SweepSettings, model: CapacityModel) -> int:
    """As many sequences decode beside timed prompts; at least one."""
    return max(1, round(mean_decoding(settings, model)))


def mean_slow_down(points: Sequence[Point], settings: SweepSettings, alone: CapacityModel) -> float:
    """How much longer prompts take while both pools work: as measured beside sequences that decode all the time, for
    as long as any does. Sequences come and go as in an M/G/infinity queue: none is there for e^-mean of the time."""
    beside = max(map(slow_down, points), default=1.0)
    return 1 + (beside - 1) * (1 - math.exp(-mean_decoding(settings, alone)))


def prefill_sample(point: Point) -> PrefillSample:
    return PrefillSample(point.measured["uncached"], point.measured["cached"], point.measured["prefill_ms"])


def slow_down(point: Point) -> float:
    """Of an interference point: a prompt's time beside decoding sequences over its time alone, at least 1."""
    return max(1.0, point.measured["prefill_ms"] / point.measured["alone_ms"])


def _prompt_ms(point: Point) -> float:
    return point.measured["prefill_ms"]


def _rounded(rate_per_s: float) -> float:
    """As a point's key has it: a resumed sweep fits the same points in another order, and its prediction differs in the
    last bits; a rate that was asked for and one that was stored must be the same rate."""
    return float(f"{rate_per_s:.6g}")


def _probe(point: Point) -> Probe:
    (rate_point,) = rate_points([point])
    return Probe(point.params["rate"], int(point.params["repeat"]), rate_point.keeps_objective)
