"""A sweep as one self-contained HTML file (inline SVG, no network) and as PNGs beside it."""

from __future__ import annotations

import csv
import html
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.knee import capacity_at_slo, first_violation, saturation
from benchmarks.report_figures import FIGURES, SweepData, is_simulated
from benchmarks.run_summary import SummaryRow, write_summary_csv, write_summary_json
from benchmarks.statistics import Interval
from benchmarks.sweep import (
    CONTROL,
    COUPLED,
    DRIFT,
    INTERFERENCE,
    PREFILL_RATE,
    drift_share,
    rate_points,
    slow_down,
)
from benchmarks.sweep_store import Point, read_manifest, read_points

PNG_DPI = 110
MAX_DRIFT = 0.15
FLEET_FILE = "fleet.csv"  # of a simulation: the pools over time
EXPORTED = ("report.html", "summary.csv", "pd_plan.json", "policy.yaml", "sweep.json")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1c1c1c; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.verdict { border-left: 4px solid #0072b2; background: #eef5fa; padding: .6rem 1rem; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; } th:first-child, td:first-child
{ text-align: left; } .bad { color: #b03a00; } svg { max-width: 100%; height: auto; } .note { color: #555; }
"""


def write_report(directory: Path) -> Path:
    """Draws what the sweep's directory holds, and sums its points up as JSON and CSV; gives the HTML's path.

    Raises `SweepDirectoryError` for no sweep."""
    data = SweepData(
        read_manifest(directory), tuple(read_points(directory)), _read_plan(directory), _read_fleet(directory)
    )
    rows = [_summary_row(point) for point in data.points]
    write_summary_json(directory / "summary.json", rows)
    write_summary_csv(directory / "summary.csv", rows)
    sections = [_header(data), _verdict(data), _knees(data)]
    for name, (title, draw) in FIGURES.items():
        figure = draw(data)
        if figure is None:
            sections.append(f"<h2>{title}</h2><p class=note>Not measured in this sweep.</p>")
            continue
        figure.savefig(directory / f"{name}.png", dpi=PNG_DPI)
        sections.append(f"<h2>{title}</h2>\n{_inline_svg(figure)}")
    sections.append(_table(data))
    body = "\n".join(sections)
    path = directory / "report.html"
    path.write_text(
        f'<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f"<title>Tandem sweep</title><style>{STYLE}</style><body>\n{body}\n</body></html>\n",
        encoding="utf-8",
    )
    return path


def export_report(directory: Path, to: Path) -> list[Path]:
    """Copies what is worth keeping of a finished sweep, without raw records: some hundred kilobytes."""
    write_report(directory)
    to.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copy2(directory / name, to / name)) for name in EXPORTED if (directory / name).is_file()]


def _summary_row(point: Point) -> SummaryRow:
    told: dict[str, Any] = {"stage": point.stage, "deployment": point.deployment, "is_simulated": is_simulated(point)}
    measured = {f"measured.{name}": value for name, value in point.measured.items()}
    return told | point.params | measured, point.summary


def _read_fleet(directory: Path) -> tuple[dict[str, float], ...]:
    path = directory / FLEET_FILE
    if not path.is_file():
        return ()
    with path.open(encoding="utf-8", newline="") as lines:
        return tuple({name: float(value) for name, value in row.items()} for row in csv.DictReader(lines))


def _read_plan(directory: Path) -> dict[str, Any] | None:
    path = directory / "pd_plan.json"
    if not path.is_file():
        return None
    plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return plan


def _header(data: SweepData) -> str:
    settings, machine = data.manifest["settings"], data.manifest["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    flags = " ".join(data.manifest.get("serve_flags", ()))
    started = f"<p>The clusters were started with <code>{_text(flags)}</code>.</p>" if flags else ""
    is_all_simulated = bool(data.points) and all(map(is_simulated, data.points))
    kind = "Simulation" if is_all_simulated else "Saturation sweep"
    simulated = "<p class=bad>Simulated on a virtual clock: nothing here was measured on a running cluster.</p>"
    told = (
        f"<h1>{kind}: {_text(data.manifest['model'])}</h1>"
        f"<p>{_text(machine['cpu'])}, {machine['usable_cpus']} CPUs, {machine['memory_gib']:.0f} GiB, "
        f"Linux {_text(machine['kernel'])}, {_text(packages)}. "
        f"Prompts of {settings['input_low']} to {settings['input_high']} tokens, answers of {settings['output_low']} "
        f"to {settings['output_high']}, hit rate {settings['hit_rate']:g}. Objective: TTFT {settings['ttft_ms']:g} ms, "
        f"TPOT {settings['tpot_ms']:g} ms, for 90 % of the requests. Open loop, Poisson, seed {settings['seed']}, "
        f"{settings['run_s']:g} s a run; latency counts from the intended send time.</p>"
    )
    return told + started + (simulated if is_all_simulated else "")


def _verdict(data: SweepData) -> str:
    plan = data.plan
    if plan is None:
        return "<p class=note>No plan: the sweep did not get that far.</p>"
    lines = [
        f"<b>{_text(plan['verdict'])}</b>: {_text(plan['reason'])}.",
        f"One prefill worker carries {plan['prefill_requests_per_s']:.2f} requests/s, one decode worker "
        f"{plan['decode_requests_per_s']:.2f}: {plan['ratio']:.2f} prefill for each decode.",
    ]
    if (check := plan["check"]) is not None:
        lines.append(
            f"Coupled check: {_text(check['deployment'])} carried {check['measured_per_s']:.2f} requests/s "
            f"[{check['measured_low_per_s']:.2f}, {check['measured_high_per_s']:.2f}], predicted "
            f"{check['predicted_per_s']:.2f}: {plan['prediction_error']:+.0%}."
        )
        if (simulated := check.get("simulated_per_s")) is not None:
            lines.append(
                f"The same models carry {simulated:.2f} (simulated) in these runs' own arrivals: what a few hundred "
                "requests have of luck is in both."
            )
    lines += _machine_lines(data)
    if plan["warning"]:
        lines.append(f"<span class=bad>Careful: {_text(plan['warning'])}.</span>")
    if not plan["is_aggregated_measured"]:
        lines.append("The aggregated figure is the model's: no control was measured.")
    return f"<div class=verdict>{'<br>'.join(lines)}</div>"


def _machine_lines(data: SweepData) -> list[str]:
    """What the machine did to the measurements."""
    lines = []
    if data.of(INTERFERENCE):
        slower = max(map(slow_down, data.of(INTERFERENCE)))
        lines.append(
            f"Prompts took {slower:.2f} times as long beside decoding sequences as alone; the plan counts that for the "
            "share of time in which some decode."
        )
    if len(data.of(DRIFT)) > 1 and abs(drift := drift_share(data.of(DRIFT))) > MAX_DRIFT:
        lines.append(
            f"<span class=bad>The same prompt took {drift:+.0%} longer while the coupled runs went than when the pools "
            "were timed: this machine was not the same all the while. The coupled check's prediction counts that; "
            "compare the rest with care.</span>"
        )
    return lines


def _knees(data: SweepData) -> str:
    rows = []
    for stage, name in ((PREFILL_RATE, "prefill alone"), (COUPLED, "coupled"), (CONTROL, "aggregated control")):
        points = rate_points(data.of(stage))
        if points:
            rows.append(
                f"<tr><td>{name}<td>{_interval(capacity_at_slo(points))}<td>{_interval(saturation(points))}"
                f"<td>{_number(first_violation(points))}"
            )
    head = "<tr><th>requests/s<th>capacity at the objective<th>throughput plateau<th>first violation"
    return f"<h2>Capacity</h2><table>{head}{''.join(rows)}</table>" if rows else ""


def _table(data: SweepData) -> str:
    head = (
        "<tr><th>point<th>offered/s<th>achieved/s<th>attained<th>TTFT p50<th>p99<th>TPOT p50<th>p99"
        "<th>dispatch p99<th>flags"
    )
    rows = [_row(point) for point in data.points]
    return f"<h2>All points</h2><table>{head}{''.join(rows)}</table>"


def _row(point: Point) -> str:
    summary = point.summary
    flags = ", ".join(summary["flags"])
    cells: Sequence[float | None] = (
        summary["offered_per_s"],
        summary["achieved_per_s"],
        summary["attainment"]["value"] if summary["attainment"] else None,
        summary["ttft_ms"]["p50"]["value"],
        summary["ttft_ms"]["p99"]["value"],
        summary["tpot_ms"]["p50"]["value"],
        summary["tpot_ms"]["p99"]["value"],
        summary["dispatch_delay_ms"]["p99"]["value"],
    )
    marked = "" if flags == "ok" else " class=bad"
    return f"<tr><td>{_text(point.key)}" + "".join(f"<td>{_number(cell)}" for cell in cells) + f"<td{marked}>{flags}"


def _inline_svg(figure: Any) -> str:
    import matplotlib as mpl

    buffer = io.StringIO()
    # Text stays text: small, and it can be searched.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tandem"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    drawn = buffer.getvalue()
    return drawn[drawn.index("<svg") :]


def _interval(value: Interval) -> str:
    return f"{_number(value.value)} [{_number(value.low)}, {_number(value.high)}]"


def _number(value: float | None) -> str:
    if value is None or value != value:
        return "-"
    return "∞" if value == float("inf") else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"


def _text(value: object) -> str:
    return html.escape(str(value))
