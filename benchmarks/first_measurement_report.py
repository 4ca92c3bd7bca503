"""The first measurement as JSON, as a small Markdown table and as a plot."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.measurement import Measurement

SCHEMA_VERSION = 1


def write_report(directory: Path, measurement: Measurement) -> str:
    """Writes `first_measurement.{json,md,png}` and gives the Markdown. Raises nothing for a missing plot library:
    the table then says that there is no plot."""
    document = {"schema": "tandem.bench.first_measurement", "version": SCHEMA_VERSION, **asdict(measurement)}
    (directory / "first_measurement.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    table = markdown(measurement)
    if not _plot(directory / "first_measurement.png", measurement):
        table += "\nNo plot: matplotlib is not installed (`pip install 'tandem-serve[bench]'`).\n"
    (directory / "first_measurement.md").write_text(table, encoding="utf-8")
    return table


def markdown(measurement: Measurement) -> str:
    """The table with its machine above and what is missing below."""
    lines = [
        f"# First measurement: {measurement.model}",
        "",
        measurement.machine.one_line + ".",
        f"Median of {measurement.shape.runs} runs; least and greatest in brackets. "
        f"Load average before: {measurement.machine.load_average}.",
        "",
    ]
    for worker, details in measurement.worker_details.items():
        lines.append(f"- {worker}: " + ", ".join(f"{name} {value}" for name, value in details.items() if value))
    lines += ["", "| what | value | unit |", "|---|---|---|"]
    for figure in measurement.figures:
        value = figure.value
        lines.append(
            f"| {figure.name} | {_number(value.value)} [{_number(value.low)} - {_number(value.high)}] | {figure.unit} |"
        )
    lines.append("")
    lines += [f"Not measured: {name}: {reason}." for name, reason in measurement.missing.items()]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    decimals = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3
    return f"{value:,.{decimals}f}"


def _plot(path: Path, measurement: Measurement) -> bool:
    """One panel for each unit, bars with the spread of the runs; false without matplotlib."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ModuleNotFoundError:
        return False
    units = list(dict.fromkeys(figure.unit for figure in measurement.figures))
    canvas = Canvas(figsize=(9, 1.2 + 0.42 * len(measurement.figures) + 0.6 * len(units)), layout="constrained")
    heights = [sum(figure.unit == unit for figure in measurement.figures) for unit in units]
    panels = canvas.subplots(len(units), 1, squeeze=False, height_ratios=heights)[:, 0]
    for unit, panel in zip(units, panels, strict=True):
        figures = [figure for figure in measurement.figures if figure.unit == unit][::-1]
        values = [figure.value.value for figure in figures]
        errors = [
            [figure.value.value - figure.value.low for figure in figures],
            [figure.value.high - figure.value.value for figure in figures],
        ]
        panel.barh([figure.name for figure in figures], values, xerr=errors, color="#4878a8", ecolor="#333333")
        panel.set_xlabel(unit)
        if unit == "ms":
            # A gap between tokens and a long prompt are three orders of magnitude apart.
            panel.set_xscale("log")
        panel.spines[["top", "right"]].set_visible(False)
    canvas.suptitle(f"{measurement.model}, {measurement.machine.cpu}", fontsize=10)
    canvas.savefig(path, dpi=110)
    return True
