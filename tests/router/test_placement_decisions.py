"""Every decision of the cache-aware policy is the one that its description gives, whatever state the workers are in."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tandem.v1 import worker_pb2

from cluster.errors import NoWorkersAvailable
from cluster.identity import BlockHash
from router.bookings import Booking
from router.cache_aware import CacheAware
from router.placement import ClusterSnapshot, Placement, RequestView
from router.timing_model import TimingModel, TimingPrior
from router.worker_scores import CacheAwareSettings
from router.worker_state import Role, WorkerState
from tests.router.placement_simulation import BLOCK_TOKENS, worker
from tests.router.plain_placement import PlainPlacement

TIMINGS = (TimingPrior((8.0, 0.1, 1e-6), (12.0, 0.15, 1e-5)), TimingPrior((2.0, 1.13, 3.2e-4), (9.0, 0.85, 1.8e-3)))
NUM_REQUESTS, NUM_PREFIXES = 120, 6
# Prefill, decode and aggregated workers.
FLEETS = ((5, 4, 0), (6, 1, 0), (2, 6, 0), (0, 0, 6), (3, 2, 3), (0, 3, 0), (1, 1, 0), (20, 20, 0))


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("seed", range(4))
def test_every_decision_is_the_one_that_adding_up_all_terms_gives(fleet: tuple[int, int, int], seed: int) -> None:
    chance = random.Random(f"{fleet} {seed}")
    snapshot = _fleet(chance, fleet)
    timing = TimingModel(TIMINGS[seed % len(TIMINGS)])
    policy, plain = CacheAware(timing, CacheAwareSettings()), PlainPlacement(timing)
    now_s = 100.0
    open_bookings: list[Booking] = []
    for _ in range(NUM_REQUESTS):
        now_s += chance.choice((0.0, 0.01, 0.3))
        _change(chance, snapshot, open_bookings, now_s)
        request = _request(chance, snapshot)
        expected = plain.place(request, snapshot, now_s)
        try:
            placement = policy.place(request, snapshot, now_s)
        except NoWorkersAvailable:
            assert expected is None
            continue
        assert expected is not None
        assert placement.decode is expected.decode
        assert (placement.prefill[0] if placement.prefill else None) is expected.prefill
        open_bookings.append(_booked(placement, request, now_s))


def test_what_these_states_are_made_of_decides_now_and_then() -> None:
    """Else the comparison above would say little: copies, local prefills, near ties and prices are all among them."""
    reasons: Counter[str] = Counter()
    terms: Counter[str] = Counter()
    for fleet in FLEETS:
        chance = random.Random(f"{fleet} 0")
        snapshot = _fleet(chance, fleet)
        policy = CacheAware(TimingModel(TIMINGS[0]), CacheAwareSettings())
        now_s = 100.0
        open_bookings: list[Booking] = []
        for _ in range(NUM_REQUESTS):
            now_s += chance.choice((0.0, 0.01, 0.3))
            _change(chance, snapshot, open_bookings, now_s)
            request = _request(chance, snapshot)
            try:
                placement = policy.place(request, snapshot, now_s)
            except NoWorkersAvailable:
                reasons["nobody"] += 1
                continue
            reasons[placement.reason] += 1
            for candidate in placement.candidates:
                terms.update(name for name, term_ms in candidate.terms_ms.items() if term_ms > 0)
            open_bookings.append(_booked(placement, request, now_s))
    assert len(reasons) == 5, reasons
    assert all(count >= 5 for count in reasons.values()), reasons
    assert {"queue", "evict", "spread", "restore", "neighbours", "pressure", "full", "transfer"} <= set(terms), terms


def _fleet(chance: random.Random, fleet: tuple[int, int, int]) -> ClusterSnapshot:
    num_prefill, num_decode, num_aggregated = fleet
    prefill = [worker(f"prefill-{number}") for number in range(num_prefill)]
    decode = [worker(f"decode-{number}", Role.DECODE) for number in range(num_decode)]
    decode += [worker(f"both-{number}", Role.AGGREGATED) for number in range(num_aggregated)]
    for state in [*prefill, *decode]:
        _report(chance, state, 100.0)
    if prefill and len(decode) > 1:
        decode[0].refused = frozenset([prefill[0].incarnation])
        prefill[-1].refused = frozenset([decode[1].incarnation])
    return ClusterSnapshot(prefill, decode, allows_local_prefill=chance.random() < 0.7)


def _report(chance: random.Random, state: WorkerState, now_s: float) -> None:
    """Some are full, some have never been used, one may be too small for a long prompt or has not said what it has."""
    total = chance.choice((0, 100, 400, 2000, 100_000))
    free = int(total * chance.choice((0.05, 0.5, 1.0)))
    load = worker_pb2.LoadReport(
        total_blocks=total,
        free_blocks=free,
        cached_blocks=int(free * chance.choice((0.0, 0.5, 1.0))),
        running_requests=chance.choice((0, 0, 1, 5, 700)),
        context_tokens=chance.choice((0, 0, 20_000)),
        queue_ms=chance.choice((0, 0, 0, 40, 2000)),
        prefill_share=chance.choice((0.0, 0.4)) if state.role is not Role.PREFILL else 0.0,
        restore_ms_per_block=chance.choice((0.0, 0.1, 2.0)),
    )
    state.take_report(load, now_s)


def _change(chance: random.Random, snapshot: ClusterSnapshot, bookings: list[Booking], now_s: float) -> None:
    for state in [*snapshot.prefill, *snapshot.decode]:
        if chance.random() < 0.1:
            _report(chance, state, now_s)
    while bookings and chance.random() < 0.6:
        chance.choice((Booking.first_token, Booking.release))(bookings.pop(chance.randrange(len(bookings))))


def _request(chance: random.Random, snapshot: ClusterSnapshot) -> RequestView:
    length = chance.choice((40, 900, 2100, 8000))
    workers = [*snapshot.prefill, *snapshot.decode]
    prefix = min(NUM_PREFIXES - 1, int(chance.expovariate(1.5)))
    drawn = random.Random(f"{prefix} {len(workers)}")  # each prefix has the same holders throughout
    holders = drawn.sample(workers, min(len(workers), drawn.choice((0, 1, 2, 4))))
    most = length // BLOCK_TOKENS * BLOCK_TOKENS
    cached = {state.worker_id: min(most, chance.choice((16, 480, 1600, 8000))) for state in holders}
    below = {state.worker_id: chance.choice((0, most - cached.get(state.worker_id, 0))) for state in workers[::3]}
    excluded = [chance.choice(workers).incarnation] if chance.random() < 0.1 else []
    return RequestView(
        num_prompt_tokens=length,
        max_tokens=64,
        cached_tokens={worker_id: tokens for worker_id, tokens in cached.items() if tokens},
        longest_match=BlockHash(b"prefix %d" % prefix) if any(cached.values()) else None,
        excluded=frozenset(excluded),
        restorable_tokens={name: tokens for name, tokens in below.items() if tokens} if chance.random() < 0.2 else {},
    )


def _booked(placement: Placement, request: RequestView, now_s: float) -> Booking:
    return Booking(placement, request.num_prompt_tokens, request.max_tokens, lambda: now_s)
