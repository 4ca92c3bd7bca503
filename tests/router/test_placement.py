"""Where requests go: every policy on the same workers, and the faults of other routers as inputs."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable

import pytest
from tandem.v1 import worker_pb2

from cluster.errors import NoWorkersAvailable
from cluster.identity import BlockHash, WorkerId
from router.bookings import Booking
from router.cache_aware import CacheAware
from router.hot_prefixes import HotPrefixes
from router.load_policies import LeastLoaded, left_of_booked_ms
from router.placement import ClusterSnapshot, Placement, PlacementPolicy, RequestView
from router.policies import DEFAULT_PRIOR, choose_policy
from router.timing_model import TimingModel
from router.worker_scores import CacheAwareSettings
from router.worker_state import Role, WorkerState
from tests.router.placement_simulation import BLOCK_TOKENS, SimulatedCluster, worker

POLICIES = ("cache_aware", "least_loaded", "power_of_two", "round_robin", "session")
NO_LOCAL = CacheAwareSettings(local_gain_ms=1e9)  # prefill workers always prefill


def _request(num_tokens: int = 1000, **fields: object) -> RequestView:
    return RequestView(num_prompt_tokens=num_tokens, max_tokens=64, **fields)  # type: ignore[arg-type]


def _snapshot(num_prefill: int, num_decode: int, *, local: bool = True) -> ClusterSnapshot:
    return ClusterSnapshot(
        [worker(f"prefill-{i}") for i in range(num_prefill)],
        [worker(f"decode-{i}", Role.DECODE) for i in range(num_decode)],
        local,
    )


def _cache_aware(settings: CacheAwareSettings = NO_LOCAL) -> CacheAware:
    return CacheAware(TimingModel(DEFAULT_PRIOR), settings)


def _make(name: str) -> PlacementPolicy:
    return _cache_aware() if name == "cache_aware" else choose_policy(name, 1).policy


def at(now_s: float) -> Callable[[], float]:
    """A clock that stands."""
    return lambda: now_s


def _spread(policy: PlacementPolicy, snapshot: ClusterSnapshot, count: int, num_tokens: int = 1000) -> Counter[str]:
    """Places requests that all stay; who got them as prefill worker."""
    counts: Counter[str] = Counter()
    for number in range(count):
        placement = policy.place(_request(num_tokens), snapshot, number / 1000)
        Booking(placement, num_tokens, 64, at(number / 1000))
        counts[placement.prefill[0].worker_id] += 1
    return counts


# --- eligibility ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_f08_rt35_nobody_there_is_said_and_local_prefill_only_where_allowed(name: str) -> None:
    policy = _make(name)
    with pytest.raises(NoWorkersAvailable, match="no decode worker"):
        policy.place(_request(), _snapshot(1, 0), 0.0)
    with pytest.raises(NoWorkersAvailable, match="no prefill worker"):
        policy.place(_request(), _snapshot(0, 1, local=False), 0.0)
    placement = policy.place(_request(), _snapshot(0, 1), 0.0)
    assert placement.is_local
    assert placement.is_fallback


@pytest.mark.parametrize("name", POLICIES)
def test_s_b65_excluded_workers_and_refused_pairs_are_never_chosen(name: str) -> None:
    policy, snapshot = _make(name), _snapshot(2, 2)
    excluded = frozenset({snapshot.prefill[0].incarnation, snapshot.decode[1].incarnation})
    for _ in range(10):
        placement = policy.place(_request(excluded=excluded), snapshot, 0.0)
        assert placement.decode is snapshot.decode[0]
        assert list(placement.prefill) == [snapshot.prefill[1]]
    snapshot.decode[0].refused = frozenset({snapshot.prefill[1].incarnation})
    placement = policy.place(_request(excluded=excluded), snapshot, 0.0)
    assert placement.is_local


@pytest.mark.parametrize("name", POLICIES)
def test_f27_a_worker_that_is_too_small_is_not_chosen(name: str) -> None:
    small, large = worker("small", Role.DECODE, total_blocks=10), worker("large", Role.DECODE, total_blocks=100)
    snapshot = ClusterSnapshot([worker("prefill-0")], [small, large])
    assert all(_make(name).place(_request(), snapshot, 0.0).decode is large for _ in range(5))
    with pytest.raises(NoWorkersAvailable, match="room"):
        _make(name).place(_request(5000), snapshot, 0.0)


@pytest.mark.parametrize("name", POLICIES)
def test_aggregated_workers_take_requests_alone(name: str) -> None:
    snapshot = ClusterSnapshot([], [worker("both", Role.AGGREGATED)], allows_local_prefill=False)
    placement = _make(name).place(_request(), snapshot, 0.0)
    assert placement.is_local
    assert not placement.is_fallback


# --- load -------------------------------------------------------------------------------------------------------------


def test_power_of_two_takes_the_less_loaded_of_two_and_is_nearly_even() -> None:
    counts = _spread(_make("power_of_two"), _snapshot(8, 4), 800)
    assert max(counts.values()) <= 1.1 * 100
    snapshot = _snapshot(2, 2)
    snapshot.prefill[0].booked_prefill_tokens = 5000
    snapshot.decode[1].booked_requests = 9
    placements = [_make("power_of_two").place(_request(), snapshot, 0.0) for _ in range(20)]
    assert {(one.prefill[0].worker_id, one.decode.worker_id) for one in placements} == {("prefill-1", "decode-0")}


def test_sessions_stay_and_few_of_them_move_when_a_worker_leaves() -> None:
    policy, snapshot = _make("session"), _snapshot(4, 4)

    def homes(among: ClusterSnapshot) -> dict[int, str]:
        placed = [policy.place(_request(session_key=f"session {number}"), among, 0.0) for number in range(400)]
        return {number: placement.prefill[0].worker_id for number, placement in enumerate(placed)}

    before = homes(snapshot)
    assert homes(snapshot) == before
    assert min(Counter(before.values()).values()) > 60
    after = homes(ClusterSnapshot(snapshot.prefill[1:], snapshot.decode))
    assert all(after[number] == home for number, home in before.items() if home != "prefill-0")


def test_a_hot_session_does_not_bury_its_worker() -> None:
    policy, snapshot = _make("session"), _snapshot(4, 4)
    counts: Counter[str] = Counter()
    for number in range(80):
        placement = policy.place(_request(session_key="hot"), snapshot, float(number))
        Booking(placement, 1000, 64, at(float(number)))
        counts[placement.prefill[0].worker_id] += 1
    assert max(counts.values()) <= 1.3 * 20


def test_requests_without_a_session_go_to_the_least_loaded() -> None:
    snapshot = _snapshot(2, 1)
    snapshot.prefill[0].booked_prefill_tokens = 5000
    assert _make("session").place(_request(), snapshot, 0.0).prefill[0] is snapshot.prefill[1]


@pytest.mark.parametrize("name", ["cache_aware", "least_loaded"])
def test_rt5_ties_are_uniform(name: str) -> None:
    counts = _spread(_make(name), _snapshot(4, 2), 1000)
    assert sum((count - 250) ** 2 / 250 for count in counts.values()) < 16.3  # chi square, 3 degrees, p = 0.001


def test_rt39_a_stale_idle_report_does_not_outweigh_what_is_booked() -> None:
    snapshot = _snapshot(2, 1)
    frozen, other = snapshot.prefill
    frozen.load_at_s = other.load_at_s = 0.0
    policy = LeastLoaded(TimingModel(DEFAULT_PRIOR))
    counts: Counter[str] = Counter()
    for number in range(20):
        placement = policy.place(_request(2000), snapshot, 2.0)
        Booking(placement, 2000, 64, at(2.0 + number))
        counts[placement.prefill[0].worker_id] += 1
    assert counts[frozen.worker_id] == 10
    assert counts[other.worker_id] == 10


@pytest.mark.parametrize("name", ["cache_aware", "least_loaded"])
def test_a_fresh_report_of_others_load_counts(name: str) -> None:
    snapshot = _snapshot(2, 1)
    snapshot.prefill[0].take_report(worker_pb2.LoadReport(queue_ms=5000), 10.0)
    placement = _make(name).place(_request(), snapshot, 10.5)
    assert placement.prefill[0] is snapshot.prefill[1]


@pytest.mark.parametrize("name", ["cache_aware", "least_loaded"])
def test_rt8_full_pools_are_avoided_until_all_are_full(name: str) -> None:
    snapshot = _snapshot(1, 4)
    for state in snapshot.decode[:3]:
        state.take_report(worker_pb2.LoadReport(total_blocks=1000, free_blocks=20), 0.0)
    assert _make(name).place(_request(100), snapshot, 0.0).decode is snapshot.decode[3]
    snapshot.decode[3].take_report(worker_pb2.LoadReport(total_blocks=1000, free_blocks=20), 0.0)
    assert _make(name).place(_request(100), snapshot, 0.0).decode in snapshot.decode


@pytest.mark.parametrize("name", POLICIES)
def test_rt3_every_decode_worker_is_used_also_one_that_comes_late_and_has_not_reported(name: str) -> None:
    snapshot = _snapshot(1, 4)
    late = worker("decode-late", Role.DECODE)
    late.take_report(worker_pb2.LoadReport(), 0.0)  # no slots, no blocks: it has said nothing yet
    policy, counts, open_bookings = _make(name), Counter[str](), list[Booking]()
    for number in range(512):
        decode = [*snapshot.decode, late] if number >= 64 else snapshot.decode
        request = _request(500, session_key=f"session {number}")
        placement = policy.place(request, ClusterSnapshot(snapshot.prefill, decode), number / 100)
        counts[placement.decode.worker_id] += 1
        open_bookings.append(Booking(placement, 500, 64, at(number / 100)))
        if len(open_bookings) > 32:
            open_bookings.pop(0).release()
    assert len(counts) == 5
    assert min(counts.values()) >= 0.5 * 512 / 5 * 7 / 8


def test_rt38_what_was_booked_on_a_worker_that_left_and_came_back_goes_with_its_old_state() -> None:
    snapshot = _snapshot(1, 1)
    placement = LeastLoaded(TimingModel(DEFAULT_PRIOR)).place(_request(), snapshot, 0.0)
    booking = Booking(placement, 1000, 64, at(0.0))
    again = worker("decode-0", Role.DECODE)  # another incarnation: another state
    booking.release()
    booking.release()
    for state in (again, *snapshot.decode, *snapshot.prefill):
        assert (state.booked_requests, state.booked_prefills, state.booked_prefill_tokens, state.booked_kv_tokens) == (
            0, 0, 0, 0,
        )  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_rt40_workers_whose_reports_are_all_old_are_still_asked(name: str) -> None:
    snapshot = _snapshot(1, 1)
    for state in (*snapshot.prefill, *snapshot.decode):
        state.take_report(worker_pb2.LoadReport(total_blocks=1000, free_blocks=1000, queue_ms=9e9), 0.0)
    assert _make(name).place(_request(), snapshot, 3600.0).decode is snapshot.decode[0]


def test_rt37_prefill_is_charged_the_prompt_and_decode_the_kv() -> None:
    snapshot = _snapshot(1, 1)
    placement = LeastLoaded(TimingModel(DEFAULT_PRIOR)).place(_request(1000), snapshot, 0.0)
    booking = Booking(placement, 1000, 64, at(0.0))
    prefill, decode = snapshot.prefill[0], snapshot.decode[0]
    assert (prefill.booked_prefill_tokens, prefill.booked_kv_tokens) == (1000, 0)
    assert (decode.booked_prefill_tokens, decode.booked_kv_tokens) == (0, 1064)
    booking.first_token()
    booking.first_token()
    assert (prefill.booked_prefill_tokens, prefill.booked_requests) == (0, 0)
    booking.release()
    booking.release()
    booking.first_token()
    for state in (prefill, decode):
        assert (state.booked_requests, state.booked_prefill_tokens, state.booked_kv_tokens) == (0, 0, 0)


# --- caches -----------------------------------------------------------------------------------------------------------


def _cluster(policy: PlacementPolicy, num_prefill: int, num_decode: int) -> SimulatedCluster:
    snapshot = _snapshot(num_prefill, num_decode)
    return SimulatedCluster(policy, TimingModel(DEFAULT_PRIOR), list(snapshot.prefill), list(snapshot.decode))


def _shared_prefix_prompts(count: int, rate_per_s: float) -> list[tuple[float, list[int]]]:
    """The same 2,048 tokens, then 200 of its own."""
    chance = random.Random(2)
    shared = [chance.randrange(1000) for _ in range(2048)]
    at_s, prompts = 0.0, []
    for _ in range(count):
        at_s += chance.expovariate(rate_per_s)
        prompts.append((at_s, [*shared, *(chance.randrange(1000) for _ in range(200))]))
    return prompts


def test_rt1_a_hot_shared_prefix_does_not_send_everybody_to_one_worker() -> None:
    cluster = _cluster(_cache_aware(), 8, 8)
    cluster.run(_shared_prefix_prompts(600, rate_per_s=25))
    counts = cluster.prefills_of()
    assert len(counts) == 8
    assert min(counts.values()) >= 0.05 * 600
    assert max(counts.values()) <= 1.3 * 600 / 8


@pytest.mark.parametrize("rate_per_s", [3, 12])
def test_rt1_a_hot_prefix_reaches_every_worker_also_when_one_could_serve_all(rate_per_s: float) -> None:
    """One worker's cache hits would keep up with this traffic: it must not become the only one that has the prefix."""
    cluster = _cluster(_cache_aware(), 8, 8)
    cluster.run(_shared_prefix_prompts(400, rate_per_s))
    counts = cluster.prefills_of()
    assert len(counts) == 8
    assert min(counts.values()) >= 0.05 * 400


def _asked(hot: HotPrefixes, prefix: bytes, at_s: float, holders_share: float = 0.25) -> bool:
    hot.count_request(at_s)
    hot.count_prefix(BlockHash(prefix), at_s)
    return hot.wants_copy(BlockHash(prefix), holders_share)


def test_a_prefix_that_is_asked_for_now_and_then_is_not_copied() -> None:
    hot = HotPrefixes(max_prefixes=2)
    assert not any(_asked(hot, b"rare", 60.0 * number) for number in range(100))
    asked = [_asked(hot, b"hot", 6000.0 + 0.1 * number) for number in range(32)]
    assert sum(asked) == 3
    _asked(hot, b"a", 6010.0)
    _asked(hot, b"b", 6010.0)
    assert not any(_asked(hot, b"hot", 6010.0) for _ in range(7)), "forgotten, so it starts over"


def test_a_popular_prefix_is_copied_until_its_holders_have_a_fair_share() -> None:
    """A third of all requests: more than two of eight workers would get, less than three."""
    hot = HotPrefixes()
    copies = dict.fromkeys((1, 2, 3), 0)
    for holders in copies:
        at_s = 100.0 * holders
        for number in range(120):
            copies[holders] += _asked(hot, b"popular", at_s, holders / 8)
            _asked(hot, b"other %d" % number, at_s, 1 / 8)
            _asked(hot, b"another %d" % number, at_s, 1 / 8)
    assert copies[1] == copies[2] == 15
    assert copies[3] == 0


@pytest.mark.parametrize("role", [Role.PREFILL, Role.AGGREGATED])
def test_what_has_to_leave_a_full_cache_and_what_came_lately_decide_where_a_cold_prompt_goes(role: Role) -> None:
    """Three workers that are as idle: one has a full cache, one took prompts lately."""
    full, busy_lately, roomy = (worker(f"{role.value}-{number}", role) for number in range(3))
    full.take_report(worker_pb2.LoadReport(total_blocks=1000, free_blocks=900, cached_blocks=900), 0.0)
    busy_lately.add_recent_tokens(50_000, 0.0)
    workers = [full, busy_lately, roomy]
    decodes = workers if role is Role.AGGREGATED else [worker("decode-0", Role.DECODE)]
    snapshot = ClusterSnapshot(workers if role is Role.PREFILL else [], decodes, allows_local_prefill=False)
    placement = _cache_aware().place(_request(4000), snapshot, 0.0)
    chosen = placement.prefill[0] if placement.prefill else placement.decode
    assert chosen is roomy
    terms = {candidate.worker.worker_id: candidate.terms_ms for candidate in placement.candidates}
    assert terms[full.worker_id]["evict"] > 0 == terms[roomy.worker_id]["evict"]
    assert terms[busy_lately.worker_id]["spread"] > 0 == terms[roomy.worker_id]["spread"]


def test_cache_aware_is_faster_than_round_robin_on_shared_prefixes() -> None:
    """100 documents of 3,000 tokens, each asked about four times in no order; four prefill workers."""
    chance = random.Random(4)
    documents = [[chance.randrange(1000) for _ in range(3008)] for _ in range(100)]
    order = [document for document in documents for _ in range(4)]
    chance.shuffle(order)
    at_s, prompts = 0.0, []
    for document in order:
        at_s += chance.expovariate(1.2)
        prompts.append((at_s, [*document, *(chance.randrange(1000) for _ in range(40))]))
    median_ms, p99_ms = {}, {}
    for name in ("cache_aware", "round_robin"):
        cluster = _cluster(_make(name), 4, 4)
        cluster.run(prompts)
        median_ms[name] = statistics.median(cluster.ttft_ms)
        p99_ms[name] = statistics.quantiles(cluster.ttft_ms, n=100)[98]
        counts = cluster.prefills_of()
        assert max(counts.values()) <= 1.3 * len(prompts) / 4
    assert median_ms["cache_aware"] * 2 <= median_ms["round_robin"]
    assert p99_ms["cache_aware"] < p99_ms["round_robin"]


def test_a_thousand_workers_are_used_evenly_and_prefixes_are_still_found() -> None:
    """120 documents, each asked about eight times, on 500 prefill and 500 decode workers."""
    chance = random.Random(5)
    documents = [[chance.randrange(1000) for _ in range(1024)] for _ in range(120)]
    order = [document for document in documents for _ in range(8)]
    chance.shuffle(order)
    at_s, prompts = 0.0, []
    for document in order:
        at_s += chance.expovariate(200)
        prompts.append((at_s, [*document, *(chance.randrange(1000) for _ in range(32))]))
    cluster = _cluster(_cache_aware(), 500, 500)
    cluster.run(prompts)
    cached = [placement.expected_cached_tokens for placement in cluster.placements]
    assert sum(tokens >= 1024 for tokens in cached) >= 0.8 * len(prompts)
    assert max(cluster.prefills_of().values()) <= 24
    decodes = Counter(placement.decode.worker_id for placement in cluster.placements)
    assert len(decodes) == 500
    assert max(decodes.values()) <= 4


def test_aggregated_workers_are_chosen_by_what_they_hold_as_well() -> None:
    """40 documents, each asked six times: five of six find it, on 8 workers that do both."""
    chance = random.Random(9)
    documents = [[chance.randrange(1000) for _ in range(2000)] for _ in range(40)]
    order = [document for document in documents for _ in range(6)]
    chance.shuffle(order)
    at_s, prompts = 0.0, []
    for document in order:
        at_s += chance.expovariate(2.5)
        prompts.append((at_s, [*document, *(chance.randrange(1000) for _ in range(40))]))
    aggregated = [worker(f"both-{number}", Role.AGGREGATED) for number in range(8)]
    cluster = SimulatedCluster(_cache_aware(), TimingModel(DEFAULT_PRIOR), [], aggregated)
    cluster.run(prompts)
    found = [placement.expected_cached_tokens for placement in cluster.placements]
    assert sum(tokens >= 1984 for tokens in found) >= 0.75 * len(prompts)
    counts = Counter(placement.decode.worker_id for placement in cluster.placements)
    assert max(counts.values()) <= 1.4 * len(prompts) / 8


def test_conversations_stay_where_their_prefix_is() -> None:
    """Nine of ten later turns go to the worker of the turn before."""
    chance = random.Random(6)
    cluster = _cluster(_cache_aware(), 4, 4)
    histories = [[chance.randrange(1000) for _ in range(1024)] for _ in range(40)]
    turns: list[tuple[float, int, list[int]]] = []
    at_s = 0.0
    for _ in range(10):
        for number, history in enumerate(histories):
            at_s += chance.expovariate(5)
            history.extend(chance.randrange(1000) for _ in range(96))
            turns.append((at_s, number, list(history)))
    cluster.run([(at, tokens) for at, _, tokens in turns])
    homes: dict[int, WorkerId] = {}
    num_stayed = 0
    for (_, number, _), placement in zip(turns, cluster.placements, strict=True):
        home = placement.prefill[0].worker_id
        num_stayed += homes.get(number) == home
        homes[number] = home
    assert num_stayed >= 0.9 * (len(turns) - len(histories))


def test_a_burst_of_siblings_stays_together_before_any_event_has_come() -> None:
    cluster = _cluster(_cache_aware(), 4, 4)
    chance = random.Random(8)
    shared = [chance.randrange(1000) for _ in range(4096)]
    cluster.run([(0.001 * number, [*shared, number, *range(15)]) for number in range(3)])
    assert len(cluster.prefills_of()) == 1


@pytest.mark.parametrize("role", [Role.PREFILL, Role.AGGREGATED])
def test_a_hit_waits_for_what_is_left_of_the_prompt_before_it(role: Role) -> None:
    """Computing 2,000 tokens takes 1.7 s; behind another such prompt the holder has 1.7 s, and later 0.4 s, to go."""
    workers = [worker("holder", role), worker("idle", role)]
    snapshot = ClusterSnapshot([], workers)
    if role is Role.PREFILL:
        snapshot = ClusterSnapshot(workers, [worker("decode-0", Role.DECODE)])
    policy = _cache_aware()
    before = (
        Placement("test", workers[0]) if role is Role.AGGREGATED else Placement("test", snapshot.decode[0], workers)
    )
    Booking(before, 3000, 64, at(0.0))
    cached = {workers[0].worker_id: 1984}

    def chosen(now_s: float) -> WorkerState:
        placement = policy.place(_request(2000, cached_tokens=cached), snapshot, now_s)
        return placement.prefill[0] if placement.prefill else placement.decode

    assert chosen(0.0) is workers[1]
    assert chosen(2.2) is workers[0]


def test_what_is_booked_shrinks_while_it_is_computed_but_never_below_what_waits_behind() -> None:
    state, now_s = worker("prefill-0"), [10.0]
    placement = Placement("test", worker("decode-0", Role.DECODE), [state])
    first, second = (Booking(placement, 1000, 64, lambda: now_s[0]) for _ in range(2))
    assert left_of_booked_ms(state, 400.0, 10.0) == 400.0
    assert left_of_booked_ms(state, 400.0, 10.15) == pytest.approx(250.0)
    assert left_of_booked_ms(state, 400.0, 11.0) == pytest.approx(220.0), "late is not done"
    now_s[0] = 11.0
    first.first_token()
    assert left_of_booked_ms(state, 200.0, 11.05) == pytest.approx(150.0), "the second one's turn began then"
    second.release()
    assert left_of_booked_ms(state, 0.0, 11.05) == 0.0


@pytest.mark.parametrize("name", ["cache_aware", "least_loaded", "power_of_two"])
def test_a_reported_queue_grows_old(name: str) -> None:
    """900 ms reported 0.8 s ago are 100 ms."""
    snapshot = _snapshot(2, 1)
    snapshot.prefill[0].take_report(worker_pb2.LoadReport(queue_ms=900.0), 10.0)
    snapshot.prefill[1].take_report(worker_pb2.LoadReport(queue_ms=300.0), 10.8)
    assert _make(name).place(_request(), snapshot, 10.8).prefill[0] is snapshot.prefill[0]


def test_an_idle_prefill_worker_takes_short_and_long_prompts_alike() -> None:
    """A near tie goes to the prefill pool: what a decode worker computes, it does not decode."""
    policy = _cache_aware(CacheAwareSettings())
    for num_tokens in (5, 40, 255, 1000, 8000):
        placement = policy.place(_request(num_tokens), _snapshot(1, 1), 0.0)
        assert [worker.worker_id for worker in placement.prefill] == ["prefill-0"]


def test_a_queue_in_front_of_the_prefill_pool_makes_local_prefill_cheaper() -> None:
    snapshot = _snapshot(1, 1)
    snapshot.prefill[0].booked_prefill_tokens = 4000
    assert _cache_aware(CacheAwareSettings()).place(_request(200), snapshot, 0.0).is_local


def test_streams_that_are_kept_in_time_make_local_prefill_cheap_when_the_prefill_pool_is_busy() -> None:
    snapshot = _snapshot(1, 1)
    decode = snapshot.decode[0]
    policy = _cache_aware(CacheAwareSettings())
    for running, share, queued, is_local in (
        (8, 0.0, 4000, False),  # a whole prompt in one step: eight streams would stall
        (8, 0.7, 4000, True),
        (8, 0.7, 0, False),  # nobody waits: the prefill pool is there for this
        (8, 0.05, 4000, False),  # the streams leave next to nothing
    ):
        decode.take_report(worker_pb2.LoadReport(running_requests=running, prefill_share=share), 0.0)
        snapshot.prefill[0].booked_prefill_tokens = queued
        assert policy.place(_request(2000), snapshot, 0.0).is_local is is_local, (running, share, queued)


def test_what_a_decode_worker_prefills_already_goes_before() -> None:
    snapshot = _snapshot(1, 1)
    decode = snapshot.decode[0]
    decode.take_report(worker_pb2.LoadReport(running_requests=8, prefill_share=0.7), 0.0)
    snapshot.prefill[0].booked_prefill_tokens = 4000
    decode.booked_prefill_tokens = 4000
    assert not _cache_aware(CacheAwareSettings()).place(_request(2000), snapshot, 0.0).is_local


def test_local_prefill_when_little_is_missing_and_not_when_the_pool_is_full() -> None:
    snapshot = _snapshot(2, 1)
    decode = snapshot.decode[0]
    policy = _cache_aware(CacheAwareSettings())
    cached = {decode.worker_id: 900}
    placement = policy.place(_request(1000, cached_tokens=cached), snapshot, 0.0)
    assert placement.is_local
    assert not placement.is_fallback
    assert placement.expected_cached_tokens == 900
    decode.take_report(worker_pb2.LoadReport(total_blocks=1000, free_blocks=100), 0.0)
    assert not policy.place(_request(1000, cached_tokens=cached), snapshot, 0.0).is_local


def test_every_decision_explains_itself_in_milliseconds() -> None:
    snapshot = _snapshot(3, 2)
    placement = _cache_aware().place(_request(), snapshot, 0.0)
    assert {candidate.worker.worker_id for candidate in placement.candidates} == {
        state.worker_id for state in (*snapshot.prefill, *snapshot.decode)
    }
    for candidate in placement.candidates:
        assert candidate.total_ms == pytest.approx(sum(candidate.terms_ms.values()))
        assert all(term >= 0 for term in candidate.terms_ms.values())


def test_the_decode_workers_own_prefill_is_explained_beside_the_others() -> None:
    snapshot = _snapshot(1, 1)
    snapshot.decode[0].take_report(worker_pb2.LoadReport(running_requests=8, prefill_share=0.8), 0.0)
    policy = _cache_aware(CacheAwareSettings())
    for queued, is_local in ((0, False), (8000, True)):
        snapshot.prefill[0].booked_prefill_tokens = queued
        placement = policy.place(_request(2000), snapshot, 0.0)
        assert placement.local is not None
        assert placement.local.worker is snapshot.decode[0]
        assert placement.local.total_ms == pytest.approx(sum(placement.local.terms_ms.values()))
        remote, _ = (candidate.terms_ms for candidate in placement.candidates)
        assert placement.local.terms_ms["prefill"] == pytest.approx(remote["prefill"] / 0.8 + remote["work"])
        assert placement.is_local is is_local
    snapshot = ClusterSnapshot(snapshot.prefill, snapshot.decode, allows_local_prefill=False)
    assert policy.place(_request(2000), snapshot, 0.0).local is None


def test_decisions_are_fast_with_64_and_1000_workers() -> None:
    """Far above what a quiet machine needs (benchmarks/router_decision.py has those figures)."""
    for num_workers, limit_ms in ((64, 5.0), (1000, 60.0)):
        snapshot = _snapshot(num_workers // 2, num_workers // 2)
        cached = {state.worker_id: 320 for state in snapshot.prefill[::3]}
        policy = _cache_aware()
        times_ms = []
        for _ in range(20):
            started = time.thread_time()
            policy.place(_request(32_000, cached_tokens=cached), snapshot, 0.0)
            times_ms.append((time.thread_time() - started) * 1000)
        assert min(times_ms) < limit_ms


def test_recent_share_fades() -> None:
    state: WorkerState = worker("prefill-0")
    state.add_recent_tokens(1000, 0.0)
    assert state.recent_tokens(30.0) == pytest.approx(500)
    assert state.recent_tokens(60.0) == pytest.approx(250)


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="made up"):
        choose_policy("made up", 0)
    assert BLOCK_TOKENS == 16
