"""The saturation sweep: what the pools take alone, what they carry together, what the same workers carry aggregated.

    prefill and decode grids  ->  timing fits  ->  predicted X_p, X_d
    prefill alone: bisection   ->  measured X_p
    coupled: shares of the prediction, bisection, confirmation  ->  capacity, knees
    aggregated control: the same search on the same number of workers
    -> plan (`planner`), report (`report`)

Every point is stored when it is done; a sweep that was interrupted goes on. This file orders the measurements; what one
is stands in `sweep_measurements`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.capacity_search import Phase, Probe, max_probes, next_probe
from benchmarks.knee import RatePoint
from benchmarks.run_summary import Flag
from benchmarks.statistics import Interval
from benchmarks.sweep_measurements import (
    Measured,
    Target,
    measure_decode,
    measure_prefill,
    measure_rate,
    prefill_only,
)
from benchmarks.sweep_settings import SweepSettings
from benchmarks.sweep_store import Point, SweepStore, point_key
from benchmarks.timing_fit import PrefillSample, StepSample, TimingFit, fit_decode, fit_prefill
from benchmarks.workload import Workload
from deploy.autoscaler.capacity import CapacityModel, decode_capacity, prefill_capacity
from deploy.autoscaler.policy import Policy
from deploy.autoscaler.policy import Slo as PolicySlo
from deploy.autoscaler.signals import Demand

PREFILL_TIME, DECODE_STEP = "prefill_time", "decode_step"
PREFILL_RATE, COUPLED, CONTROL = "prefill_rate", "coupled", "control"
# Of a point that is no open-loop run, for the time left.
GRID_POINT_S = 3.0
# Nobody knows a pool's size where the server does not say: then KV never binds.
UNKNOWN_KV_TOKENS = 1 << 40
# The search starts here around its prediction, and goes on upwards.
SEARCH_SHARES = (0.5, 0.75, 1.0, 1.25, 1.6)


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
    """The fits of a deployment's pools and the model that they make."""

    prefill: TimingFit
    decode: TimingFit
    model: CapacityModel


class Sweep:
    """One sweep over one store. `Target`s come in: whoever calls starts and stops the deployments."""

    def __init__(self, settings: SweepSettings, store: SweepStore, progress: Progress) -> None:
        self.settings = settings
        self._store = store
        self._progress = progress

    def plan_time(self, *, has_control: bool) -> None:
        """Tells the progress how long everything takes at most."""
        settings = self.settings
        grid = len(settings.prefill_lengths) * len(settings.prefill_hit_rates)
        grid += len(settings.decode_batches) * len(settings.decode_contexts)
        searches = 3 if has_control else 2
        runs = searches * max_probes(SEARCH_SHARES, settings.resolution) + len(settings.rate_shares)
        self._progress.plan(grid * GRID_POINT_S + runs * settings.run_s)

    async def measure_timings(self, target: Target, kv_tokens: int, max_batch: int) -> PoolTimings:
        """Both grids and their fits. `kv_tokens`: of one decode worker's pool."""
        settings = self.settings
        for hit_rate in settings.prefill_hit_rates:
            for length in settings.prefill_lengths:
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
        return self.timings(target.deployment, kv_tokens, max_batch)

    def timings(self, deployment: str, kv_tokens: int, max_batch: int) -> PoolTimings:
        """The fits of what the store holds."""
        prefill_points = self._store.points(PREFILL_TIME, deployment)
        prefill = fit_prefill(
            [
                PrefillSample(p.measured["uncached"], p.measured["cached"], p.measured["prefill_ms"])
                for p in prefill_points
            ]
        )
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
        return PoolTimings(prefill, decode, model)

    async def search_prefill(self, target: Target, predicted_per_s: float) -> float:
        """Measured X_p: the highest Poisson rate of one-token answers within the objective."""
        return await self._search(PREFILL_RATE, target, prefill_only(self.settings.workload), predicted_per_s)

    async def search_coupled(self, target: Target, predicted_per_s: float) -> float:
        """The given rates or the shares of the prediction, then the search: the coupled capacity."""
        shares = [share * predicted_per_s for share in self.settings.rate_shares]
        for rate_per_s in self.settings.rates_per_s or shares:
            await self._rate(COUPLED, target, self.settings.workload, rate_per_s, 0)
        return await self._search(COUPLED, target, self.settings.workload, predicted_per_s)

    async def search_control(self, target: Target, predicted_per_s: float) -> float:
        """The same search on the aggregated deployment."""
        return await self._search(CONTROL, target, self.settings.workload, predicted_per_s)

    async def _search(self, stage: str, target: Target, workload: Workload, predicted_per_s: float) -> float:
        grid = [share * predicted_per_s for share in SEARCH_SHARES]
        # What the shares have shown already, in this run or in an earlier one.
        probes = [_probe(point) for point in self._store.points(stage, target.deployment)]
        while (step := next_probe(grid, probes, self.settings.resolution)).phase is not Phase.DONE:
            probes.append(_probe(await self._rate(stage, target, workload, step.rate_per_s, step.repeat)))
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
        )
        for point in points
    ]


def mean_demand(settings: SweepSettings) -> Demand:
    """The nominal workload's mean request, one a second."""
    workload = settings.workload
    return Demand(
        requests_per_s=1.0,
        uncached_tokens_per_request=workload.input_tokens.mean * (1 - workload.hit_rate),
        cached_tokens_per_request=workload.input_tokens.mean * workload.hit_rate,
        output_tokens_per_request=workload.output_tokens.mean,
    )


def sweep_policy(settings: SweepSettings) -> Policy:
    """The objective as the autoscaler's policy states it."""
    return Policy(slo=PolicySlo(ttft_ms=settings.ttft_ms, itl_ms=settings.tpot_ms))


def predicted_capacities(settings: SweepSettings, model: CapacityModel) -> tuple[float, float]:
    """X_p and X_d by the fitted models, requests a second of one worker each."""
    demand, policy = mean_demand(settings), sweep_policy(settings)
    return prefill_capacity(demand, model, policy), decode_capacity(demand, model, policy)


def _probe(point: Point) -> Probe:
    (rate_point,) = rate_points([point])
    return Probe(point.params["rate"], int(point.params["repeat"]), rate_point.keeps_objective)
