"""The plots of a sweep's report. Each takes the sweep's points and gives a matplotlib figure, or None without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.planner import pool_capacities, traffic_from_json
from benchmarks.sweep import CONTROL, COUPLED, DECODE_STEP, PREFILL_TIME, SIMULATED, SPECULATION
from benchmarks.sweep_store import Point
from benchmarks.ttft_stages import STAGES
from deploy.autoscaler.capacity import CapacityModel
from deploy.autoscaler.policy import Policy, Slo

# Readable for the colour-blind (Okabe and Ito), in order of use.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
MAX_HEAT_WORKERS = 8
SIZE = (7.2, 3.8)


@dataclass(frozen=True, slots=True)
class SweepData:
    """What a report is drawn from."""

    manifest: dict[str, Any]
    points: tuple[Point, ...]
    plan: dict[str, Any] | None  # pd_plan.json
    fleet: tuple[dict[str, float], ...] = ()  # of a simulation: the pools over time

    def of(self, stage: str) -> list[Point]:
        chosen = [point for point in self.points if point.stage == stage]
        return sorted(chosen, key=lambda point: tuple(point.params.values()))

    def series(self) -> Iterator[tuple[str, list[Point], str]]:
        """(label, points, colour) of each open-loop deployment that was measured."""
        for place, stage in enumerate((COUPLED, CONTROL)):
            points = sorted(self.of(stage), key=lambda point: float(point.summary["offered_per_s"]))
            if points:
                kind = "coupled" if stage == COUPLED else "aggregated"
                yield f"{points[0].deployment} ({kind})", points, COLOURS[place]


def rate_latency(data: SweepData) -> Figure | None:
    """TTFT and TPOT against the offered rate: median and 99th percentile."""
    if not data.of(COUPLED):
        return None
    figure, (left, right) = _panels(2, (9.6, 3.8))
    for panel, metric, slo in ((left, "ttft_ms", "ttft_ms"), (right, "tpot_ms", "tpot_ms")):
        for label, points, colour in data.series():
            rates = [point.summary["offered_per_s"] for point in points]
            for share, style in (("p50", "o-"), ("p99", "o--")):
                values = [_value(point, metric, share) or np.nan for point in points]
                panel.plot(rates, values, style, color=colour, label=f"{label} {share}", markersize=3)
        panel.axhline(data.manifest["settings"][slo], color="#888888", linewidth=0.8, linestyle=":")
        panel.set_yscale("log")
        panel.set_xlabel("offered requests/s")
        panel.set_ylabel(f"{metric[:4].upper()} ms")
    left.legend(fontsize=7)
    return figure


def goodput(data: SweepData) -> Figure | None:
    """What came out, and what came out within the objective, against what was offered."""
    if not data.of(COUPLED):
        return None
    figure, (panel,) = _panels(1)
    highest = 0.0
    for label, points, colour in data.series():
        rates = [point.summary["offered_per_s"] for point in points]
        highest = max(highest, *rates)
        panel.plot(rates, [p.summary["achieved_per_s"] for p in points], "o-", color=colour, label=f"{label}: achieved")
        good = [p.summary["goodput_per_s"] for p in points]
        panel.plot(rates, good, "s--", color=colour, label=f"{label}: within objective", markersize=4)
    panel.plot([0, highest], [0, highest], color="#888888", linewidth=0.8, linestyle=":", label="offered")
    panel.set_xlabel("offered requests/s")
    panel.set_ylabel("requests/s")
    panel.legend(fontsize=7)
    return figure


def pareto(data: SweepData) -> Figure | None:
    """Tokens/s that one user sees against tokens/s that one worker gives."""
    if not data.of(COUPLED):
        return None
    figure, (panel,) = _panels(1)
    for label, points, colour in data.series():
        users = [1e3 / tpot if (tpot := _value(point, "tpot_ms", "p50")) else np.nan for point in points]
        workers = [p.summary["output_tokens_per_s"] / num_workers(p.deployment) for p in points]
        panel.plot(users, workers, "o", color=colour, label=label)
        for x, y, point in zip(users, workers, points, strict=True):
            panel.annotate(f"{point.summary['offered_per_s']:.1f}/s", (x, y), fontsize=6, xytext=(3, 3),
                           textcoords="offset points")  # fmt: skip
    panel.set_xlabel("tokens/s/user (median)")
    panel.set_ylabel("output tokens/s/worker")
    panel.legend(fontsize=7)
    return figure


def ttft_attribution(data: SweepData) -> Figure | None:
    """The stages of the median TTFT, stacked, at each rate."""
    points = [point for point in data.of(COUPLED) if point.stages_ms]
    if not points:
        return None
    figure, (panel,) = _panels(1)
    labels = [f"{point.summary['offered_per_s']:.2f}" for point in points]
    places = np.arange(len(points))
    base = np.zeros(len(points))
    for stage, colour in zip(STAGES, COLOURS, strict=False):
        heights = np.array([point.stages_ms[stage] for point in points])
        panel.bar(places, heights, bottom=base, color=colour, label=stage.replace("_", " "))
        base += heights
    rest = np.maximum(0.0, np.array([_value(point, "ttft_ms", "p50") or 0.0 for point in points]) - base)
    panel.bar(places, rest, bottom=base, color="#bbbbbb", label="front, wire, client")
    panel.set_xticks(places, labels)
    panel.set_xlabel("offered requests/s")
    panel.set_ylabel("median TTFT by stage, ms")
    panel.legend(fontsize=7)
    return figure


def ratio_heat_map(data: SweepData) -> Figure | None:
    """Predicted requests/s per worker of every split; simulated where the directory holds simulated splits."""
    if data.plan is None or data.plan["split"] is None:
        return None
    simulated = {
        (int(p.params["prefill"]), int(p.params["decode"])): p.measured["requests_per_s"] for p in data.of(SIMULATED)
    }
    traffic, model = traffic_from_json(data.plan["traffic"]), CapacityModel(**data.plan["model"])
    slo = Slo(ttft_ms=data.plan["ttft_slo_ms"], itl_ms=data.plan["itl_slo_ms"])
    prefill_of, decode_of = pool_capacities(traffic, model, Policy(slo=slo))
    sizes = range(1, MAX_HEAT_WORKERS + 1)
    carried = np.array(
        [
            [
                simulated.get((prefill, decode), min(prefill_of(prefill), decode_of(decode))) / (prefill + decode)
                for prefill in sizes
            ]
            for decode in sizes
        ]
    )
    figure, (panel,) = _panels(1, (6.4, 5.2))
    image = panel.imshow(carried, origin="lower", cmap="cividis", extent=(0.5, MAX_HEAT_WORKERS + 0.5) * 2)
    for row in sizes:
        for column in sizes:
            value = carried[row - 1, column - 1]
            colour = "black" if value > 0.6 * carried.max() else "white"
            text = f"{value:.2f}" + ("s" if (column, row) in simulated else "")
            panel.text(column, row, text, ha="center", va="center", fontsize=6, color=colour)
    split = data.plan["split"]
    if max(split["prefill"], split["decode"]) <= MAX_HEAT_WORKERS:
        panel.plot(split["prefill"], split["decode"], "s", markersize=22, fillstyle="none", color="#d55e00")
    panel.set_xlabel("prefill workers")
    panel.set_ylabel("decode workers")
    panel.grid(visible=False)
    figure.colorbar(image, ax=panel, label="requests/s per worker: predicted by the models (s: simulated)")
    return figure


def fleet(data: SweepData) -> Figure | None:
    """Workers and open requests of a simulation over time."""
    if not data.fleet:
        return None
    figure, (left, right) = _panels(2, (9.6, 3.4))
    hours = [row["time_s"] / 3600 for row in data.fleet]
    for place, pool in enumerate(("prefill", "decode", "aggregated", "starting")):
        counts = [row[pool] for row in data.fleet]
        if any(counts):
            left.step(hours, counts, color=COLOURS[place], label=pool, where="post")
    right.plot(hours, [row["open_requests"] for row in data.fleet], color=COLOURS[0])
    left.set_ylabel("workers (simulated)")
    right.set_ylabel("requests in flight (simulated)")
    for panel in (left, right):
        panel.set_xlabel("hours")
        panel.set_ylim(bottom=0)
    left.legend(fontsize=7)
    return figure


def speculation(data: SweepData) -> Figure | None:
    """Time per token with and without drafts."""
    points = data.of(SPECULATION)
    if not points:
        return None
    figure, (panel,) = _panels(1)
    for place, deployment in enumerate(sorted({point.deployment for point in points})):
        chosen = [point for point in points if point.deployment == deployment]
        panel.plot(
            [point.params["batch"] for point in chosen],
            [point.measured["tpot_ms"] for point in chosen],
            "o-",
            color=COLOURS[place],
            label=deployment if "speculation" in deployment else f"{deployment}, no drafts",
        )
    panel.set_xlabel("sequences in flight")
    panel.set_ylabel("median ms a token, text that repeats itself")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=7)
    return figure


def timing_fits(data: SweepData) -> Figure | None:
    """Measured times against the fitted models."""
    prefill, decode = data.of(PREFILL_TIME), data.of(DECODE_STEP)
    if not prefill or not decode or data.plan is None:
        return None
    model = data.plan["model"]
    figure, (left, right) = _panels(2, (9.6, 3.8))
    for place, hit in enumerate(sorted({point.params["hit"] for point in prefill})):
        chosen = [point for point in prefill if point.params["hit"] == hit]
        lengths = [point.params["input"] for point in chosen]
        fitted = [
            model["c0_ms"] + model["c1_ms"] * u + model["c2_ms"] * u * (c + u / 2)
            for u, c in ((p.measured["uncached"], p.measured["cached"]) for p in chosen)
        ]
        measured = [point.measured["prefill_ms"] for point in chosen]
        _fit_lines(left, lengths, measured, fitted, f"hit rate {hit:g}", COLOURS[place % len(COLOURS)])
    for place, context in enumerate(sorted({point.params["context"] for point in decode})):
        chosen = [point for point in decode if point.params["context"] == context]
        batches = [point.params["batch"] for point in chosen]
        fitted = [
            model["alpha_ms"] + model["beta_ms"] * p.params["batch"] + model["gamma_ms"] * p.measured["kv_tokens"]
            for p in chosen
        ]
        measured = [point.measured["step_ms"] for point in chosen]
        _fit_lines(right, batches, measured, fitted, f"{context:g} tokens of context", COLOURS[place % len(COLOURS)])
    left.set_xlabel("prompt tokens")
    left.set_ylabel("prefill ms (points measured, lines fitted)")
    right.set_xlabel("sequences in the batch")
    right.set_ylabel("ms a token")
    for panel in (left, right):
        panel.legend(fontsize=7)
    return figure


FIGURES: dict[str, tuple[str, Callable[[SweepData], Figure | None]]] = {
    "rate_latency": ("Latency against rate", rate_latency),
    "goodput": ("Goodput", goodput),
    "pareto": ("Tokens/s/user against tokens/s/worker", pareto),
    "ttft_attribution": ("Where the time to the first token goes", ttft_attribution),
    "ratio_heat_map": ("Prefill : decode", ratio_heat_map),
    "fleet": ("The pools over time", fleet),
    "speculation": ("Speculation", speculation),
    "timing_fits": ("Timing models", timing_fits),
}


def is_simulated(point: Point) -> bool:
    """Whether it comes from `tandem simulate`, whose deployments say so in their names."""
    return point.deployment.startswith("simulated")


def num_workers(deployment: str) -> int:
    """Of a name such as 1P1D or 2A; 1 where the name says nothing."""
    digits = [int(part) for part in "".join(c if c.isdigit() else " " for c in deployment).split()]
    return sum(digits) or 1


def _fit_lines(
    panel: Axes, x: Sequence[float], measured: Sequence[float], fitted: Sequence[float], label: str, colour: str
) -> None:
    panel.plot(x, measured, "o", color=colour, label=label, markersize=4)
    panel.plot(x, fitted, "-", color=colour, linewidth=1)


def _value(point: Point, metric: str, share: str) -> float | None:
    value = point.summary[metric][share]["value"]
    return None if value is None else float(value)


def _panels(count: int, size: tuple[float, float] = SIZE) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(1, count, squeeze=False)[0])
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    return figure, panels
