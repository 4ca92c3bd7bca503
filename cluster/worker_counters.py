"""Running totals of one worker: as `WorkerStatus.counters` and as Prometheus metrics, counted in one place."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Mapping

from prometheus_client import Counter as PrometheusCounter
from tandem.v1 import worker_pb2

from cluster.telemetry import WorkerMetrics

TIERS = ("host", "disk")
TIER_TOTAL = re.compile(r"kv_tier_(host|disk)_(hits|misses|evictions|corrupt|refused)")
NO_DRAFT_PREFIX = "speculation_no_draft_"
# One drafter's; those of all together have no drafter in their name, and are what these are made of.
DRAFTS_AT = re.compile(r"speculation_(?P<drafter>[a-z]+)_(?P<outcome>proposed|accepted)_at_(?P<position>\d+)")


class WorkerCounters:
    """Safe to call from any thread: the engine's and the transports' count here too."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self.metrics = metrics
        self._plain = {
            "preemptions": metrics.preemptions,
            "iterations": metrics.iterations,
            "iteration_seconds": metrics.iteration_time,
            "iteration_tokens": metrics.iteration_tokens,
            "speculation_steps": metrics.drafts_verified,
            "kv_tier_restores": metrics.tier_restores,
            "kv_tier_restore_seconds": metrics.tier_restore_time,
            "kv_tier_evicted_lost_blocks": metrics.tier_lost_blocks,
        }
        self._totals: Counter[str] = Counter()
        self._largest_batch = 0
        self._shown_stale = self._shown_bad = 0
        self._shown_totals: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._totals[name] += amount

    def engine_step(self, num_sequences: int, num_tokens: int) -> None:
        """A step that gave tokens to so many sequences."""
        self.metrics.batch_sizes.observe(num_sequences)
        self.metrics.generation_tokens.inc(num_tokens)
        with self._lock:
            self._totals["generation_tokens"] += num_tokens
            self._totals["engine_steps"] += 1
            self._largest_batch = max(self._largest_batch, num_sequences)

    def prompt_done(self, num_tokens: int, num_cached: int) -> None:
        """A prompt was computed here; that many of its tokens were found in this worker's prefix cache."""
        self.metrics.prompt_tokens.inc(num_tokens)
        self.metrics.prefix_cache_queries.inc(num_tokens)
        self.metrics.prefix_cache_hits.inc(num_cached)
        with self._lock:
            self._totals["prompt_tokens"] += num_tokens
            self._totals["prefix_cache_hit_tokens"] += num_cached

    def kv_moved(self, num_bytes: int) -> None:
        self.metrics.kv_bytes_moved.inc(num_bytes)

    def show_arrivals(self, num_stale_frames: int, num_bad_digests: int) -> None:
        """Running totals that the landing table keeps."""
        self.metrics.kv_frames_stale.inc(num_stale_frames - self._shown_stale)
        self.metrics.kv_digest_failures.inc(num_bad_digests - self._shown_bad)
        self._shown_stale, self._shown_bad = num_stale_frames, num_bad_digests

    def show_load(self, load: worker_pb2.LoadReport, conservation_error: int) -> None:
        """Brings the gauges up to date; called at every heartbeat."""
        metrics = self.metrics
        metrics.requests_running.set(load.running_requests)
        metrics.requests_waiting.set(load.waiting_requests)
        metrics.kv_cache_usage.set(1.0 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0)
        metrics.kv_blocks_quarantined.set(load.quarantined_blocks)
        metrics.block_conservation_error.set(conservation_error)

    def show_engine(self, totals: Mapping[str, float]) -> None:
        """Running totals that the engine keeps, by `Engine.counters`' names."""
        for name, total in totals.items():
            counter = self._engine_counter(name)
            if counter is not None:
                counter.inc(total - self._shown_totals.get(name, 0.0))
                self._shown_totals[name] = total
        for tier in TIERS:
            if (capacity_bytes := totals.get(f"kv_tier_{tier}_capacity_bytes")) is not None:
                self.metrics.show_tier(tier, totals[f"kv_tier_{tier}_bytes"], capacity_bytes)

    def _engine_counter(self, name: str) -> PrometheusCounter | None:
        """The metric of one of the engine's totals; None for what has none."""
        if name in self._plain:
            return self._plain[name]
        if by_tier := TIER_TOTAL.fullmatch(name):
            return self.metrics.tier_total(*by_tier.groups())
        if name.startswith(NO_DRAFT_PREFIX):
            return self.metrics.no_drafts(name.removeprefix(NO_DRAFT_PREFIX))
        by_drafter = DRAFTS_AT.fullmatch(name)
        return self.metrics.drafts_at(*by_drafter.group("drafter", "position", "outcome")) if by_drafter else None

    def as_numbers(self) -> dict[str, float]:
        with self._lock:
            return {name: float(total) for name, total in self._totals.items()} | {
                "max_batch_size": float(self._largest_batch)
            }
