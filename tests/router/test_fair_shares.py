"""Fading counts, and what a worker's requests beyond its share cost."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from router.cache_aware import CacheAware
from router.fading_counts import HALF_LIFE_S, MAX_HALF_LIVES, FadingCounts
from router.fair_shares import PRICE, FairShares
from router.policies import DEFAULT_PRIOR
from router.timing_model import TimingModel
from router.worker_scores import CacheAwareSettings
from router.worker_state import Role
from tests.router.placement_simulation import SimulatedCluster, worker


def test_counts_fade_by_half_and_those_not_counted_for_longest_are_forgotten() -> None:
    counts: FadingCounts[str] = FadingCounts(max_keys=2)
    counts.count("a", 0.0)
    counts.count("a", HALF_LIFE_S)
    assert counts.of("a", HALF_LIFE_S) == pytest.approx(1.5)
    counts.count("b", HALF_LIFE_S)
    counts.count("a", 2 * HALF_LIFE_S)
    counts.count("c", 2 * HALF_LIFE_S)
    assert counts.of_all(("a", "b", "c"), 3 * HALF_LIFE_S) == pytest.approx([0.875, 0.0, 0.5])


def test_counts_outlive_any_number_of_half_lives() -> None:
    counts: FadingCounts[str] = FadingCounts(max_keys=8)
    now_s = 0.0
    for step in (0.0, 0.9 * MAX_HALF_LIVES, 0.2 * MAX_HALF_LIVES, 5000.0, 0.0):
        now_s += step * HALF_LIFE_S
        counts.count("a", now_s)
    assert counts.of("a", now_s) == pytest.approx(2.0)
    late_s = now_s + 0.75 * MAX_HALF_LIVES * HALF_LIFE_S
    counts.count("b", late_s)
    assert counts.of("a", late_s) < 1e-9
    assert counts.of("b", late_s + 17 * HALF_LIFE_S) == pytest.approx(0.5**17), "in units of a later moment by now"


def test_each_request_beyond_a_share_costs_and_no_more_of_them_than_half_of_the_askers() -> None:
    workers = [worker(f"both-{number}", Role.AGGREGATED) for number in range(4)]
    shares = FairShares()
    for number, state in enumerate(workers):
        for _ in range((40, 12, 10, 18)[number]):
            shares.placed(state.worker_id, 0.0)
    assert shares.prices(workers, 100.0, 0.0) == pytest.approx([PRICE * 18, 0.0, 0.0, 0.0])  # a share is 22
    assert shares.prices(workers, 10.0, 0.0) == pytest.approx([PRICE * 5, 0.0, 0.0, 0.0])
    assert not shares.prices(workers, 2.0, 0.0), "for so few no copy pays"
    fleet = [*workers, *(worker(f"both-idle-{number}", Role.AGGREGATED) for number in range(100))]
    assert shares.prices(fleet, 100.0, 0.0)[:4] == pytest.approx([PRICE * 24, 0.0, 0.0, PRICE * 2]), "of 16 at least"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.AGGREGATED])
def test_a_worker_that_holds_several_popular_prefixes_gives_one_of_them_away(role: Role) -> None:
    """Eight prefixes on four workers, two of them with half of the traffic, and both of these begin on one worker: each
    alone is no more than a fair share, so neither is hot by itself."""
    chance = random.Random(3)
    prefixes = [[chance.randrange(1000) for _ in range(1024)] for _ in range(8)]
    weights = (4, 4, 2, 2, 1, 1, 1, 1)
    at_s, prompts = 0.0, []
    for number, prefix in enumerate(chance.choices(prefixes, weights, k=500)):
        at_s += chance.expovariate(4)
        prompts.append((at_s, [*prefix, number, *range(40)]))
    workers = [worker(f"{role.value}-{number}", role) for number in range(4)]
    decodes = workers if role is Role.AGGREGATED else [worker(f"decode-{number}", Role.DECODE) for number in range(4)]
    policy = CacheAware(TimingModel(DEFAULT_PRIOR), CacheAwareSettings(local_gain_ms=1e9))
    prefills = workers if role is Role.PREFILL else []
    cluster = SimulatedCluster(policy, TimingModel(DEFAULT_PRIOR), prefills, decodes)
    # Where they begin: the two popular ones behind each other while all others' workers are busy.
    for state in workers[1:]:
        state.booked_prefill_tokens = 50_000
    cluster.run([(0.0, [*prefixes[0], 1]), (3.0, [*prefixes[1], 1])])
    for state in workers[1:]:
        state.booked_prefill_tokens = 0
    placed = len(cluster.placements)
    cluster.run([(4.0 + at, tokens) for at, tokens in prompts])
    later = cluster.placements[placed:]
    counts = Counter((one.prefill[0] if one.prefill else one.decode).worker_id for one in later)
    assert max(counts.values()) <= 1.2 * len(later) / 4
    num_cold = sum(one.expected_cached_tokens < 512 for one in later)
    assert num_cold <= 20, "each was computed once, and few of them again"
