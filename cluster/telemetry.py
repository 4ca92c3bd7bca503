"""Prometheus metrics of a process. Names follow vLLM's with the prefix `tandem_`, so that its dashboards port.

Each process makes one registry and hands the metrics it updates to whoever updates them; nothing here is global.
`RouterMetrics` sees requests from outside, `WorkerMetrics` sees one engine.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from tandem.v1 import worker_pb2

from cluster.version import tandem_version

# A time beside each counter, histogram and label: a third of the text, and nobody asks for it.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Bounds in seconds, those of vLLM: a dashboard's percentiles stay comparable.
TIME_TO_FIRST_TOKEN_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
INTER_TOKEN_LATENCY_BOUNDS_S = (
    0.002, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
REQUEST_BOUNDS_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 600.0,
)  # fmt: skip
TRANSFER_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
TOKENS_BOUNDS = (1, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
# A peer's own words: what a label may hold of them.
MAX_REASON_CHARS = 256
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def new_registry() -> CollectorRegistry:
    """A registry with this process's memory, descriptors and CPU time, and its version."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    about = Gauge("tandem_build_info", "always 1: which version runs", ("version",), registry=registry)
    about.labels(tandem_version()).set(1)
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """What `/metrics` answers, of type `CONTENT_TYPE`."""
    return generate_latest(registry)


class RouterMetrics:
    """Requests as clients see them. `model` is a label of every series; `finished_reason` as OpenAI spells it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"tandem_{name}", meaning, ("model", *labels), registry=registry)

        def gauge(name: str, meaning: str, *labels: str) -> Gauge:
            return Gauge(f"tandem_{name}", meaning, ("model", *labels), registry=registry)

        def seconds(name: str, meaning: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"tandem_{name}_seconds", meaning, ("model", *labels), buckets=bounds, registry=registry)

        self.requests_running = gauge("num_requests_running", "requests placed and not ended")
        self.requests_waiting = gauge("num_requests_waiting", "requests admitted and not placed")
        self.prompt_tokens = counter("prompt_tokens", "prompt tokens of ended requests")
        self.generation_tokens = counter("generation_tokens", "tokens handed to clients")
        self.cached_prompt_tokens = counter("prefix_cache_hits", "prompt tokens that needed no compute")
        self.requests_ended = counter("request_success", "requests that ended", "finished_reason")
        self.requests_failed = counter("request_failure", "requests that ended with an error", "code", "stage")
        self.requests_refused = counter("request_refused", "requests refused before they were placed", "code")
        self.placements = counter("placements", "requests placed", "prefill_worker_id", "decode_worker_id")
        self.fallbacks = counter("fallbacks", "second choices that were taken", "component", "reason")
        self.workers = gauge("workers", "known workers", "role", "state")
        self.silent_workers = gauge("kv_event_silent_workers", "workers that publish no KV events: caches are guessed")
        self.redis_up = Gauge("tandem_redis_up", "1 while Redis answers", registry=registry)
        self.time_to_first_token = seconds(
            "time_to_first_token", "admission to first token", TIME_TO_FIRST_TOKEN_BOUNDS_S
        )
        self.inter_token_latency = seconds(
            "inter_token_latency", "between two tokens of a stream", INTER_TOKEN_LATENCY_BOUNDS_S
        )
        self.time_per_output_token = seconds(
            "request_time_per_output_token",
            "of an answer's tokens behind its first, their mean",
            INTER_TOKEN_LATENCY_BOUNDS_S,
        )
        self.e2e_request_latency = seconds("e2e_request_latency", "admission to end", REQUEST_BOUNDS_S)
        self.request_stage = seconds(
            "request_stage", "part of the time to first token", TIME_TO_FIRST_TOKEN_BOUNDS_S, "stage"
        )
        self.admission_wait = seconds(
            "admission_wait", "in the router's queue, of requests that waited", TIME_TO_FIRST_TOKEN_BOUNDS_S, "tier"
        )
        self.prompt_lengths = Histogram(
            "tandem_request_prompt_tokens", "prompt length", ("model",), buckets=TOKENS_BOUNDS, registry=registry
        )
        self.generation_lengths = Histogram(
            "tandem_request_generation_tokens", "tokens generated", ("model",), buckets=TOKENS_BOUNDS, registry=registry
        )


class WorkerMetrics:
    """One engine and its KV. Labels `model` and `worker_id` are bound once, here."""

    def __init__(self, registry: CollectorRegistry, model: str, worker_id: str) -> None:
        names, values = ("model", "worker_id"), (model, worker_id)

        def counter(name: str, meaning: str) -> Counter:
            return Counter(f"tandem_{name}", meaning, names, registry=registry).labels(*values)

        def gauge(name: str, meaning: str) -> Gauge:
            return Gauge(f"tandem_{name}", meaning, names, registry=registry).labels(*values)

        def histogram(name: str, meaning: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(f"tandem_{name}", meaning, names, buckets=bounds, registry=registry).labels(*values)

        self.requests_running = gauge("num_requests_running", "sequences in the running batch")
        self.requests_waiting = gauge("num_requests_waiting", "sequences in the waiting queue")
        self.kv_cache_usage = gauge("kv_cache_usage_perc", "share of KV blocks in use, 0 to 1")
        self.kv_blocks_quarantined = gauge("kv_blocks_quarantined", "blocks that a silent peer may still write")
        self.block_conservation_error = gauge("block_conservation_error", "must read 0: total minus all known blocks")
        self.prompt_tokens = counter("prompt_tokens", "prompt tokens computed or taken from the cache")
        self.generation_tokens = counter("generation_tokens", "tokens sampled")
        self.prefix_cache_queries = counter("prefix_cache_queries", "prompt tokens looked up")
        self.prefix_cache_hits = counter("prefix_cache_hits", "prompt tokens found")
        self.preemptions = counter("num_preemptions", "sequences put back for want of blocks")
        # Sums that the engine keeps, shown at each heartbeat: a step itself counts nothing.
        self.iterations = counter("iterations", "engine steps")
        self.iteration_time = counter("iteration_seconds", "spent in engine steps")
        self.iteration_tokens = counter("iteration_tokens", "tokens computed in engine steps, guesses too")
        self.batch_sizes = histogram("iteration_batch_size", "sequences of one engine step", BATCH_BOUNDS)
        self.kv_bytes_moved = counter("kv_transfer_bytes", "KV bytes sent or received")
        self.kv_frames_stale = counter("kv_transfer_stale_frames", "late frames dropped by their epoch")
        self.kv_digest_failures = counter("kv_transfer_digest_failures", "frames that did not verify")
        self.link_bandwidth = Gauge(
            "tandem_kv_link_bytes_per_second",
            "as measured when the two workers met",
            (*names, "peer", "transport"),
            registry=registry,
        )
        self.link_choice = Gauge(
            "tandem_kv_link_info",
            "always 1: what carries KV to or from a peer, and why that was chosen",
            (*names, "peer", "transport", "state", "reason"),
            registry=registry,
        )
        self.drafts_verified = counter("spec_decode_num_drafts", "steps of one sequence that verified drafts")
        self._draft_tokens = Counter(
            "tandem_spec_decode_draft_tokens_per_pos",
            "verified guesses by who made them and their distance from the last known token",
            (*names, "drafter", "position", "outcome"),
            registry=registry,
        )
        self._no_drafts = Counter(
            "tandem_spec_decode_no_draft", "decodes without drafts, and why", (*names, "reason"), registry=registry
        )
        self._tier_totals = {
            what: Counter(f"tandem_kv_tier_{what}", meaning, (*names, "tier"), registry=registry)
            for what, meaning in (
                ("hits", "KV blocks that a lower tier was asked for and gave"),
                ("misses", "KV blocks that a lower tier was asked for and did not have any more"),
                ("evictions", "KV blocks that a lower tier dropped to make room"),
                ("corrupt", "KV blocks of a lower tier that did not verify"),
                ("refused", "KV blocks that a lower tier did not take"),
            )
        }
        self._tier_bytes = Gauge("tandem_kv_tier_bytes", "held now", (*names, "tier"), registry=registry)
        self._tier_capacity = Gauge(
            "tandem_kv_tier_capacity_bytes", "held at most", (*names, "tier"), registry=registry
        )
        self.tier_restores = counter("kv_tier_restores", "prefixes brought back into the pool")
        self.tier_restore_time = counter("kv_tier_restore_seconds", "spent on bringing blocks back")
        self.tier_lost_blocks = counter("kv_tier_lost_blocks", "evicted from the pool before a tier had a copy")
        self._bound = values
        self.transfer_time = histogram("kv_transfer_seconds", "first frame to verified", TRANSFER_BOUNDS_S)
        self.transfer_exposed_time = histogram(
            "kv_transfer_exposed_seconds", "prefill ended to verified", TRANSFER_BOUNDS_S
        )

    def drafts_at(self, drafter: str, position: str, outcome: str) -> Counter:
        """A drafter's guesses that were `proposed` or `accepted` at a position, 1 behind the last known token."""
        return self._draft_tokens.labels(*self._bound, drafter, position, outcome)

    def no_drafts(self, reason: str) -> Counter:
        return self._no_drafts.labels(*self._bound, reason)

    def tier_total(self, tier: str, what: str) -> Counter:
        """A running total of one of the lower tiers."""
        return self._tier_totals[what].labels(*self._bound, tier)

    def show_tier(self, tier: str, size_bytes: float, capacity_bytes: float) -> None:
        self._tier_bytes.labels(*self._bound, tier).set(size_bytes)
        self._tier_capacity.labels(*self._bound, tier).set(capacity_bytes)

    def show_links(self, peers: Iterable[worker_pb2.PeerStatus]) -> None:
        """The links that are up now, and no others."""
        self.link_bandwidth.clear()
        self.link_choice.clear()
        for peer in peers:
            why = (peer.worker_id, peer.transport, peer.state, peer.reason[:MAX_REASON_CHARS])
            self.link_choice.labels(*self._bound, *why).set(1)
            if peer.transport:
                labels = (*self._bound, peer.worker_id, peer.transport)
                self.link_bandwidth.labels(*labels).set(peer.measured_gb_per_s * 1e9)
