"""The coupled runs simulated with their own arrivals: what the models say of exactly what was measured.

A run of some hundred requests has luck: how many arrive in it and how they bunch moves the capacity that it shows by 6
to 10 %. The long-run prediction knows nothing of that. The same arrivals and lengths, simulated with the fitted
models, have the same luck: what is left between them and the measurement is the models' error.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.knee import RatePoint, capacity_at_slo
from benchmarks.simulator.simulated_traffic import synthetic_arrivals
from benchmarks.simulator.simulation import simulate
from benchmarks.simulator.simulation_settings import SimulationSettings
from benchmarks.statistics import Interval
from benchmarks.sweep_measurements import run_arrivals
from benchmarks.sweep_settings import SweepSettings
from benchmarks.sweep_store import Point
from cluster.worker_settings import PoolSettings
from deploy.autoscaler.capacity import CapacityModel


def simulated_capacity(points: Sequence[Point], settings: SweepSettings, model: CapacityModel) -> float:
    """What a pair of workers with this model carries in these runs, by the estimator that reads the measured ones."""
    return capacity_at_slo([simulated_point(point, settings, model) for point in points]).value


def simulated_point(point: Point, settings: SweepSettings, model: CapacityModel) -> RatePoint:
    """The share of the run's counted requests that keep the objective when the run is simulated."""
    rate_per_s, repeat = point.params["rate"], int(point.params["repeat"])
    seed, times_s = run_arrivals(settings, rate_per_s, repeat)
    arrivals = synthetic_arrivals(settings.workload, times_s, seed)
    pair = SimulationSettings(
        model,
        settings.slo,
        num_prefill=1,
        num_decode=1,
        allows_local_prefill=False,
        max_batch_tokens=PoolSettings().max_batch_tokens,
    )
    run = simulate(pair, arrivals, settings.duration_s(rate_per_s), settings.drain_s).run
    counted = [record for record in run.records if record.intended_s >= point.summary["warmup_s"]]
    share = sum(map(settings.slo.is_met, counted)) / max(1, len(counted))
    offered_per_s = point.summary["offered_per_s"]
    return RatePoint(offered_per_s, offered_per_s, Interval(share, share, share), frozenset(), len(counted))
