"""The cache-aware policy: the pair of workers with the lowest predicted time to first token and least harm to others.

    prefill  S_p = queue + 1.6 t_p(L - m, m) + 0.25 evicted + spread + restore
             m: tokens of the prompt believed cached there, with those that it can restore from a lower tier faster than
             compute them
             spread: of a cold prompt, half of the time for what was computed there lately beyond the mean; of one whose
             prefix many ask for, what the worker's requests beyond its share cost (`fair_shares`)
    decode   S_d = transfer + step + neighbours + pressure + full
    local    S_l = S_d - transfer + (1 / share + 0.6) t_p(L - m_d, m_d) + queue + restore
             share: of its time that the worker has for prompts while its streams are in time, as it says; where they
             wait for a whole prompt instead, t_p counts once more for each of them. An aggregated worker's S_d has all
             of it, evicted and spread too

The best four of each pool are paired; the lowest sum wins. Within 5 ms or 5 % the pair with fewer requests in flight
wins, then the one chosen least recently, then the first in this router's own order of them, which no other router has:
so neither a shared prefix nor many routers at once send everybody to one worker; every eighth request for a hot prefix
goes to a worker that lacks it (`hot_prefixes`), until no holder gets more than a worker's fair share through it. A
decode worker prefills by itself only where that wins by more than a near tie (what it computes, it does not decode);
between the two the queues count twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from cluster.errors import NoWorkersAvailable
from router.fair_shares import FairShares
from router.hot_prefixes import HotPrefixes
from router.load_policies import FULL_POOL, MAX_PREFILL_CHOICES, full_pool_ms, left_of_booked_ms
from router.placement import (
    RETRY_AFTER_S,
    ClusterSnapshot,
    Placement,
    RequestView,
    eligible_decode,
    may_pair,
)
from router.scored_pairs import Pair, Scored
from router.timing_model import TimingModel, exposed_transfer_ms
from router.worker_state import REPORT_FRESH_S, Role, WorkerState

NUM_PAIRED = 4
EVICTION_WEIGHT = 0.25
SPREAD_WEIGHT = 0.5
# Computing what another worker holds, or is about to hold, takes capacity from whoever comes next: siblings of a burst
# wait for the first one's prefix rather than each computing it.
WORK_WEIGHT = 0.6
# Who waits makes those who come next wait as well: between a decode worker's own prefill and a prefill worker's the
# queues count twice. Otherwise prompts queue until both ways take them equally long, and a decode worker's time for
# prompts lies idle until then.
QUEUE_WEIGHT = 1.0
NEAR_TIE_MS, NEAR_TIE_SHARE = 5.0, 0.05
COLD_SHARE = 0.10  # a best match below this share of the prompt is no reason to go anywhere
MAX_EXPLAINED = 8  # of each role: names and numbers of the others are not worth their objects
PREFILL_TERMS = ("queue", "prefill", "work", "evict", "spread", "restore")
DECODE_TERMS = (
    "step", "neighbours", "transfer", "pressure", "full", "queue", "prefill", "evict", "spread", "restore"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CacheAwareSettings:
    """What an operator may tune."""

    itl_slo_ms: float = 100.0
    pressure_weight: float = 10.0
    link_bytes_per_ms: float = 1e6  # 1 GB/s
    round_trip_ms: float = 1.0
    local_gain_ms: float = NEAR_TIE_MS  # local must be better than remote by this, and by a near tie's share


class CacheAware:
    """Has counts of what was asked for and of who got it, and nothing else of its own."""

    name = "cache_aware"

    def __init__(self, timing: TimingModel, settings: CacheAwareSettings) -> None:
        self._timing = timing
        self._settings = settings
        self._hot = HotPrefixes()
        self._shares = FairShares()

    def place(self, request: RequestView, snapshot: ClusterSnapshot, now_s: float) -> Placement:
        able_decodes = eligible_decode(request, snapshot)
        if request.restorable_tokens:
            request = self._with_restores(request, [*snapshot.prefill, *able_decodes])
        num_asked = self._num_asked(request, now_s)
        decodes = self._score_decodes(request, able_decodes, num_asked, now_s)
        prefills = self._score_prefills(request, snapshot, num_asked, now_s)
        # A copy of a hot prefix is made by whoever of those without it is best.
        able = prefills or [scored for scored in decodes if scored.worker.role is Role.AGGREGATED]
        copying = self._without_hot_prefix(request, able) if num_asked else []
        pair = self._best_pair(
            request,
            snapshot,
            copying if copying and not prefills else decodes,
            copying if copying and prefills else prefills,
            now_s,
        )
        local = None
        if pair.prefill is not None and not copying and _may_prefill(pair.decode.worker, snapshot):
            local = self._local(request, pair.decode, now_s)
        is_wanted_local = local is not None and self._is_clearly_faster(local, pair)
        chosen: list[WorkerState] = []
        if pair.prefill is not None and not is_wanted_local:
            chosen = [pair.prefill.worker, *_alternatives(pair, prefills)]
        computing = chosen[0] if chosen else pair.decode.worker
        self._shares.placed(computing.worker_id, now_s)
        cached = request.cached_tokens.get(computing.worker_id, 0)
        prefill_ms = self._prefill_ms(request.num_prompt_tokens - cached, cached)
        return Placement(
            policy=self.name,
            decode=pair.decode.worker,
            prefill=chosen,
            expected_cached_tokens=cached,
            expected_prefill_ms=prefill_ms + _restore_ms(request, computing),
            candidates=(
                *(scored.explained(PREFILL_TERMS) for scored in _shown(prefills, pair.prefill)),
                *(scored.explained(DECODE_TERMS) for scored in _shown(decodes, pair.decode)),
            ),
            local=local.explained(DECODE_TERMS) if local is not None else None,
            reason=_reason(pair, is_wanted_local=is_wanted_local, is_copying=bool(copying)),
            is_fallback=pair.prefill is None and pair.decode.worker.role is Role.DECODE,
        )

    # --- scores -------------------------------------------------------------------------------------------------------

    def _with_restores(self, request: RequestView, workers: Sequence[WorkerState]) -> RequestView:
        """The request as if its restorable tokens were cached, where restoring is faster than computing; those stay
        restorable, and no others."""
        cached_tokens, restorable_tokens = dict(request.cached_tokens), {}
        for worker in workers:
            restorable = request.restorable_tokens.get(worker.worker_id, 0)
            if not restorable:
                continue
            cached = cached_tokens.get(worker.worker_id, 0)
            uncached = request.num_prompt_tokens - cached
            saved_ms = self._prefill_ms(uncached, cached)
            saved_ms -= self._prefill_ms(uncached - restorable, cached + restorable)
            if restorable * worker.restore_ms_per_token < saved_ms:
                cached_tokens[worker.worker_id] = cached + restorable
                restorable_tokens[worker.worker_id] = restorable
        return replace(request, cached_tokens=cached_tokens, restorable_tokens=restorable_tokens)

    def _score_prefills(
        self, request: RequestView, snapshot: ClusterSnapshot, num_asked: float, now_s: float
    ) -> list[Scored]:
        """The best first."""
        workers = snapshot.prefill
        if request.excluded:
            workers = [worker for worker in workers if worker.incarnation not in request.excluded]
        num_tokens, cached_tokens = request.num_prompt_tokens, request.cached_tokens
        # Coefficients once for the decision: a thousand workers are scored with plain floats.
        c0, c1, c2 = self._timing.prefill_coefficients
        spreads_ms = self._spreads_ms(request, workers, num_asked, now_s)
        make = tuple.__new__  # a sixth of a decision over a thousand workers would go into arguments by name
        scored = []
        for index, worker in enumerate(workers):
            cached = cached_tokens.get(worker.worker_id, 0)
            uncached = num_tokens - cached
            booked = worker.booked_prefill_tokens
            queue_ms = 0.0
            if booked:
                queue_ms = left_of_booked_ms(worker, c0 + c1 * booked + c2 * booked * booked / 2, now_s)
            if worker.reported_queue_ms > queue_ms and (age_s := now_s - worker.load_at_s) <= REPORT_FRESH_S:
                queue_ms = max(queue_ms, worker.reported_queue_ms - age_s * 1000)
            compute_ms = c0 + c1 * uncached + c2 * uncached * (cached + uncached / 2)
            evict_ms = EVICTION_WEIGHT * c1 * _evicted_tokens(worker, uncached)
            spread_ms = spreads_ms[index] if spreads_ms else 0.0
            work_ms = WORK_WEIGHT * compute_ms
            restore_ms = _restore_ms(request, worker) if request.restorable_tokens else 0.0
            total_ms = queue_ms + compute_ms + work_ms + evict_ms + spread_ms + restore_ms
            terms = (queue_ms, compute_ms, work_ms, evict_ms, spread_ms, restore_ms)
            scored.append(make(Scored, (total_ms, worker.last_chosen_s, index, worker, terms)))
        scored.sort()
        return scored

    def _score_decodes(
        self, request: RequestView, workers: Sequence[WorkerState], num_asked: float, now_s: float
    ) -> list[Scored]:
        """The best first."""
        num_tokens, cached_tokens, settings = request.num_prompt_tokens, request.cached_tokens, self._settings
        alpha, beta, gamma = self._timing.decode_coefficients
        c1 = self._timing.prefill_coefficients[1]
        slower_ms = beta + gamma * num_tokens
        # Who has streams alone computes nothing for a prompt's prefix to be found there.
        computes = any(worker.role is Role.AGGREGATED for worker in workers)
        spreads_ms = self._spreads_ms(request, workers, num_asked, now_s) if computes else ()
        transfers_ms: dict[tuple[int, int, int], float] = {}  # most workers hold nothing, and are of one kind
        make = tuple.__new__
        scored = []
        for index, worker in enumerate(workers):
            running = worker.num_in_flight
            kv_tokens = max(worker.reported_context_tokens, worker.booked_kv_tokens)
            step_ms = alpha + beta * (running + 1) + gamma * (kv_tokens + num_tokens)
            neighbours_ms = slower_ms * running
            transfer_ms = queue_ms = prefill_ms = evict_ms = spread_ms = restore_ms = 0.0
            missing = num_tokens - cached_tokens.get(worker.worker_id, 0)
            if worker.role is Role.AGGREGATED:
                queue_ms = self._own_queue_ms(worker, now_s)
                prefill_ms = self._own_prefill_ms(missing, num_tokens - missing, worker)
                evict_ms = EVICTION_WEIGHT * c1 * _evicted_tokens(worker, missing)
                spread_ms = spreads_ms[index] if spreads_ms else 0.0
                restore_ms = _restore_ms(request, worker) if request.restorable_tokens else 0.0
            else:
                # What is on its way from a prefill worker need not come from below, too.
                missing += request.restorable_tokens.get(worker.worker_id, 0) if request.restorable_tokens else 0
                kind = (missing, worker.kv_bytes_per_token, worker.num_layers)
                known_ms = transfers_ms.get(kind)
                if known_ms is None:
                    known_ms = transfers_ms[kind] = self._transfer_ms(missing, worker)
                transfer_ms = known_ms
            late_ms = step_ms - settings.itl_slo_ms
            pressure_ms = settings.pressure_weight * late_ms if late_ms > 0 else 0.0
            full_ms = full_pool_ms(worker)
            terms = (
                step_ms, neighbours_ms, transfer_ms, pressure_ms, full_ms,
                queue_ms, prefill_ms, evict_ms, spread_ms, restore_ms,
            )  # fmt: skip
            total_ms = sum(terms)
            scored.append(make(Scored, (total_ms, worker.last_chosen_s, index, worker, terms)))
        scored.sort()
        return scored

    def _transfer_ms(self, missing: int, worker: WorkerState) -> float:
        """What the decode worker waits for after the prefill of what it lacks."""
        return exposed_transfer_ms(
            missing * worker.kv_bytes_per_token,
            self._settings.link_bytes_per_ms,
            self._prefill_ms(missing, 0),
            worker.num_layers,
            self._settings.round_trip_ms,
        )

    def _local(self, request: RequestView, decode: Scored, now_s: float) -> Scored:
        """Prefilling where it is decoded; no transfer then."""
        worker = decode.worker
        cached = request.cached_tokens.get(worker.worker_id, 0)
        terms = dict(zip(DECODE_TERMS, decode.terms_ms, strict=True))
        terms["transfer"] = 0.0
        terms["queue"] = self._own_queue_ms(worker, now_s)
        terms["prefill"] = self._own_prefill_ms(request.num_prompt_tokens - cached, cached, worker)
        terms["restore"] = _restore_ms(request, worker)
        return decode._replace(total_ms=sum(terms.values()), terms_ms=tuple(terms.values()))

    def _own_prefill_ms(self, num_uncached: int, num_cached: int, worker: WorkerState) -> float:
        """On a worker that decodes: its own time and, of those whose steps wait for it, or it for theirs."""
        own_ms = self._prefill_ms(num_uncached, num_cached)
        if not worker.prefill_share:
            return own_ms * (1 + WORK_WEIGHT + worker.num_in_flight)  # every neighbour's next token waits for it
        return own_ms / worker.share_beside(worker.num_in_flight) + WORK_WEIGHT * own_ms

    def _own_queue_ms(self, worker: WorkerState, now_s: float) -> float:
        """What is booked on a worker that decodes goes before."""
        booked = worker.booked_prefill_tokens
        if not booked:
            return 0.0
        booked_ms = self._prefill_ms(booked, 0) / worker.share_beside(worker.num_in_flight)
        return left_of_booked_ms(worker, booked_ms, now_s)

    def _prefill_ms(self, num_uncached: int, num_cached: int) -> float:
        c0, c1, c2 = self._timing.prefill_coefficients
        return c0 + c1 * num_uncached + c2 * num_uncached * (num_cached + num_uncached / 2)

    def _num_asked(self, request: RequestView, now_s: float) -> float:
        """Lately, for the longest prefix of this request that anybody holds; 0 where that decides nothing."""
        self._hot.count_request(now_s)
        if request.longest_match is None or _is_cold(request):
            return 0.0
        return self._hot.count_prefix(request.longest_match, now_s)

    def _without_hot_prefix(self, request: RequestView, able: Sequence[Scored]) -> list[Scored]:
        """Those that lack the prefix of this request, when it is time for another copy; else nobody."""
        prefix, cached_tokens = request.longest_match, request.cached_tokens
        half = max(cached_tokens.values(), default=0) / 2
        lacking = [scored for scored in able if cached_tokens.get(scored.worker.worker_id, 0) < half]
        if prefix is None or not lacking or not self._hot.wants_copy(prefix, 1 - len(lacking) / len(able)):
            return []
        return lacking

    def _spreads_ms(
        self, request: RequestView, workers: Sequence[WorkerState], num_asked: float, now_s: float
    ) -> Sequence[float]:
        """Of each worker, what its having had more than the others costs; empty: nothing anywhere."""
        if not _is_cold(request):
            whole_ms = self._prefill_ms(request.num_prompt_tokens, 0)
            return [price * whole_ms for price in self._shares.prices(workers, num_asked, now_s)]
        weight_ms = SPREAD_WEIGHT * self._timing.prefill_coefficients[1]
        recent = [worker.recent_tokens(now_s) for worker in workers]
        mean = sum(recent) / len(recent) if recent else 0.0
        return [weight_ms * max(0.0, tokens - mean) for tokens in recent]

    # --- choice -------------------------------------------------------------------------------------------------------

    def _best_pair(
        self,
        request: RequestView,
        snapshot: ClusterSnapshot,
        decodes: Sequence[Scored],
        prefills: Sequence[Scored],
        now_s: float,
    ) -> Pair:
        pairs: list[Pair] = []
        for decode in decodes[:NUM_PAIRED]:
            if decode.worker.role is Role.AGGREGATED:
                pairs.append(Pair(decode, None, decode.total_ms))
                continue
            best = list(islice(_allowed(prefills, decode), NUM_PAIRED))
            pairs += [Pair(decode, prefill, decode.total_ms + prefill.total_ms) for prefill in best]
            if not best and snapshot.allows_local_prefill:
                pairs.append(Pair(decode, None, self._local(request, decode, now_s).total_ms))
        if not pairs:
            raise NoWorkersAvailable(
                "no prefill worker is ready and local prefill is not allowed",
                retry_after_s=RETRY_AFTER_S,
                stage="route",
            )
        lowest_ms = min(pair.total_ms for pair in pairs)
        tied_ms = lowest_ms + max(NEAR_TIE_MS, NEAR_TIE_SHARE * lowest_ms)
        tied = [pair for pair in pairs if pair.total_ms <= tied_ms]
        chosen = min(tied, key=lambda pair: (pair.num_in_flight, pair.last_chosen_s, pair.order))
        return replace(chosen, is_tied=len(tied) > 1)

    def _is_clearly_faster(self, local: Scored, pair: Pair) -> bool:
        if pair.prefill is None:
            raise ValueError("nobody else would prefill: there is nothing to weigh")
        local_ms = local.total_ms + QUEUE_WEIGHT * local.terms_ms[DECODE_TERMS.index("queue")]
        remote_ms = pair.total_ms + QUEUE_WEIGHT * pair.prefill.terms_ms[PREFILL_TERMS.index("queue")]
        return local_ms + max(self._settings.local_gain_ms, NEAR_TIE_SHARE * local_ms) < remote_ms


def _may_prefill(decode: WorkerState, snapshot: ClusterSnapshot) -> bool:
    """Whether a decode worker may compute a prompt for which a prefill worker is there."""
    used_tokens = max(decode.used_tokens, decode.booked_kv_tokens)
    return snapshot.allows_local_prefill and used_tokens <= FULL_POOL * (decode.capacity_tokens or math.inf)


def _reason(pair: Pair, *, is_wanted_local: bool, is_copying: bool) -> str:
    if is_wanted_local:
        return "cheaper without a transfer"
    if is_copying:
        return "a copy of a hot prefix"
    return "near tie: the less busy, then the one chosen least recently" if pair.is_tied else "lowest predicted time"


def _evicted_tokens(worker: WorkerState, num_uncached: int) -> int:
    """What has to leave its cache for this prompt."""
    if not worker.capacity_tokens:
        return 0
    return max(0, num_uncached - worker.never_used_blocks * worker.block_tokens)


def _is_cold(request: RequestView) -> bool:
    """Nobody's cache is a reason to go anywhere."""
    return max(request.cached_tokens.values(), default=0) < COLD_SHARE * request.num_prompt_tokens


def _restore_ms(request: RequestView, worker: WorkerState) -> float:
    """What of the prompt comes from below on this worker, when it computes the rest."""
    return request.restorable_tokens.get(worker.worker_id, 0) * worker.restore_ms_per_token


def _allowed(prefills: Sequence[Scored], decode: Scored) -> Iterator[Scored]:
    return (prefill for prefill in prefills if may_pair(prefill.worker, decode.worker))


def _alternatives(pair: Pair, prefills: Sequence[Scored]) -> list[WorkerState]:
    """Who else may prefill for this decode worker, best first."""
    others = (prefill.worker for prefill in _allowed(prefills, pair.decode) if prefill is not pair.prefill)
    return list(islice(others, MAX_PREFILL_CHOICES - 1))


def _shown(scored: Sequence[Scored], chosen: Scored | None) -> list[Scored]:
    """The best ones, and the chosen one wherever it stands."""
    best = list(scored[:MAX_EXPLAINED])
    return best if chosen is None or chosen in best else [*best[:-1], chosen]
