"""Placement without a view of caches: by load, and in turn. What cache-aware routing is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from router.worker_state import FULL_POOL, REPORT_FRESH_S, WorkerState

# A decode worker connects to these in turn when one fails: enough to survive a failure, few enough to send along.
MAX_PREFILL_CHOICES = 3
FULL_POOL_WEIGHT_MS = 1e4
LATE_SHARE = 0.1  # of a prompt's predicted time


class LeastLoaded:
    """The prefill worker that would begin soonest, and the decode worker whose steps would be shortest."""

    name = "least_loaded"

    def __init__(self, timing: TimingModel) -> None:
        self._timing = timing

    def place(self, request: RequestView, snapshot: ClusterSnapshot, now_s: float) -> Placement:
        decode, decode_candidates = _lowest(
            eligible_decode(request, snapshot), lambda worker: self._decode_terms(worker, request)
        )
        ranked, prefill_candidates = _ranked(
            eligible_prefill(request, snapshot, decode), lambda worker: self._prefill_terms(worker, request, now_s)
        )
        return Placement(
            policy=self.name,
            decode=decode,
            prefill=ranked[:MAX_PREFILL_CHOICES],
            expected_prefill_ms=self._timing.prefill_ms(request.num_prompt_tokens, 0),
            candidates=(*prefill_candidates, *decode_candidates),
            reason="lowest predicted time",
            is_fallback=is_fallback(decode, ranked),
        )

    def _prefill_terms(self, worker: WorkerState, request: RequestView, now_s: float) -> dict[str, float]:
        return {
            "queue": prefill_queue_ms(worker, self._timing, now_s),
            "prefill": self._timing.prefill_ms(request.num_prompt_tokens, 0),
        }

    def _decode_terms(self, worker: WorkerState, request: RequestView) -> dict[str, float]:
        kv_tokens = max(worker.reported_context_tokens, worker.booked_kv_tokens) + request.num_prompt_tokens
        return {
            "step": self._timing.step_ms(worker.num_in_flight + 1, kv_tokens),
            "waiting": waiting_ms(worker.load.waiting_tokens, self._timing),
            "full": full_pool_ms(worker),
        }


class RoundRobin:
    """Each ready worker in its turn, whatever its load."""

    name = "round_robin"

    def __init__(self, turn: int = 0) -> None:
        """`turn`: at which worker it begins; routers that began alike would send theirs to the same one for ever."""
        self._num_placed = turn

    def place(self, request: RequestView, snapshot: ClusterSnapshot, now_s: float) -> Placement:
        decodes = sorted(eligible_decode(request, snapshot), key=lambda worker: worker.worker_id)
        decode = decodes[self._num_placed % len(decodes)]
        prefills = sorted(eligible_prefill(request, snapshot, decode), key=lambda worker: worker.worker_id)
        turn = self._num_placed % len(prefills) if prefills else 0
        prefills = [*prefills[turn:], *prefills[:turn]]
        self._num_placed += 1
        return Placement(
            policy=self.name,
            decode=decode,
            prefill=prefills[:MAX_PREFILL_CHOICES],
            reason="its turn",
            is_fallback=is_fallback(decode, prefills),
        )


def prefill_queue_ms(worker: WorkerState, timing: TimingModel, now_s: float) -> float:
    """The wait before a new prompt begins: what is booked here, lifted to the worker's own report while that is fresh.

    Other routers' requests show only in the report; ours that the report does not have yet only in the booking.
    """
    booked_ms = left_of_booked_ms(worker, waiting_ms(worker.booked_prefill_tokens, timing), now_s)
    age_s = now_s - worker.load_at_s
    if age_s > REPORT_FRESH_S:
        return booked_ms
    reported_ms = max(worker.reported_queue_ms, waiting_ms(worker.load.waiting_tokens, timing)) - age_s * 1000
    return max(booked_ms, reported_ms)


def left_of_booked_ms(worker: WorkerState, booked_ms: float, now_s: float) -> float:
    """What is left of the prefill of all that is booked: the first prompt's turn came a while ago.

    A wait that does not shrink would send those who could wait for the holder of their prefix to compute it elsewhere.
    One that is late is not known to be done: a tenth of it stays.
    """
    num_prompts = worker.booked_prefills
    if not num_prompts:
        return booked_ms
    behind_ms = booked_ms * (num_prompts - 1 + LATE_SHARE) / num_prompts
    return max(booked_ms - (now_s - worker.prefill_since_s) * 1000, behind_ms)


def waiting_ms(num_tokens: int, timing: TimingModel) -> float:
    """The prefill of what waits, taken as one prompt."""
    return timing.prefill_ms(num_tokens, 0) if num_tokens else 0.0


def full_pool_ms(worker: WorkerState) -> float:
    """Grows fast above 85 % of the KV pool, where requests are put back for want of blocks."""
    capacity = worker.capacity_tokens
    if not capacity:
        return 0.0
    over = max(worker.used_tokens, worker.booked_kv_tokens) / capacity - FULL_POOL
    return FULL_POOL_WEIGHT_MS * over * over if over > 0 else 0.0


def _lowest(
    workers: Sequence[WorkerState], terms_of: Callable[[WorkerState], dict[str, float]]
) -> tuple[WorkerState, list[Candidate]]:
    ranked, candidates = _ranked(workers, terms_of)
    return ranked[0], candidates


def _ranked(
    workers: Sequence[WorkerState], terms_of: Callable[[WorkerState], dict[str, float]]
) -> tuple[list[WorkerState], list[Candidate]]:
    """Lowest total first; ties go to the fewest in flight, then to the one chosen least recently."""
    scored = [Candidate.of(worker, terms_of(worker)) for worker in workers]
    scored.sort(key=lambda one: (one.total_ms, one.worker.num_in_flight, one.worker.last_chosen_s))
    return [candidate.worker for candidate in scored], scored
