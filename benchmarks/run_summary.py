"""A run's records as one row of numbers, and the flags that say whether the row may be believed.

What counts: requests due after the warm-up (MSER-5) and inside the window. Latencies are of requests that ended well;
failed and unfinished ones have none, and miss every objective. All latencies count from the intended send time.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load_run import LoadRun
from benchmarks.request_record import Outcome, RequestRecord
from benchmarks.statistics import (
    Interval,
    SlopeTest,
    in_flight,
    mean_interval,
    mser5,
    percentile,
    percentile_interval,
    slope_test,
)

SCHEMA_VERSION = 1
# Below this share of what was offered the server does not keep up.
MIN_ACHIEVED_SHARE = 0.97
# What is in flight moves up and down: a difference of the window's ends below this many standard deviations is that.
MIN_PILE_DEVIATIONS = 2.0
# Of fewer requests no trend can be told; the attainment still can.
MIN_TREND_REQUESTS = 20
# The parts of the window at its ends that stand for them.
END_SHARE = 0.1
# A client that is late by more than this (or this share of the median TTFT) measures itself.
MAX_DISPATCH_DELAY_S = 0.005
MAX_DISPATCH_SHARE = 0.05
# More prompt tokens served from cache than the run's own requests can have put there.
MAX_EXTRA_HIT_RATE = 0.02
# In-flight must grow by this share of its mean over the window, beyond chance, to be called unsteady.
MIN_UNSTEADY_GROWTH = 0.2
IN_FLIGHT_GRID = 400


class Flag(Enum):
    """Why a run's figures may not be what they seem; OK stands alone."""

    OK = "ok"
    CLIENT_LIMITED = "client_limited"
    SATURATED = "saturated"
    UNSTEADY = "unsteady"
    CACHE_WARM = "cache_warm"
    ERRORS = "errors"


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good. TPOT binds only where an answer has one."""

    ttft_ms: float
    tpot_ms: float

    def is_met(self, record: RequestRecord) -> bool:
        if not record.is_ok or record.ttft_s is None or record.ttft_s * 1e3 > self.ttft_ms:
            return False
        return record.tpot_s is None or record.tpot_s * 1e3 <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Distribution:
    """One latency over requests (or tokens), in milliseconds; NaN where there is none."""

    count: int
    mean: Interval
    p50: Interval
    p90: Interval
    p99: Interval
    maximum: float


@dataclass(frozen=True, slots=True)
class ClassGoodput:
    """One class of traffic against the objective."""

    offered: int
    good: int

    @property
    def attainment(self) -> float:
        return self.good / self.offered if self.offered else math.nan


@dataclass(frozen=True, slots=True)
class FlightTrend:
    """Requests in flight over the window: how many, how much they vary, how many more at its end than at its start."""

    mean: float
    deviation: float
    growth: float
    slope: SlopeTest

    def is_piling_up(self, num_offered: int) -> bool:
        """What was not achieved of what was offered is what piled up: above 3 %, and above its own ups and downs."""
        return self._has_grown(num_offered) and self.growth > (1 - MIN_ACHIEVED_SHARE) * num_offered

    def is_trending(self, num_offered: int) -> bool:
        """It grows along the whole window, beyond chance and by a fifth of its mean."""
        return self._has_grown(num_offered) and self.slope.is_growing and self.slope.growth_share > MIN_UNSTEADY_GROWTH

    def _has_grown(self, num_offered: int) -> bool:
        return num_offered >= MIN_TREND_REQUESTS and self.growth > MIN_PILE_DEVIATIONS * self.deviation


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Everything that is said about one run. `flags` first: figures of a run that is not OK are no result."""

    flags: tuple[Flag, ...]
    num_offered: int
    num_ok: int
    outcomes: dict[str, int]
    warmup_s: float
    window_s: float
    offered_per_s: float
    achieved_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_ms: Distribution
    itl_ms: Distribution  # over tokens
    tpot_ms: Distribution  # over requests with more than one chunk
    num_tpot_not_applicable: int
    latency_ms: Distribution
    service_ms: Distribution  # from the actual send time
    dispatch_delay_ms: Distribution
    in_flight: FlightTrend
    expected_hit_rate: float
    observed_hit_rate: float | None  # None: the server does not report it
    are_counts_exact: bool
    attainment: Interval | None = None  # None: no objective was given
    goodput_per_s: float | None = None
    by_class: dict[str, ClassGoodput] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        return self.flags == (Flag.OK,)

    @property
    def extra_hit_rate(self) -> float | None:
        """Observed less expected: above zero means that the cache was warm before the run."""
        return None if self.observed_hit_rate is None else self.observed_hit_rate - self.expected_hit_rate


def summarise(run: LoadRun, slo: Slo | None = None, seed: int = 0, *, is_closed_loop: bool = False) -> RunSummary:
    """The summary of a run. A closed loop has its warm-up marked already and cannot saturate or be late."""
    counted, start_s = _counted(run, is_closed_loop=is_closed_loop)
    good = [record for record in counted if record.is_ok]
    window_s = max(run.window_end_s - start_s, 1e-9)
    settled_s = start_s if is_closed_loop else _settled_s(counted, start_s, run.window_end_s)
    settled_window_s = max(run.window_end_s - settled_s, 1e-9)
    ended = [r for r in run.records if r.is_ok and settled_s <= r.ended_s < run.window_end_s]
    flight = _flight_trend(run, settled_s)
    expected, observed = _hit_rates(good)
    is_met = [slo.is_met(record) for record in counted] if slo else []
    ttft = _distribution([r.ttft_s for r in good if r.ttft_s is not None], seed)
    dispatch = _distribution([r.dispatch_delay_s for r in counted if r.outcome is not Outcome.NOT_SENT], seed)
    summary = RunSummary(
        flags=(),
        num_offered=len(counted),
        num_ok=len(good),
        outcomes=dict(Counter(record.outcome.value for record in counted)),
        warmup_s=start_s - run.window_start_s,
        window_s=window_s,
        offered_per_s=len(counted) / window_s,
        achieved_per_s=len(ended) / settled_window_s,
        output_tokens_per_s=_tokens_between(run.records, settled_s, run.window_end_s) / settled_window_s,
        prompt_tokens_per_s=sum(r.prompt_tokens for r in ended) / settled_window_s,
        ttft_ms=ttft,
        itl_ms=_itl_distribution(good, seed),
        tpot_ms=_distribution([r.tpot_s for r in good if r.tpot_s is not None], seed),
        num_tpot_not_applicable=sum(r.tpot_s is None for r in good),
        latency_ms=_distribution([r.latency_s for r in good], seed),
        service_ms=_distribution([r.service_s for r in good], seed),
        dispatch_delay_ms=dispatch,
        in_flight=flight,
        expected_hit_rate=expected,
        observed_hit_rate=observed,
        are_counts_exact=all(r.are_counts_exact for r in good),
        attainment=mean_interval(np.asarray(is_met, dtype=np.float64), seed) if slo else None,
        goodput_per_s=sum(is_met) / window_s if slo else None,
        by_class=_by_class(counted, is_met) if slo else {},
    )
    return _flagged(summary, run, is_closed_loop=is_closed_loop)


SummaryRow = tuple[Mapping[str, Any], Mapping[str, Any]]  # what was measured, and its summary as `to_json` gives it


def write_summary_json(path: Path, rows: Iterable[SummaryRow]) -> None:
    """One object with the schema's version and a row for each (point, summary)."""
    written = [{"point": dict(point), "summary": dict(summary)} for point, summary in rows]
    document = {"schema": "tandem.bench.summary", "version": SCHEMA_VERSION, "rows": written}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_summary_csv(path: Path, rows: Iterable[SummaryRow]) -> None:
    """The same rows, flat: `ttft_ms.p99.value` and so on; the first column is the schema's version."""
    flat = [{"schema_version": SCHEMA_VERSION} | _flat(dict(point)) | _flat(dict(summary)) for point, summary in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    with path.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, columns, restval="")
        writer.writeheader()
        writer.writerows(flat)


def to_json(summary: RunSummary) -> dict[str, Any]:
    """Plain JSON values; what is not a number (no such latency) becomes null."""
    row: dict[str, Any] = asdict(summary) | {
        "flags": [flag.value for flag in summary.flags],
        "extra_hit_rate": summary.extra_hit_rate,
    }
    return {name: _finite(value) for name, value in row.items()}


def _counted(run: LoadRun, *, is_closed_loop: bool) -> tuple[list[RequestRecord], float]:
    """The records that count, in order of intended time, and where counting begins."""
    due = sorted((r for r in run.records if not r.is_warmup), key=lambda record: record.intended_s)
    if is_closed_loop:
        return due, run.window_start_s
    num_warmup = mser5([record.latency_s for record in due])
    if num_warmup == 0:
        return due, run.window_start_s
    return due[num_warmup:], due[num_warmup].intended_s


def _flagged(summary: RunSummary, run: LoadRun, *, is_closed_loop: bool) -> RunSummary:
    flags: list[Flag] = []
    median_ttft_ms = summary.ttft_ms.p50.value
    allowed_ms = max(
        MAX_DISPATCH_DELAY_S * 1e3, MAX_DISPATCH_SHARE * (0.0 if math.isnan(median_ttft_ms) else median_ttft_ms)
    )
    if not is_closed_loop:
        if run.hit_in_flight_limit or summary.dispatch_delay_ms.p99.value > allowed_ms:
            flags.append(Flag.CLIENT_LIMITED)
        if summary.in_flight.is_piling_up(summary.num_offered):
            flags.append(Flag.SATURATED)
        if summary.in_flight.is_trending(summary.num_offered):
            flags.append(Flag.UNSTEADY)
    if summary.extra_hit_rate is not None and summary.extra_hit_rate > MAX_EXTRA_HIT_RATE:
        flags.append(Flag.CACHE_WARM)
    if summary.num_ok < summary.num_offered:
        flags.append(Flag.ERRORS)
    values = {name: getattr(summary, name) for name in summary.__slots__}
    return RunSummary(**values | {"flags": tuple(flags) or (Flag.OK,)})


def _settled_s(counted: Sequence[RequestRecord], start_s: float, end_s: float) -> float:
    """When completions can have caught up with arrivals: one early request's latency after counting begins.

    At the start nothing is there to complete; counting from there would call every short run saturated. Only early
    latencies decide, so that a growing queue does not excuse itself; half of the window is always kept.
    """
    early = sorted(record.latency_s for record in counted[: max(1, len(counted) // 5)])
    latency_s = early[len(early) // 2] if early else 0.0
    return min(start_s + latency_s, (start_s + end_s) / 2)


def _flight_trend(run: LoadRun, start_s: float) -> FlightTrend:
    grid = np.linspace(start_s, run.window_end_s, IN_FLIGHT_GRID, endpoint=False)
    sent = [record for record in run.records if record.outcome is not Outcome.NOT_SENT]
    counts = in_flight([r.intended_s for r in sent], [r.ended_s for r in sent], grid)
    num_end = max(1, int(IN_FLIGHT_GRID * END_SHARE))
    return FlightTrend(
        mean=float(counts.mean()),
        deviation=float(counts.std()),
        growth=float(counts[-num_end:].mean() - counts[:num_end].mean()),
        slope=slope_test(grid, counts),
    )


def _hit_rates(good: Sequence[RequestRecord]) -> tuple[float, float | None]:
    """Share of prompt tokens that the run could have had from cache, and the share that the server says it had.

    Only of requests of which it is known what they share: the two are compared.
    """
    known = [record for record in good if record.shareable_tokens is not None]
    total = sum(record.prompt_tokens for record in known)
    expected = sum(record.shareable_tokens or 0 for record in known) / total if total else 0.0
    reported = [record for record in known if record.cached_tokens is not None]
    reported_total = sum(record.prompt_tokens for record in reported)
    if not reported_total:
        return expected, None
    return expected, sum(record.cached_tokens or 0 for record in reported) / reported_total


def _by_class(counted: Sequence[RequestRecord], is_met: Sequence[bool]) -> dict[str, ClassGoodput]:
    offered = Counter(record.traffic_class for record in counted)
    good = Counter(record.traffic_class for record, met in zip(counted, is_met, strict=True) if met)
    return {name: ClassGoodput(offered[name], good[name]) for name in sorted(offered)}


def _tokens_between(records: Iterable[RequestRecord], start_s: float, end_s: float) -> int:
    return sum(
        tokens
        for record in records
        for time_s, tokens in zip(record.chunk_times_s, record.chunk_tokens, strict=True)
        if start_s <= time_s < end_s
    )


def _distribution(seconds: Sequence[float], seed: int) -> Distribution:
    values = np.asarray(seconds, dtype=np.float64) * 1e3
    return Distribution(
        count=values.size,
        mean=mean_interval(values, seed),
        p50=percentile_interval(values, 0.50, seed),
        p90=percentile_interval(values, 0.90, seed),
        p99=percentile_interval(values, 0.99, seed),
        maximum=percentile(values, 1.0),
    )


def _itl_distribution(good: Sequence[RequestRecord], seed: int) -> Distribution:
    """Token-weighted gaps; resampled by request."""
    gaps = [(gap_s * 1e3, weight, place) for place, record in enumerate(good) for gap_s, weight in record.itl_gaps_s()]
    if not gaps:
        return _distribution([], seed)
    values, weights, groups = (np.asarray(column) for column in zip(*gaps, strict=True))
    mean = float(np.average(values, weights=weights))
    shares = {share: percentile_interval(values, share, seed, groups.tolist(), weights) for share in (0.50, 0.90, 0.99)}
    return Distribution(
        count=int(weights.sum()),
        # The mean's interval is not used by any decision: its value stands alone.
        mean=Interval(mean, mean, mean),
        p50=shares[0.50],
        p90=shares[0.90],
        p99=shares[0.99],
        maximum=float(values.max()),
    )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {name: inner for key, part in value.items() for name, inner in _flat(part, f"{prefix}{key}.").items()}
    return {prefix[:-1]: "|".join(map(str, value)) if isinstance(value, list) else value}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
