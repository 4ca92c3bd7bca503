"""What a sweep measures and how long: the workload, the objective, the grids. `quick` is coarser, not different."""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.pool_capacity import TrafficShape, uniform_lengths
from benchmarks.run_summary import Slo
from benchmarks.workload import DEFAULT_TOKEN_RANGE, LengthLaw, Workload

MAX_STRETCH = 2.0


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """Everything that decides what the numbers are. A directory holds one sweep of one value of this."""

    # The nominal workload, uniform in [low, high] tokens.
    input_low: int = 128
    input_high: int = 384
    output_low: int = 24
    output_high: int = 72
    hit_rate: float = 0.0
    ttft_ms: float = 1000.0
    tpot_ms: float = 100.0
    seed: int = 0
    # Open-loop runs.
    run_s: float = 60.0
    # A queue near its limit forgets slowly: of searches of a computed queue with runs of 40 requests the capacity has a
    # standard deviation of 10 % by chance alone and is 5 % high, for each run begins empty; with 200, 6 % and 1 %.
    min_requests: int = 200  # a slow server's runs last longer, up to twice
    drain_s: float = 60.0
    resolution: float = 1.05  # bisection ends when its bracket is this tight
    # A search starts here around its prediction, and goes on upwards or downwards.
    search_shares: tuple[float, ...] = (0.5, 0.75, 1.0, 1.25, 1.6)
    # Coupled rates as shares of the prediction; or these rates, so that another sweep can be compared run by run.
    rate_shares: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
    rates_per_s: tuple[float, ...] = ()
    # Grids of the timing fits.
    prefill_lengths: tuple[int, ...] = (32, 128, 512, 1024, 2048)
    prefill_hit_rates: tuple[float, ...] = (0.0, 0.5, 0.9)
    decode_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    decode_contexts: tuple[int, ...] = (128, 512, 1536)
    decode_tokens: int = 32
    repeats: int = 5
    # With and without drafts: closed loops of text that repeats itself.
    speculation_batches: tuple[int, ...] = (1, 4, 16)
    speculation_requests: int = 24
    max_batch: int = 64  # sequences of one decode worker, where the server does not say
    token_range: tuple[int, int] = DEFAULT_TOKEN_RANGE

    @property
    def workload(self) -> Workload:
        return Workload(
            LengthLaw(self.input_low, self.input_high),
            LengthLaw(self.output_low, self.output_high),
            self.hit_rate,
            token_range=self.token_range,
        )

    @property
    def traffic(self) -> TrafficShape:
        """The workload as the planner's models see it."""
        return TrafficShape(
            self.workload.input_tokens.mean,
            self.workload.output_tokens.mean,
            self.hit_rate,
            uniform_lengths(self.input_low, self.input_high),
        )

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft_ms, self.tpot_ms)

    @property
    def longest_run_s(self) -> float:
        return MAX_STRETCH * self.run_s

    def duration_s(self, rate_per_s: float) -> float:
        """Of one open-loop run at that rate: long enough for `min_requests`, within reason."""
        return min(max(self.run_s, self.min_requests / rate_per_s), self.longest_run_s)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def seed_of(self, *parts: object) -> int:
        """A seed for one run: the same for the same parts, so that two deployments see the same arrivals."""
        return mixed_seed(self.seed, *parts)


def mixed_seed(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


QUICK: dict[str, Any] = {
    "run_s": 20.0,
    "drain_s": 20.0,
    "resolution": 1.15,
    "search_shares": (0.7, 1.0, 1.3),
    "rate_shares": (0.4, 0.7, 1.0, 1.3),
    "prefill_lengths": (64, 256, 1024),
    "prefill_hit_rates": (0.0, 0.5),
    "decode_batches": (1, 4, 16),
    "decode_contexts": (128, 768),
    "decode_tokens": 16,
    "repeats": 3,
    "speculation_batches": (1, 4),
    "speculation_requests": 8,
}
