"""Two workers of each pool by chance, the less loaded of the two: nearly as even as looking at all, at constant cost.

Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from router.load_policies import MAX_PREFILL_CHOICES, prefill_queue_ms
from router.placement import (
    Candidate,
    ClusterSnapshot,
    Placement,
    RequestView,
    eligible_decode,
    eligible_prefill,
    is_fallback,
)
from router.timing_model import TimingModel
from router.worker_state import WorkerState


class PowerOfTwo:
    """Has a generator, and nothing else of its own."""

    name = "power_of_two"

    def __init__(self, timing: TimingModel, chance: random.Random) -> None:
        self._timing = timing
        self._chance = chance

    def place(self, request: RequestView, snapshot: ClusterSnapshot, now_s: float) -> Placement:
        decodes = self._two(eligible_decode(request, snapshot), self._decode_ms)
        decode = decodes[0].worker
        eligible = eligible_prefill(request, snapshot, decode)
        prefills = self._two(eligible, lambda worker: prefill_queue_ms(worker, self._timing, now_s))
        others = [worker for worker in eligible if all(worker is not one.worker for one in prefills)]
        spare = self._chance.sample(others, min(len(others), MAX_PREFILL_CHOICES - 2))
        return Placement(
            policy=self.name,
            decode=decode,
            prefill=[*(one.worker for one in prefills), *spare],
            expected_prefill_ms=self._timing.prefill_ms(request.num_prompt_tokens, 0),
            candidates=(*prefills, *decodes),
            reason="the less loaded of two",
            is_fallback=is_fallback(decode, eligible),
        )

    def _two(self, workers: Sequence[WorkerState], load_ms: Callable[[WorkerState], float]) -> list[Candidate]:
        """Two of them, the less loaded first; the sample's order decides a tie."""
        chosen = self._chance.sample(workers, min(2, len(workers)))
        candidates = [Candidate.of(worker, {"load": load_ms(worker)}) for worker in chosen]
        return sorted(candidates, key=lambda one: (one.total_ms, one.worker.num_in_flight))

    def _decode_ms(self, worker: WorkerState) -> float:
        kv_tokens = max(worker.reported_context_tokens, worker.booked_kv_tokens)
        return self._timing.step_ms(worker.num_in_flight + 1, kv_tokens)
