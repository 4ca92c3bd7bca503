"""The cache-aware decision as its description has it, a term at a time and without a care for speed.

What the policy decides must equal this. Counts of who asked and who got what are the policy's own classes: they are
tested by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.fair_shares import FairShares
from router.hot_prefixes import HotPrefixes
from router.load_policies import full_pool_ms, left_of_booked_ms
from router.placement import ClusterSnapshot, RequestView, may_pair
from router.timing_model import TimingModel, exposed_transfer_ms
from router.worker_state import REPORT_FRESH_S, Role, WorkerState

ITL_SLO_MS, PRESSURE, LINK_BYTES_PER_MS, ROUND_TRIP_MS = 100.0, 10.0, 1e6, 1.0
EVICTION, SPREAD, WORK, COLD, TIE_MS, TIE_SHARE = 0.25, 0.5, 0.6, 0.10, 5.0, 0.05


@dataclass(frozen=True)
class PlainChoice:
    """Who decodes, who prefills (None: the same worker), and what both were predicted to cost."""

    decode: WorkerState
    prefill: WorkerState | None
    total_ms: float


@dataclass
class PlainPlacement:
    timing: TimingModel
    hot: HotPrefixes = field(default_factory=HotPrefixes)
    shares: FairShares = field(default_factory=FairShares)

    def place(self, request: RequestView, snapshot: ClusterSnapshot, now_s: float) -> PlainChoice | None:
        """None: nobody can take it."""
        length = request.num_prompt_tokens
        decodes = [
            worker
            for worker in snapshot.decode
            if worker.incarnation not in request.excluded
            and (not worker.capacity_tokens or length + 1 <= worker.capacity_tokens)
        ]
        if not decodes:
            return None
        prefills = [worker for worker in snapshot.prefill if worker.incarnation not in request.excluded]
        request = self.with_restores(request, [*snapshot.prefill, *decodes])
        held = max(request.cached_tokens.values(), default=0)
        is_cold = held < COLD * length
        self.hot.count_request(now_s)
        asked = 0.0
        if not is_cold and request.longest_match is not None:
            asked = self.hot.count_prefix(request.longest_match, now_s)
        prefill_spreads = self.spreads(request, prefills, asked, now_s, is_cold=is_cold)
        decode_spreads = self.spreads(request, decodes, asked, now_s, is_cold=is_cold)
        prefill_ms = {
            worker: self.prefill_score(request, worker, spread, now_s)
            for worker, spread in zip(prefills, prefill_spreads, strict=True)
        }
        decode_ms = {
            worker: self.decode_score(request, worker, spread, now_s)
            for worker, spread in zip(decodes, decode_spreads, strict=True)
        }
        able = prefills or [worker for worker in decodes if worker.role is Role.AGGREGATED]
        lacking = [worker for worker in able if request.cached_tokens.get(worker.worker_id, 0) < held / 2]
        copying = False
        if asked and lacking and request.longest_match is not None:
            copying = self.hot.wants_copy(request.longest_match, 1 - len(lacking) / len(able))
        if copying and prefills:
            prefills = lacking
        elif copying:
            decodes = lacking
        pairs: list[tuple[float, WorkerState, WorkerState | None]] = []
        for decode in best_four(decodes, snapshot.decode, decode_ms):
            if decode.role is Role.AGGREGATED:
                pairs.append((decode_ms[decode], decode, None))
                continue
            partners = [prefill for prefill in prefills if may_pair(prefill, decode)]
            best = best_four(partners, snapshot.prefill, prefill_ms)
            pairs += [(decode_ms[decode] + prefill_ms[prefill], decode, prefill) for prefill in best]
            if not partners and snapshot.allows_local_prefill:
                pairs.append((self.local_score(request, decode, now_s)[0], decode, None))
        if not pairs:
            return None
        total_ms, decode, chosen = self.least_busy(pairs, snapshot)
        if chosen is not None and not copying and snapshot.allows_local_prefill and not is_full(decode):
            local_ms, local_queue_ms = self.local_score(request, decode, now_s)
            remote_ms = total_ms + self.prefill_queue_ms(chosen, now_s)
            if local_ms + local_queue_ms + max(TIE_MS, TIE_SHARE * local_ms) < remote_ms:
                chosen = None
        self.shares.placed((chosen or decode).worker_id, now_s)
        return PlainChoice(decode, chosen, total_ms)

    def with_restores(self, request: RequestView, workers: list[WorkerState]) -> RequestView:
        cached, restored = dict(request.cached_tokens), {}
        for worker in workers:
            below, here = request.restorable_tokens.get(worker.worker_id, 0), cached.get(worker.worker_id, 0)
            missing = request.num_prompt_tokens - here
            saved_ms = self.timing.prefill_ms(missing, here) - self.timing.prefill_ms(missing - below, here + below)
            if below and below * worker.restore_ms_per_token < saved_ms:
                cached[worker.worker_id], restored[worker.worker_id] = here + below, below
        return RequestView(
            request.num_prompt_tokens,
            request.max_tokens,
            cached_tokens=cached,
            longest_match=request.longest_match,
            excluded=request.excluded,
            restorable_tokens=restored,
        )

    def spreads(
        self, request: RequestView, workers: list[WorkerState], asked: float, now_s: float, *, is_cold: bool
    ) -> list[float]:
        if not is_cold:
            whole_ms = self.timing.prefill_ms(request.num_prompt_tokens, 0)
            prices = self.shares.prices(workers, asked, now_s) or [0.0] * len(workers)
            return [price * whole_ms for price in prices]
        recent = [worker.recent_tokens(now_s) for worker in workers]
        token_ms = self.timing.prefill_coefficients[1]
        return [SPREAD * token_ms * max(0.0, tokens - sum(recent) / len(recent)) for tokens in recent]

    def prefill_queue_ms(self, worker: WorkerState, now_s: float) -> float:
        booked = worker.booked_prefill_tokens
        booked_ms = left_of_booked_ms(worker, self.timing.prefill_ms(booked, 0), now_s) if booked else 0.0
        age_s = now_s - worker.load_at_s
        return max(booked_ms, worker.reported_queue_ms - age_s * 1000) if age_s <= REPORT_FRESH_S else booked_ms

    def evict_ms(self, worker: WorkerState, missing: int) -> float:
        if not worker.load.total_blocks:
            return 0.0
        unused = (worker.load.free_blocks - worker.load.cached_blocks) * worker.block_tokens
        return EVICTION * self.timing.prefill_coefficients[1] * max(0, missing - unused)

    def prefill_score(self, request: RequestView, worker: WorkerState, spread_ms: float, now_s: float) -> float:
        cached = request.cached_tokens.get(worker.worker_id, 0)
        missing = request.num_prompt_tokens - cached
        return (
            self.prefill_queue_ms(worker, now_s)
            + (1 + WORK) * self.timing.prefill_ms(missing, cached)
            + self.evict_ms(worker, missing)
            + spread_ms
            + request.restorable_tokens.get(worker.worker_id, 0) * worker.restore_ms_per_token
        )

    def streams_ms(self, request: RequestView, worker: WorkerState) -> float:
        """What its streams cost the request, and it them: step, neighbours, pressure, full."""
        alpha, beta, gamma = self.timing.decode_coefficients
        running = max(worker.load.running_requests + worker.load.waiting_requests, worker.booked_requests)
        context = max(worker.load.context_tokens, worker.booked_kv_tokens) + request.num_prompt_tokens
        step_ms = alpha + beta * (running + 1) + gamma * context
        neighbours_ms = running * (beta + gamma * request.num_prompt_tokens)
        return step_ms + neighbours_ms + PRESSURE * max(0.0, step_ms - ITL_SLO_MS) + full_pool_ms(worker)

    def own_ms(self, request: RequestView, worker: WorkerState, now_s: float) -> tuple[float, float]:
        """Of a prompt that a worker computes beside its streams: its time, and what goes before it."""
        cached = request.cached_tokens.get(worker.worker_id, 0)
        alone_ms = self.timing.prefill_ms(request.num_prompt_tokens - cached, cached)
        running = max(worker.load.running_requests + worker.load.waiting_requests, worker.booked_requests)
        share = (worker.load.prefill_share if running else 0.0) or 1.0
        waiting = 0 if worker.load.prefill_share else running
        queue_ms, booked = 0.0, worker.booked_prefill_tokens
        if booked:
            queue_ms = left_of_booked_ms(worker, self.timing.prefill_ms(booked, 0) / share, now_s)
        restore_ms = request.restorable_tokens.get(worker.worker_id, 0) * worker.restore_ms_per_token
        return (1 / share + WORK + waiting) * alone_ms + queue_ms + restore_ms, queue_ms

    def decode_score(self, request: RequestView, worker: WorkerState, spread_ms: float, now_s: float) -> float:
        missing = request.num_prompt_tokens - request.cached_tokens.get(worker.worker_id, 0)
        if worker.role is Role.AGGREGATED:
            own_ms, _ = self.own_ms(request, worker, now_s)
            return self.streams_ms(request, worker) + own_ms + self.evict_ms(worker, missing) + spread_ms
        missing += request.restorable_tokens.get(worker.worker_id, 0)
        transfer_ms = exposed_transfer_ms(
            missing * worker.kv_bytes_per_token,
            LINK_BYTES_PER_MS,
            self.timing.prefill_ms(missing, 0),
            worker.num_layers,
            ROUND_TRIP_MS,
        )
        return self.streams_ms(request, worker) + transfer_ms

    def local_score(self, request: RequestView, worker: WorkerState, now_s: float) -> tuple[float, float]:
        own_ms, queue_ms = self.own_ms(request, worker, now_s)
        return self.streams_ms(request, worker) + own_ms, queue_ms

    def least_busy(
        self, pairs: list[tuple[float, WorkerState, WorkerState | None]], snapshot: ClusterSnapshot
    ) -> tuple[float, WorkerState, WorkerState | None]:
        lowest_ms = min(total_ms for total_ms, _, _ in pairs)
        tied = [pair for pair in pairs if pair[0] <= lowest_ms + max(TIE_MS, TIE_SHARE * lowest_ms)]

        def order(pair: tuple[float, WorkerState, WorkerState | None]) -> tuple[float, ...]:
            _, decode, prefill = pair
            workers = [decode] if prefill is None else [decode, prefill]
            return (
                sum(worker.num_in_flight for worker in workers),
                max(worker.last_chosen_s for worker in workers),
                snapshot.decode.index(decode),
                0 if prefill is None else snapshot.prefill.index(prefill),
            )

        return min(tied, key=order)


def best_four(
    workers: list[WorkerState], order: Sequence[WorkerState], score_ms: dict[WorkerState, float]
) -> list[WorkerState]:
    return sorted(workers, key=lambda one: (score_ms[one], one.last_chosen_s, order.index(one)))[:4]


def is_full(decode: WorkerState) -> bool:
    capacity = decode.capacity_tokens
    return bool(capacity) and max(decode.used_tokens, decode.booked_kv_tokens) > 0.85 * capacity
