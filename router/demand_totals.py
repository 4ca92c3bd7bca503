"""The load offered to this router, as running totals that an autoscaler takes differences of.

Counted when a prompt arrives, refused or not: completions saturate with the pool and hide the need for more of it. The
parts of a time to first token are counted at the first token, so a long answer does not delay them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.v1 import common_pb2, membership_pb2

# 1 ms to 2 minutes, each a fifth above the one before: a percentile read from it is off by a tenth at most.
BOUNDS_MS = tuple(1.2**power for power in range(65))
ITL = "itl"
ROUTE, PREFILL_QUEUE, OWN_COMPUTE = "route", "prefill_queue", "own_compute"
EXPOSED_TRANSFER, DECODE_WAIT = "exposed_transfer", "decode_wait"


class LatencyCounts:
    """One histogram."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_MS) + 1)

    def add(self, latency_ms: float, times: int = 1) -> None:
        self._counts[bisect_left(BOUNDS_MS, latency_ms)] += times

    def to_message(self) -> membership_pb2.LatencyTotals:
        return membership_pb2.LatencyTotals(bounds_ms=BOUNDS_MS, counts=self._counts)


@dataclass(slots=True)
class DemandTotals:
    """Owned by the router process; used on the event loop only."""

    prompts_arrived: int = 0
    prompts_encoded: int = 0
    prompt_tokens_encoded: int = 0
    prompts_ended: int = 0
    prompt_tokens_ended: int = 0
    cached_tokens_ended: int = 0
    generation_tokens: int = 0
    latencies: dict[str, LatencyCounts] = field(default_factory=dict)

    def arrived(self, num_prompts: int) -> None:
        self.prompts_arrived += num_prompts

    def encoded(self, prompt_lengths: Sequence[int]) -> None:
        self.prompts_encoded += len(prompt_lengths)
        self.prompt_tokens_encoded += sum(prompt_lengths)

    def routed(self, route_ms: float) -> None:
        """From arrival to a request that may be placed."""
        self._latency(ROUTE).add(route_ms)

    def started(self, timeline: common_pb2.Timeline, waited_s: float = 0.0) -> None:
        """The first token of an answer came. `waited_s` in the router's queue is a wait for prefill like any other."""
        self._latency(PREFILL_QUEUE).add(waited_s * 1e3 + timeline.prefill_queued_us / 1e3)
        self._latency(OWN_COMPUTE).add(timeline.prefill_compute_us / 1e3)
        self._latency(EXPOSED_TRANSFER).add(timeline.transfer_exposed_us / 1e3)
        self._latency(DECODE_WAIT).add(timeline.decode_wait_us / 1e3)

    def step(self, gap_s: float, num_tokens: int) -> None:
        """A step of one answer brought tokens: each of them has its share of the gap."""
        self._latency(ITL).add(gap_s * 1e3 / num_tokens, num_tokens)

    def ended(self, num_prompts: int, prompt_tokens: int, cached_tokens: int, generation_tokens: int) -> None:
        self.prompts_ended += num_prompts
        self.prompt_tokens_ended += prompt_tokens
        self.cached_tokens_ended += cached_tokens
        self.generation_tokens += generation_tokens

    def to_record(self) -> membership_pb2.RouterRecord:
        """Without the names and the gauges, which others know."""
        return membership_pb2.RouterRecord(
            prompts_arrived=self.prompts_arrived,
            prompts_encoded=self.prompts_encoded,
            prompt_tokens_encoded=self.prompt_tokens_encoded,
            prompts_ended=self.prompts_ended,
            prompt_tokens_ended=self.prompt_tokens_ended,
            cached_tokens_ended=self.cached_tokens_ended,
            generation_tokens=self.generation_tokens,
            latencies={name: counts.to_message() for name, counts in self.latencies.items()},
        )

    def _latency(self, name: str) -> LatencyCounts:
        return self.latencies.setdefault(name, LatencyCounts())
