"""What a decode worker counts of its requests, over what every worker counts."""

from __future__ import annotations

from cluster.errors import TandemError
from cluster.fallbacks import Fallbacks
from cluster.worker_counters import WorkerCounters
from decode_worker.request_timeline import RequestTimeline
from engine.request import FinishReason


class DecodeMetrics:
    """Owned by the node; flows tell it what became of them."""

    def __init__(self, counters: WorkerCounters, fallbacks: Fallbacks) -> None:
        self._counters = counters
        self._fallbacks = fallbacks

    def landed(self, timeline: RequestTimeline) -> None:
        """A prompt's KV arrived and verified."""
        self._counters.add("transfers_verified")
        self._counters.kv_moved(timeline.kv_bytes)
        self._counters.metrics.transfer_time.observe(timeline.total_transfer_s)
        self._counters.metrics.transfer_exposed_time.observe(timeline.exposed_transfer_s)

    def attempt_failed(self, error: TandemError) -> None:
        self._counters.add("prefill_attempts_failed")
        self._counters.add(f"prefill_attempts_failed_{error.error_code}")

    def prefilled_locally(self, error: TandemError) -> None:
        self._counters.add("local_prefills")
        self._fallbacks.took("prefill", wanted="remote", used="local", reason=error.error_code)

    def prefilled_here(self, num_tokens: int, num_cached: int) -> None:
        """This worker's own engine computed the prompt."""
        self._counters.prompt_done(num_tokens, num_cached)

    def ended(self, reason: FinishReason) -> None:
        self._counters.add(f"requests_{reason.value}")

    def failed(self, error: TandemError) -> None:
        self._counters.add("requests_failed")
        self._counters.add(f"requests_failed_{error.error_code}")
