"""From routers' running totals to the load of the last few ticks: arrivals, lengths, percentiles.

Pure: records and times come in. Arrivals count also when they were refused; a router that starts anew starts its totals
anew; one that is gone takes its past with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.v1 import membership_pb2

from deploy.autoscaler.signals import Demand, TtftStage

ITL = "itl"
# Before any answer has ended: what a chat's answer has, about.
DEFAULT_OUTPUT_TOKENS = 128.0
PERCENTILE = 0.9


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """What the routers saw within the window."""

    demand: Demand
    ttft_p90_ms: Mapping[TtftStage, float] = field(default_factory=dict)
    itl_p90_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class _Reading:
    at_s: float
    records: Mapping[tuple[str, str], membership_pb2.RouterRecord]  # by name and incarnation


@dataclass(slots=True)
class _Totals:
    """Differences over the window, summed over routers."""

    encoded: int = 0
    prompt_tokens: int = 0
    ended: int = 0
    ended_prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0


class LoadMeter:
    """Owned by the autoscaler. `read` once a tick."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque()
        self._uncached_tokens = self._cached_tokens = 0.0
        self._output_tokens = DEFAULT_OUTPUT_TOKENS

    def read(self, now_s: float, window_s: float, records: Sequence[membership_pb2.RouterRecord]) -> OfferedLoad | None:
        """The load of about the last `window_s`; None at the first reading, which has nothing to compare with."""
        latest = _Reading(now_s, {(record.router_id, record.incarnation): record for record in records})
        self._readings.append(latest)
        while len(self._readings) > 2 and self._readings[1].at_s <= now_s - window_s:
            self._readings.popleft()
        first = self._readings[0]
        if first is latest or now_s <= first.at_s:
            return None
        totals = _differences(first, latest)
        self._learn_lengths(totals)
        return OfferedLoad(
            Demand(
                requests_per_s=_arrival_rate(first, latest),
                uncached_tokens_per_request=self._uncached_tokens,
                cached_tokens_per_request=self._cached_tokens,
                output_tokens_per_request=self._output_tokens,
                queued_requests=sum(record.waiting_requests for record in records),
            ),
            {
                stage: percentile
                for stage in TtftStage
                if (percentile := _percentile(_histogram(stage.value, first, latest))) is not None
            },
            _percentile(_histogram(ITL, first, latest)) or 0.0,
        )

    def _learn_lengths(self, totals: _Totals) -> None:
        """A window in which nothing arrived or ended leaves the means as they were."""
        if totals.encoded:
            cached_share = totals.cached_tokens / totals.ended_prompt_tokens if totals.ended_prompt_tokens else 0.0
            mean = totals.prompt_tokens / totals.encoded
            self._cached_tokens = mean * cached_share
            self._uncached_tokens = mean - self._cached_tokens
        if totals.ended:
            self._output_tokens = totals.generation_tokens / totals.ended


def _differences(first: _Reading, latest: _Reading) -> _Totals:
    totals = _Totals()
    for before, now in _pairs(first, latest):
        totals.encoded += now.prompts_encoded - before.prompts_encoded
        totals.prompt_tokens += now.prompt_tokens_encoded - before.prompt_tokens_encoded
        totals.ended += now.prompts_ended - before.prompts_ended
        totals.ended_prompt_tokens += now.prompt_tokens_ended - before.prompt_tokens_ended
        totals.cached_tokens += now.cached_tokens_ended - before.cached_tokens_ended
        totals.generation_tokens += now.generation_tokens - before.generation_tokens
    return totals


def _arrival_rate(first: _Reading, latest: _Reading) -> float:
    """Over each router's own clock: it writes its totals at its heartbeats, not when they are read here."""
    rate = 0.0
    for before, now in _pairs(first, latest):
        own_s = (now.clock_ms - before.clock_ms) / 1000 if before.clock_ms else 0.0
        rate += (now.prompts_arrived - before.prompts_arrived) / (own_s or latest.at_s - first.at_s)
    return rate


def _pairs(
    first: _Reading, latest: _Reading
) -> Iterator[tuple[membership_pb2.RouterRecord, membership_pb2.RouterRecord]]:
    """A router that started since counts from zero."""
    for key, now in latest.records.items():
        yield first.records.get(key, membership_pb2.RouterRecord()), now


def _histogram(name: str, first: _Reading, latest: _Reading) -> dict[float, int]:
    """Counts by upper bound; what is above all bounds counts at twice the last one."""
    counts: dict[float, int] = {}
    for before, now in _pairs(first, latest):
        if name not in now.latencies:
            continue
        totals = now.latencies[name]
        earlier = before.latencies[name].counts if name in before.latencies else [0] * len(totals.counts)
        bounds = [*totals.bounds_ms, 2 * totals.bounds_ms[-1]]
        for bound, count, count_before in zip(bounds, totals.counts, earlier, strict=True):
            counts[bound] = counts.get(bound, 0) + count - count_before
    return counts


def _percentile(counts: Mapping[float, int]) -> float | None:
    """The upper bound of the bucket that the 90th percentile lies in; None without a count."""
    total = sum(counts.values())
    seen = 0
    for bound in sorted(counts):
        seen += counts[bound]
        if total and seen >= PERCENTILE * total:
            return bound
    return None
