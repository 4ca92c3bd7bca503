"""Is B worse than A? Two sweeps or two load runs, request against request where both saw the same arrival.

Pairs take the workload's own variance out: what is left is the difference. B is worse where a metric's interval lies
wholly above the tolerated share, or where requests fail that did not fail before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.request_record import RequestRecord, read_records
from benchmarks.statistics import Interval, paired_interval

# Two runs of the same build differ by a few per cent on a shared machine.
DEFAULT_TOLERANCE = 0.05
MIN_PAIRS = 3
SAME_ARRIVAL_S = 1e-6

METRICS: dict[str, Callable[[RequestRecord], float | None]] = {
    "TTFT": lambda record: record.ttft_s,
    "TPOT": lambda record: record.tpot_s,
    "latency": lambda record: record.latency_s,
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of one point. The difference is B - A as a share of A's mean: above 0 is slower."""

    point: str
    metric: str
    num_pairs: int
    first_ms: float
    second_ms: float
    difference: Interval
    is_worse: bool


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """All rows, and the points that could not be compared with the reason."""

    rows: tuple[Comparison, ...]
    skipped: dict[str, str]

    @property
    def is_worse(self) -> bool:
        return any(row.is_worse for row in self.rows)


def compare_directories(first: Path, second: Path, tolerance: float = DEFAULT_TOLERANCE) -> ComparisonResult:
    """Every point that both directories hold raw records of. Raises `FileNotFoundError` when they share none."""
    ours, theirs = _records_by_point(first), _records_by_point(second)
    shared = [name for name in ours if name in theirs]
    if not shared:
        raise FileNotFoundError(
            f"{first} and {second} have no measured point in common: "
            "sweep B with `--rates` as A had them, or replay the same load"
        )
    rows: list[Comparison] = []
    skipped = dict.fromkeys(sorted(set(ours) ^ set(theirs)), "only in one of the two")
    for name in shared:
        before = read_records(ours[name])[1]
        after = read_records(theirs[name])[1]
        reason = _why_not_comparable(before, after)
        if reason:
            skipped[name] = reason
        else:
            rows += compare_records(name, before, after, tolerance)
    return ComparisonResult(tuple(rows), skipped)


def compare_records(
    point: str, first: Sequence[RequestRecord], second: Sequence[RequestRecord], tolerance: float
) -> list[Comparison]:
    """All metrics of one point over the pairs that ended well in both; and the requests that failed."""
    pairs = [
        (before, after)
        for before, after in _pairs(first, second)
        if before.is_ok and after.is_ok and not before.is_warmup
    ]
    rows = []
    for metric, value_of in METRICS.items():
        values = [(value_of(before), value_of(after)) for before, after in pairs]
        known = np.array([(a, b) for a, b in values if a is not None and b is not None])
        if len(known) >= MIN_PAIRS:
            rows.append(_row(point, metric, known, tolerance))
    failed_before, failed_after = (sum(not record.is_ok for record in records) for records in (first, second))
    if failed_after > failed_before:
        more = (failed_after - failed_before) / len(second)
        worse = more > tolerance
        rows.append(
            Comparison(point, "failed", len(second), failed_before, failed_after, Interval(more, more, more), worse)
        )
    return rows


def comparison_markdown(result: ComparisonResult) -> str:
    """A table for people; the worse rows say so."""
    lines = ["| point | metric | pairs | A ms | B ms | B - A | |", "|---|---|---|---|---|---|---|"]
    for row in result.rows:
        change = row.difference
        lines.append(
            f"| {row.point} | {row.metric} | {row.num_pairs} | {row.first_ms:.1f} | {row.second_ms:.1f} | "
            f"{change.value:+.1%} [{change.low:+.1%}, {change.high:+.1%}] | {'worse' if row.is_worse else ''} |"
        )
    lines += [f"\nNot compared: {name}: {reason}." for name, reason in result.skipped.items()]
    return "\n".join(lines) + "\n"


def _row(point: str, metric: str, values: Any, tolerance: float) -> Comparison:
    before, after = values[:, 0], values[:, 1]
    mean = float(before.mean())
    difference = paired_interval(before / mean, after / mean, seed=0)
    return Comparison(
        point=point,
        metric=metric,
        num_pairs=len(values),
        first_ms=mean * 1e3,
        second_ms=float(after.mean()) * 1e3,
        difference=difference,
        is_worse=difference.low > tolerance,
    )


def _records_by_point(directory: Path) -> dict[str, Path]:
    """Raw record files by their point, without the deployment's name: 1P1D may be compared with 2A."""
    found = {}
    for path in sorted((directory / "records").glob("*.jsonl")):
        stage, _, rest = path.stem.partition("-")
        _, _, params = rest.partition("-")
        found[f"{stage}-{params}" if params else path.stem] = path
    return found


def _why_not_comparable(first: Sequence[RequestRecord], second: Sequence[RequestRecord]) -> str:
    if len(first) != len(second):
        return f"{len(first)} requests against {len(second)}"
    # A closed loop's times depend on the server: its requests are paired by their number.
    is_open_loop = not all(record.intended_s == record.sent_s for record in first)
    if is_open_loop and any(abs(a.intended_s - b.intended_s) > SAME_ARRIVAL_S for a, b in _pairs(first, second)):
        return "the arrivals differ"
    if any(a.prompt_tokens != b.prompt_tokens for a, b in _pairs(first, second) if a.is_ok and b.is_ok):
        return "the prompts differ"
    return ""


def _pairs(
    first: Sequence[RequestRecord], second: Sequence[RequestRecord]
) -> list[tuple[RequestRecord, RequestRecord]]:
    theirs = {record.index: record for record in second}
    return [(record, theirs[record.index]) for record in first if record.index in theirs]
