"""What a request would cost on each worker, in the terms that `cache_aware` describes.

A thousand workers are scored for one decision: everything that is the same for all of them is read once, a worker's row
is a tuple, and what most workers have none of (a queue, an eviction, a full pool) costs a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.fair_shares import FairShares
from router.load_policies import full_pool_ms, left_of_booked_ms
from router.placement import RequestView
from router.scored_pairs import NEAR_TIE_MS, Scored
from router.timing_model import TimingModel, exposed_transfer_ms
from router.worker_state import REPORT_FRESH_S, Role, WorkerState

EVICTION_WEIGHT = 0.25
SPREAD_WEIGHT = 0.5
# Computing what another worker holds, or is about to hold, takes capacity from whoever comes next: siblings of a burst
# wait for the first one's prefix rather than each computing it.
WORK_WEIGHT = 0.6
COLD_SHARE = 0.10  # a best match below this share of the prompt is no reason to go anywhere
PREFILL_TERMS = ("queue", "prefill", "work", "evict", "spread", "restore")
DECODE_TERMS = (
    "step", "neighbours", "transfer", "pressure", "full", "queue", "prefill", "evict", "spread", "restore"
)  # fmt: skip

_Row = tuple[float, float, int, WorkerState, tuple[float, ...]]  # a `Scored` to be


@dataclass(frozen=True, slots=True)
class CacheAwareSettings:
    """What an operator may tune."""

    itl_slo_ms: float = 100.0
    pressure_weight: float = 10.0
    link_bytes_per_ms: float = 1e6  # 1 GB/s
    round_trip_ms: float = 1.0
    local_gain_ms: float = NEAR_TIE_MS  # local must be better than remote by this, and by a near tie's share


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it is scored."""

    request: RequestView
    is_cold: bool  # nobody's cache is a reason to go anywhere
    num_asked: float  # lately, for the longest prefix of it that anybody holds; 0: that decides nothing
    now_s: float


class WorkerScores:
    """Owned by the policy, whose counts of who got what it reads."""

    def __init__(self, timing: TimingModel, settings: CacheAwareSettings, shares: FairShares) -> None:
        self._timing = timing
        self._settings = settings
        self._shares = shares

    def of_prefills(self, asked: Asked, workers: Sequence[WorkerState]) -> list[Scored]:
        """The best first."""
        request, now_s = asked.request, asked.now_s
        num_tokens, cached_of = request.num_prompt_tokens, request.cached_tokens.get
        c0, c1, c2 = self._timing.prefill_coefficients
        whole_ms = c0 + c1 * num_tokens + c2 * num_tokens * (num_tokens / 2)
        evict_ms_per_token = EVICTION_WEIGHT * c1
        spreads_ms = self._spreads_ms(asked, workers)
        spread_ms = restore_ms = 0.0
        rows: list[_Row] = []
        for index, worker in enumerate(workers):
            uncached, compute_ms = num_tokens, whole_ms
            if cached := cached_of(worker.worker_id, 0):
                uncached = num_tokens - cached
                compute_ms = c0 + c1 * uncached + c2 * uncached * (cached + uncached / 2)
            queue_ms = 0.0
            if booked := worker.booked_prefill_tokens:
                queue_ms = left_of_booked_ms(worker, c0 + c1 * booked + c2 * booked * booked / 2, now_s)
            if worker.reported_queue_ms > queue_ms and (age_s := now_s - worker.load_at_s) <= REPORT_FRESH_S:
                queue_ms = max(queue_ms, worker.reported_queue_ms - age_s * 1000)
            over = uncached - worker.never_used_tokens
            evict_ms = evict_ms_per_token * over if over > 0 else 0.0
            if spreads_ms:
                spread_ms = spreads_ms[index]
            if request.restorable_tokens:
                restore_ms = restore_ms_of(request, worker)
            work_ms = WORK_WEIGHT * compute_ms
            total_ms = queue_ms + compute_ms + work_ms + evict_ms + spread_ms + restore_ms
            terms = (queue_ms, compute_ms, work_ms, evict_ms, spread_ms, restore_ms)
            rows.append((total_ms, worker.last_chosen_s, index, worker, terms))
        return _ranked(rows)

    def of_decodes(self, asked: Asked, workers: Sequence[WorkerState]) -> list[Scored]:
        """Decode and aggregated workers; the best first."""
        request, settings, aggregated = asked.request, self._settings, Role.AGGREGATED
        num_tokens, cached_of = request.num_prompt_tokens, request.cached_tokens.get
        alpha, beta, gamma = self._timing.decode_coefficients
        slower_ms = beta + gamma * num_tokens
        spreads_ms: Sequence[float] | None = None
        transfers_ms: dict[tuple[int, int, int], float] = {}  # most workers hold nothing, and are of one kind
        rows: list[_Row] = []
        for index, worker in enumerate(workers):
            running, kv_tokens, booked = worker.num_in_flight, worker.reported_context_tokens, worker.booked_kv_tokens
            if booked > kv_tokens:
                kv_tokens = booked
            step_ms = alpha + beta * (running + 1) + gamma * (kv_tokens + num_tokens)
            neighbours_ms = slower_ms * running
            late_ms = step_ms - settings.itl_slo_ms
            pressure_ms = settings.pressure_weight * late_ms if late_ms > 0 else 0.0
            full_ms = 0.0
            if booked > worker.full_tokens or worker.used_tokens > worker.full_tokens:
                full_ms = full_pool_ms(worker)
            missing = num_tokens - cached_of(worker.worker_id, 0)
            shared_ms = step_ms + neighbours_ms + pressure_ms + full_ms
            if worker.role is aggregated:
                if spreads_ms is None:
                    spreads_ms = self._spreads_ms(asked, workers)
                queue_ms = self._own_queue_ms(worker, asked.now_s)
                prefill_ms = self._own_prefill_ms(missing, num_tokens - missing, worker)
                over = missing - worker.never_used_tokens
                evict_ms = EVICTION_WEIGHT * self._timing.prefill_coefficients[1] * over if over > 0 else 0.0
                spread_ms = spreads_ms[index] if spreads_ms else 0.0
                restore_ms = restore_ms_of(request, worker) if request.restorable_tokens else 0.0
                total_ms = shared_ms + queue_ms + prefill_ms + evict_ms + spread_ms + restore_ms
                terms = (
                    step_ms, neighbours_ms, 0.0, pressure_ms, full_ms,
                    queue_ms, prefill_ms, evict_ms, spread_ms, restore_ms,
                )  # fmt: skip
            else:
                # What is on its way from a prefill worker need not come from below, too.
                if request.restorable_tokens:
                    missing += request.restorable_tokens.get(worker.worker_id, 0)
                kind = (missing, worker.kv_bytes_per_token, worker.num_layers)
                transfer_ms = transfers_ms.get(kind)
                if transfer_ms is None:
                    transfer_ms = transfers_ms[kind] = self._transfer_ms(missing, worker)
                total_ms = shared_ms + transfer_ms
                terms = (step_ms, neighbours_ms, transfer_ms, pressure_ms, full_ms, 0.0, 0.0, 0.0, 0.0, 0.0)
            rows.append((total_ms, worker.last_chosen_s, index, worker, terms))
        return _ranked(rows)

    def local(self, request: RequestView, decode: Scored, now_s: float) -> Scored:
        """Prefilling where it is decoded; no transfer then."""
        worker = decode.worker
        cached = request.cached_tokens.get(worker.worker_id, 0)
        step_ms, neighbours_ms, _, pressure_ms, full_ms, _, _, evict_ms, spread_ms, _ = decode.terms_ms
        queue_ms = self._own_queue_ms(worker, now_s)
        prefill_ms = self._own_prefill_ms(request.num_prompt_tokens - cached, cached, worker)
        restore_ms = restore_ms_of(request, worker)
        terms = (
            step_ms, neighbours_ms, 0.0, pressure_ms, full_ms, queue_ms, prefill_ms, evict_ms, spread_ms, restore_ms
        )  # fmt: skip
        return decode._replace(total_ms=sum(terms), terms_ms=terms)

    def prefill_ms(self, num_uncached: int, num_cached: int) -> float:
        """As the timing model says it, of a prompt alone."""
        c0, c1, c2 = self._timing.prefill_coefficients
        return c0 + c1 * num_uncached + c2 * num_uncached * (num_cached + num_uncached / 2)

    def _own_prefill_ms(self, num_uncached: int, num_cached: int, worker: WorkerState) -> float:
        """On a worker that decodes: its own time and, of those whose steps wait for it, or it for theirs."""
        own_ms = self.prefill_ms(num_uncached, num_cached)
        if not worker.prefill_share:
            return own_ms * (1 + WORK_WEIGHT + worker.num_in_flight)  # every neighbour's next token waits for it
        return own_ms / worker.share_beside(worker.num_in_flight) + WORK_WEIGHT * own_ms

    def _own_queue_ms(self, worker: WorkerState, now_s: float) -> float:
        """What is booked on a worker that decodes goes before."""
        booked = worker.booked_prefill_tokens
        if not booked:
            return 0.0
        booked_ms = self.prefill_ms(booked, 0) / worker.share_beside(worker.num_in_flight)
        return left_of_booked_ms(worker, booked_ms, now_s)

    def _transfer_ms(self, missing: int, worker: WorkerState) -> float:
        """What the decode worker waits for after the prefill of what it lacks."""
        return exposed_transfer_ms(
            missing * worker.kv_bytes_per_token,
            self._settings.link_bytes_per_ms,
            self.prefill_ms(missing, 0),
            worker.num_layers,
            self._settings.round_trip_ms,
        )

    def _spreads_ms(self, asked: Asked, workers: Sequence[WorkerState]) -> Sequence[float]:
        """Of each worker, what its having had more than the others costs; empty: nothing anywhere."""
        now_s = asked.now_s
        if not asked.is_cold:
            prices = self._shares.prices(workers, asked.num_asked, now_s)
            if not prices:
                return ()
            whole_ms = self.prefill_ms(asked.request.num_prompt_tokens, 0)
            return [price * whole_ms for price in prices]
        weight_ms = SPREAD_WEIGHT * self._timing.prefill_coefficients[1]
        recent = [worker.recent_tokens(now_s) for worker in workers]
        mean = sum(recent) / len(recent) if recent else 0.0
        return [weight_ms * max(0.0, tokens - mean) for tokens in recent]


def restore_ms_of(request: RequestView, worker: WorkerState) -> float:
    """What of the prompt comes from below on this worker, when it computes the rest."""
    return request.restorable_tokens.get(worker.worker_id, 0) * worker.restore_ms_per_token


def _ranked(rows: list[_Row]) -> list[Scored]:
    rows.sort()  # plain tuples: their order is found twice as fast as named ones'
    return list(map(Scored._make, rows))
