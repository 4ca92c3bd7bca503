"""What the router counts of requests and placements: Prometheus series, and the second choices that were taken.

A fallback is logged once, counted, and shown in `/statusz`; all durations are differences of `RequestTimes`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tandem.v1 import worker_pb2

from cluster.errors import RequestCancelled, TandemError
from cluster.identity import RequestId
from cluster.telemetry import RouterMetrics
from router.answer import Answer
from router.demand_totals import DemandTotals
from router.fair_queue import Tier
from router.placement import Placement
from router.sequence import Sequence

STAGES = ("tokenize", "place", "prefill_queue", "prefill", "transfer_exposed", "decode_wait")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterFallback:
    """A second choice, with its reason."""

    component: str
    wanted: str
    used: str
    reason: str


class RequestMetrics:
    """Owned by the router process. Also hears placements (`PlacementListener`)."""

    def __init__(self, series: RouterMetrics, model: str) -> None:
        self._series = series
        self._model = model
        self.demand = DemandTotals()
        self._inter_token_latency = series.inter_token_latency.labels(model)
        self._generation_tokens = series.generation_tokens.labels(model)
        self._prompt_tokens = series.prompt_tokens.labels(model)
        self._cached_prompt_tokens = series.cached_prompt_tokens.labels(model)
        self._prompt_lengths = series.prompt_lengths.labels(model)
        self._generation_lengths = series.generation_lengths.labels(model)
        self._e2e_request_latency = series.e2e_request_latency.labels(model)
        self._time_per_output_token = series.time_per_output_token.labels(model)
        self._time_to_first_token = series.time_to_first_token.labels(model)
        self._stages = {stage: series.request_stage.labels(model, stage) for stage in STAGES}
        self._fallbacks: Counter[RouterFallback] = Counter()

    @property
    def fallbacks(self) -> Iterator[tuple[RouterFallback, int]]:
        yield from self._fallbacks.items()

    def watch_requests(self, num_running: Callable[[], int], num_waiting: Callable[[], int]) -> None:
        self._series.requests_running.labels(self._model).set_function(num_running)
        self._series.requests_waiting.labels(self._model).set_function(num_waiting)

    def let_in(self, request_id: RequestId, tier: Tier, waited_s: float) -> None:
        """From admission: a request that had to wait begins."""
        self._series.admission_wait.labels(self._model, tier.name.lower()).observe(waited_s)

    def step(self, gap_s: float, num_tokens: int) -> None:
        """A step of one answer brought tokens: each of them has its share of the gap."""
        self.demand.step(gap_s, num_tokens)
        observe = self._inter_token_latency.observe
        for _ in range(num_tokens):
            observe(gap_s / num_tokens)

    def placed(self, sequence: Sequence, placement: Placement) -> None:
        prefill_id = placement.prefill[0].worker_id if placement.prefill else ""
        self._series.placements.labels(self._model, prefill_id, placement.decode.worker_id).inc()
        if placement.is_fallback:
            self.fell_back(
                RouterFallback("prefill", "a prefill worker", "the decode worker", "no prefill worker ready")
            )

    def started(self, sequence: Sequence, event: worker_pb2.RequestEvent) -> None:
        """Counts a prompt that was not prefilled where it was sent: the decode worker took another way."""
        placement, used = sequence.placement, event.timeline.prefill_worker_id
        if event.HasField("timeline"):
            self.demand.started(event.timeline, sequence.waited_s)
        if placement is None or placement.is_local or not event.HasField("timeline"):
            return
        if used != placement.prefill[0].worker_id:
            taken = "another prefill worker" if used else "the decode worker"
            self.fell_back(RouterFallback("prefill", "the chosen prefill worker", taken, "it failed or refused"))

    def moved(self, sequence: Sequence, error: TandemError) -> None:
        stage = "resumed" if sequence.has_started else "placed again"
        self.fell_back(
            RouterFallback("placement", "the chosen worker", "another worker", f"{stage}: {error.error_code}")
        )

    def fell_back(self, fallback: RouterFallback) -> None:
        if not self._fallbacks[fallback]:
            _log.warning("fallback", extra={"component": fallback.component, "reason": fallback.reason})
        self._fallbacks[fallback] += 1
        self._series.fallbacks.labels(self._model, fallback.component, fallback.reason).inc()

    def failed(self, error: TandemError, *, was_placed: bool) -> None:
        if isinstance(error, RequestCancelled):
            self._series.requests_ended.labels(self._model, "abort").inc()
        elif was_placed:
            self._series.requests_failed.labels(self._model, error.error_code, error.stage).inc()
        else:
            self._series.requests_refused.labels(self._model, error.error_code).inc()

    def ended(self, answer: Answer) -> None:
        """After an answer that was placed, whatever its end."""
        times, usage, stages = answer.times, answer.usage, self._stages
        self.demand.ended(len(answer.prompt_lengths), usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_prompt_tokens.inc(usage.cached_tokens)
        self._generation_tokens.inc(usage.completion_tokens)
        self._prompt_lengths.observe(usage.prompt_tokens)
        self._generation_lengths.observe(usage.completion_tokens)
        self._e2e_request_latency.observe(times.ended_s - times.admitted_s)
        if times.first_token_s:
            self._time_to_first_token.observe(times.first_token_s - times.admitted_s)
        num_later = usage.completion_tokens / max(1, answer.num_added) - 1
        if times.first_token_s and num_later > 0:
            self._time_per_output_token.observe((times.last_token_s - times.first_token_s) / num_later)
        stages["tokenize"].observe(times.encoded_s - times.admitted_s)
        stages["place"].observe(times.placed_s - times.encoded_s)
        if (timeline := answer.timeline) is not None:
            stages["prefill_queue"].observe(timeline.prefill_queued_us / 1e6)
            stages["prefill"].observe(timeline.prefill_compute_us / 1e6)
            stages["transfer_exposed"].observe(timeline.transfer_exposed_us / 1e6)
            stages["decode_wait"].observe(timeline.decode_wait_us / 1e6)
        for reason in answer.finish_reasons:
            self._series.requests_ended.labels(self._model, reason).inc()
