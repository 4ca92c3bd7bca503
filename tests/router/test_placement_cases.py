"""Faults of other routers' placement as they were seen: several routers, hot prefixes, idle holders of large caches."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from tandem.v1 import worker_pb2

from router.bookings import Booking
from router.placement import ClusterSnapshot, PlacementPolicy, RequestView
from router.policies import DEFAULT_PRIOR, choose_policy
from router.timing_model import TimingModel, TimingPrior
from router.worker_registry import in_turn, turn_of
from router.worker_state import Role
from tests.router.placement_simulation import SimulatedCluster, worker

# A prompt of 8,000 tokens takes 0.9 s, one of 100 behind a prefix of 8,000 takes 18 ms.
GPU = TimingPrior((5.0, 0.08, 6e-6), (8.0, 0.05, 1e-5))
NUM_ROUTERS = 16


def _request(num_tokens: int = 1000, max_tokens: int = 64) -> RequestView:
    return RequestView(num_prompt_tokens=num_tokens, max_tokens=max_tokens)


def _stands(now_s: float) -> Callable[[], float]:
    return lambda: now_s


def _booked(policy: PlacementPolicy, snapshot: ClusterSnapshot, request: RequestView, now_s: float) -> str:
    """Who prefills it, booked as the dispatcher books."""
    placement = policy.place(request, snapshot, now_s)
    Booking(placement, request.num_prompt_tokens, request.max_tokens, _stands(now_s))
    return placement.prefill[0].worker_id if placement.prefill else placement.decode.worker_id


# --- bursts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "best_ms"), [("cache_aware", 0.0), ("cache_aware", 3.0), ("least_loaded", 0.0), ("round_robin", 0.0)]
)
def test_rt2_sixteen_routers_that_decide_at_once_do_not_choose_the_same_worker(name: str, best_ms: float) -> None:
    """None knows what the others book; one worker may have less to do than the others, by less than a near tie."""
    counts: Counter[str] = Counter()
    for number in range(NUM_ROUTERS):
        turn = turn_of(f"router-{number}")
        prefill = [worker(f"prefill-{index}") for index in range(4)]
        for state in prefill[1:]:
            state.take_report(worker_pb2.LoadReport(total_blocks=1000, free_blocks=1000, queue_ms=best_ms), 0.0)
        decode = [worker("decode-0", Role.DECODE)]
        snapshot = ClusterSnapshot(in_turn(prefill, turn), decode, allows_local_prefill=False)
        counts[_booked(choose_policy(name, 0, turn=turn).policy, snapshot, _request(), 0.0)] += 1
    assert max(counts.values()) <= math.ceil(NUM_ROUTERS / 4) + 2, counts


@pytest.mark.parametrize("name", ["cache_aware", "least_loaded"])
def test_rt2_a_burst_at_one_router_spreads_because_it_is_booked_when_it_is_decided(name: str) -> None:
    snapshot = ClusterSnapshot(
        [worker(f"prefill-{index}") for index in range(4)],
        [worker(f"decode-{index}", Role.DECODE) for index in range(4)],
        allows_local_prefill=False,
    )
    policy = choose_policy(name, 1).policy
    counts = Counter(_booked(policy, snapshot, _request(4000), number / 1000) for number in range(16))
    assert set(counts.values()) == {4}


@pytest.mark.parametrize("name", ["cache_aware", "least_loaded"])
def test_rt29_long_prompts_with_one_token_to_say_go_to_all_prefill_workers_alike(name: str) -> None:
    """32,000 tokens in, 1 out: a load that is booked when decoding answers would come too late for all of them."""
    snapshot = ClusterSnapshot(
        [worker(f"prefill-{index}") for index in range(4)],
        [worker("decode-0", Role.DECODE)],
        allows_local_prefill=False,
    )
    policy = choose_policy(name, 1).policy
    counts = Counter(_booked(policy, snapshot, _request(32_000, 1), number / 100) for number in range(40))
    assert all(0.20 <= count / 40 <= 0.30 for count in counts.values()), counts
    assert len(counts) == 4


def test_rt7_round_robin_gives_eight_workers_the_same_also_those_that_came_late() -> None:
    """Six are there at first; the two that come later are served from then on like the others."""
    policy = choose_policy("round_robin", 0).policy
    early = [worker(f"decode-{index}", Role.DECODE) for index in range(6)]
    for _ in range(13):
        policy.place(_request(), ClusterSnapshot([], early), 0.0)
    everybody = ClusterSnapshot([], [*early, *(worker(f"late-{index}", Role.DECODE) for index in range(2))])
    counts = Counter(policy.place(_request(), everybody, 0.0).decode.worker_id for _ in range(800))
    assert len(counts) == 8
    assert all(abs(count - 100) <= 1 for count in counts.values()), counts


# --- prefixes ---------------------------------------------------------------------------------------------------------


def test_rt30_a_prompt_that_nobody_holds_goes_to_the_idle_worker_whatever_its_cache_holds() -> None:
    """The one with the smallest tree had it because it was busiest."""
    busy, idle = worker("busy"), worker("idle")
    busy.take_report(worker_pb2.LoadReport(total_blocks=1000, free_blocks=900, cached_blocks=10, queue_ms=4000), 0.0)
    idle.take_report(worker_pb2.LoadReport(total_blocks=1000, free_blocks=500, cached_blocks=480), 0.0)
    decode = worker("decode-0", Role.DECODE)
    for order in ([busy, idle], [idle, busy]):
        snapshot = ClusterSnapshot(order, [decode], allows_local_prefill=False)
        placement = choose_policy("cache_aware", 1).policy.place(_request(), snapshot, 0.0)
        assert placement.prefill[0] is idle


def test_rt57_hot_prefixes_never_make_anybody_wait_too_long() -> None:
    """Ten types of prompts, 8,000 tokens of each shared, 10 requests/s, four workers of a GPU's speed.

    Whoever only follows prefixes queues at the holder of the popular one, which seven of ten requests are of.
    """
    chance = random.Random(3)
    shared = [[chance.randrange(1000) for _ in range(8000)] for _ in range(10)]
    kinds = chance.choices(range(10), [70, *[30 / 9] * 9], k=600)
    at_s, prompts = 0.0, []
    for kind in kinds:
        at_s += chance.expovariate(10)
        prompts.append((at_s, [*shared[kind], *(chance.randrange(1000) for _ in range(1600))]))
    workers = [worker(f"prefill-{index}") for index in range(4)], [worker("decode-0", Role.DECODE)]
    cluster = SimulatedCluster(choose_policy("cache_aware", 1, GPU).policy, TimingModel(GPU), *workers)
    cluster.run(prompts)
    assert max(cluster.ttft_ms) < 10_000
    assert cluster.num_cached_tokens >= 0.9 * 8000 * len(prompts)


def test_rt58_two_routers_find_nearly_what_one_finds() -> None:
    """100 documents of 3,000 tokens, each asked about four times in no order; each router sees every other request."""
    chance = random.Random(4)
    documents = [[chance.randrange(1000) for _ in range(3008)] for _ in range(100)]
    order = [document for document in documents for _ in range(4)]
    chance.shuffle(order)
    at_s, prompts = 0.0, []
    for document in order:
        at_s += chance.expovariate(1.2)
        prompts.append((at_s, [*document, *(chance.randrange(1000) for _ in range(40))]))
    found = {}
    for num_routers in (1, 2):
        policies = [choose_policy("cache_aware", 1, turn=turn).policy for turn in range(num_routers)]
        cluster = SimulatedCluster(
            policies[0],
            TimingModel(DEFAULT_PRIOR),
            [worker(f"prefill-{index}") for index in range(4)],
            [worker(f"decode-{index}", Role.DECODE) for index in range(4)],
            other_policies=policies[1:],
        )
        cluster.run(prompts)
        found[num_routers] = cluster.num_cached_tokens / sum(len(tokens) for _, tokens in prompts)
    assert found[2] >= found[1] - 0.03, found
