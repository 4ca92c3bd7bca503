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

The pair with the lowest sum wins, near ties by load (`scored_pairs`), equal ones by this router's own order of them,
which no other router has: so neither a shared prefix nor many routers at once send everybody to one worker; every
eighth request for a hot prefix goes to a worker that lacks it (`hot_prefixes`), until no holder gets more than a
worker's fair share through it. A decode worker prefills by itself only where that wins by more than a near tie (what it
computes, it does not decode); between the two the queues count twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from cluster.errors import NoWorkersAvailable
from router.fair_shares import FairShares
from router.hot_prefixes import HotPrefixes
from router.load_policies import MAX_PREFILL_CHOICES
from router.placement import RETRY_AFTER_S, ClusterSnapshot, Placement, RequestView, eligible_decode
from router.scored_pairs import NEAR_TIE_SHARE, Pair, Scored, best_pair, partners_of
from router.timing_model import TimingModel
from router.worker_scores import (
    COLD_SHARE,
    DECODE_TERMS,
    PREFILL_TERMS,
    Asked,
    CacheAwareSettings,
    WorkerScores,
    restore_ms_of,
)
from router.worker_state import Role, WorkerState

# Who waits makes those who come next wait as well: between a decode worker's own prefill and a prefill worker's the
# queues count twice. Otherwise prompts queue until both ways take them equally long, and a decode worker's time for
# prompts lies idle until then.
QUEUE_WEIGHT = 1.0
MAX_EXPLAINED = 8  # of each role: names and numbers of the others are not worth their objects
PREFILL_QUEUE, DECODE_QUEUE = PREFILL_TERMS.index("queue"), DECODE_TERMS.index("queue")


class CacheAware:
    """Has counts of what was asked for and of who got it, and nothing else of its own."""

    name = "cache_aware"

    def __init__(self, timing: TimingModel, settings: CacheAwareSettings) -> None:
        self._settings = settings
        self._hot = HotPrefixes()
        self._shares = FairShares()
        self._scores = WorkerScores(timing, settings, self._shares)

    def place(self, request: RequestView, snapshot: ClusterSnapshot, now_s: float) -> Placement:
        able_decodes = eligible_decode(request, snapshot)
        if request.restorable_tokens:
            request = self._with_restores(request, [*snapshot.prefill, *able_decodes])
        asked = self._asked(request, now_s)
        decodes = self._scores.of_decodes(asked, able_decodes)
        prefills = self._scores.of_prefills(asked, _not_excluded(request, snapshot.prefill))
        # A copy of a hot prefix is made by whoever of those without it is best.
        able = prefills or [scored for scored in decodes if scored.worker.role is Role.AGGREGATED]
        copying = self._without_hot_prefix(request, able) if asked.num_asked else []
        pair = best_pair(
            copying if copying and not prefills else decodes,
            copying if copying and prefills else prefills,
            (lambda decode: self._scores.local(request, decode, now_s).total_ms)
            if snapshot.allows_local_prefill
            else None,
        )
        if pair is None:
            raise NoWorkersAvailable(
                "no prefill worker is ready and local prefill is not allowed",
                retry_after_s=RETRY_AFTER_S,
                stage="route",
            )
        local = None
        if pair.prefill is not None and not copying and _may_prefill(pair.decode.worker, snapshot):
            local = self._scores.local(request, pair.decode, now_s)
        is_wanted_local = local is not None and self._is_clearly_faster(local, pair)
        chosen: list[WorkerState] = []
        if pair.prefill is not None and not is_wanted_local:
            chosen = [pair.prefill.worker, *_alternatives(pair, prefills)]
        computing = chosen[0] if chosen else pair.decode.worker
        self._shares.placed(computing.worker_id, now_s)
        cached = request.cached_tokens.get(computing.worker_id, 0)
        prefill_ms = self._scores.prefill_ms(request.num_prompt_tokens - cached, cached)
        return Placement(
            policy=self.name,
            decode=pair.decode.worker,
            prefill=chosen,
            expected_cached_tokens=cached,
            expected_prefill_ms=prefill_ms + restore_ms_of(request, computing),
            candidates=[
                *[scored.explained(PREFILL_TERMS) for scored in _shown(prefills, pair.prefill)],
                *[scored.explained(DECODE_TERMS) for scored in _shown(decodes, pair.decode)],
            ],
            local=local.explained(DECODE_TERMS) if local is not None else None,
            reason=_reason(pair, is_wanted_local=is_wanted_local, is_copying=bool(copying)),
            is_fallback=pair.prefill is None and pair.decode.worker.role is Role.DECODE,
        )

    def _with_restores(self, request: RequestView, workers: Sequence[WorkerState]) -> RequestView:
        """The request as if its restorable tokens were cached, where restoring is faster than computing; those stay
        restorable, and no others."""
        cached_tokens, restorable_tokens = dict(request.cached_tokens), {}
        prefill_ms = self._scores.prefill_ms
        for worker in workers:
            restorable = request.restorable_tokens.get(worker.worker_id, 0)
            if not restorable:
                continue
            cached = cached_tokens.get(worker.worker_id, 0)
            uncached = request.num_prompt_tokens - cached
            saved_ms = prefill_ms(uncached, cached) - prefill_ms(uncached - restorable, cached + restorable)
            if restorable * worker.restore_ms_per_token < saved_ms:
                cached_tokens[worker.worker_id] = cached + restorable
                restorable_tokens[worker.worker_id] = restorable
        return replace(request, cached_tokens=cached_tokens, restorable_tokens=restorable_tokens)

    def _asked(self, request: RequestView, now_s: float) -> Asked:
        """Counts it, too."""
        is_cold = max(request.cached_tokens.values(), default=0) < COLD_SHARE * request.num_prompt_tokens
        self._hot.count_request(now_s)
        if request.longest_match is None or is_cold:
            return Asked(request, is_cold, 0.0, now_s)
        return Asked(request, is_cold, self._hot.count_prefix(request.longest_match, now_s), now_s)

    def _without_hot_prefix(self, request: RequestView, able: Sequence[Scored]) -> list[Scored]:
        """Those that lack the prefix of this request, when it is time for another copy; else nobody."""
        prefix, cached_tokens = request.longest_match, request.cached_tokens
        if prefix is None or not self._hot.is_due(prefix):
            return []
        half = max(cached_tokens.values(), default=0) / 2
        lacking = [scored for scored in able if cached_tokens.get(scored.worker.worker_id, 0) < half]
        if not lacking or not self._hot.wants_copy(prefix, 1 - len(lacking) / len(able)):
            return []
        return lacking

    def _is_clearly_faster(self, local: Scored, pair: Pair) -> bool:
        if pair.prefill is None:
            raise ValueError("nobody else would prefill: there is nothing to weigh")
        local_ms = local.total_ms + QUEUE_WEIGHT * local.terms_ms[DECODE_QUEUE]
        remote_ms = pair.total_ms + QUEUE_WEIGHT * pair.prefill.terms_ms[PREFILL_QUEUE]
        return local_ms + max(self._settings.local_gain_ms, NEAR_TIE_SHARE * local_ms) < remote_ms


def _not_excluded(request: RequestView, workers: Sequence[WorkerState]) -> Sequence[WorkerState]:
    if not request.excluded:
        return workers
    return [worker for worker in workers if worker.incarnation not in request.excluded]


def _may_prefill(decode: WorkerState, snapshot: ClusterSnapshot) -> bool:
    """Whether a decode worker may compute a prompt for which a prefill worker is there."""
    return snapshot.allows_local_prefill and max(decode.used_tokens, decode.booked_kv_tokens) <= decode.full_tokens


def _reason(pair: Pair, *, is_wanted_local: bool, is_copying: bool) -> str:
    if is_wanted_local:
        return "cheaper without a transfer"
    if is_copying:
        return "a copy of a hot prefix"
    return "near tie: the less busy, then the one chosen least recently" if pair.is_tied else "lowest predicted time"


def _alternatives(pair: Pair, prefills: Sequence[Scored]) -> list[WorkerState]:
    """Who else may prefill for this decode worker, best first."""
    others = (prefill.worker for prefill in partners_of(prefills, pair.decode) if prefill is not pair.prefill)
    return list(islice(others, MAX_PREFILL_CHOICES - 1))


def _shown(scored: Sequence[Scored], chosen: Scored | None) -> Sequence[Scored]:
    """The best ones, and the chosen one wherever it stands."""
    best = scored[:MAX_EXPLAINED]
    return best if chosen is None or chosen in best else [*best[:-1], chosen]
