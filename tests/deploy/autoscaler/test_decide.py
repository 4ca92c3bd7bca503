"""The scaling decision over time, and the faults that public autoscalers had."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path

import pytest

from deploy.autoscaler.capacity import CapacityModel, prefill_need
from deploy.autoscaler.decide import Action, ScalerState, decide
from deploy.autoscaler.policy import Budget, Forecasting, Policy, PoolBounds, ScaleDown, Slo
from deploy.autoscaler.policy_file import load_policy
from deploy.autoscaler.signals import Demand, Pool, PoolSignals, Snapshot, StartingReplica, TtftStage, WorkerLoad
from tests.deploy.autoscaler.fleet import MODEL, Fleet, demand, workers

POLICY = Policy()
IDLE = demand(0.0, 0.0, 0.0)


def fleet(prefill: int = 1, decode: int = 1, policy: Policy = POLICY, start_s: float = 30.0) -> Fleet:
    return Fleet(policy, {Pool.PREFILL: prefill, Pool.DECODE: decode}, start_s)


def snapshot(load: Demand, prefill: PoolSignals, decode: PoolSignals, now_s: float = 5.0, **more: object) -> Snapshot:
    return Snapshot(now_s, True, load, prefill, decode, **more)  # type: ignore[arg-type]


def test_prompts_grow_prefill_and_answers_grow_decode() -> None:
    cluster = fleet()
    for _ in range(30):
        cluster.tick(demand(30.0, uncached=1000, output=10))
    prompt_heavy = (cluster.total(Pool.PREFILL), cluster.total(Pool.DECODE))
    for _ in range(120):
        cluster.tick(demand(8.0, uncached=50, output=400))
    answer_heavy = (cluster.total(Pool.PREFILL), cluster.total(Pool.DECODE))
    assert prompt_heavy[0] > prompt_heavy[1]
    assert answer_heavy[1] > answer_heavy[0]


def test_a_step_settles_within_three_start_times_and_overshoots_by_at_most_one() -> None:
    cluster = fleet(prefill=1, start_s=30.0)
    for _ in range(60):
        cluster.tick(demand(8.0, output=10))
    before = cluster.total(Pool.PREFILL)
    wished, counts = 0, []
    for _ in range(int(3 * 30 / POLICY.tick_s)):
        wished = cluster.tick(demand(32.0, output=10)).prefill.wish
        counts.append(cluster.total(Pool.PREFILL))
    assert wished > before
    assert counts[-1] == wished
    assert max(counts) <= wished + 1


def test_what_gathered_before_the_replicas_came_asks_for_one_more_at_most() -> None:
    """Real queues keep TTFT bad for as long as they drain, also once there is enough capacity."""
    cluster = fleet(start_s=30.0)
    for _ in range(60):
        cluster.tick(demand(8.0, output=10))
    busy, backlog_s, counts, needed = 3.2, 0.0, [], 0  # workers that 32 requests/s keep busy; worker-seconds that wait
    for tick in range(80):
        backlog_s = max(0.0, backlog_s + (busy - cluster.counts[Pool.PREFILL]) * POLICY.tick_s)
        # Those who waited are in the percentiles for longer than they wait.
        stages = {TtftStage.PREFILL_QUEUE: 5 * POLICY.slo.ttft_ms} if tick < 50 else {}
        queue_ms = 1000 * backlog_s / cluster.counts[Pool.PREFILL]
        cluster.tick(demand(32.0, output=10), ttft=stages, queue_ms=queue_ms)
        needed = max(needed, prefill_need(demand(32.0, output=10), MODEL, POLICY).replicas)
        counts.append(cluster.total(Pool.PREFILL))
    assert backlog_s == 0
    assert needed <= max(counts) <= needed + 1


def test_distress_that_outlasts_the_start_of_a_replica_asks_for_another() -> None:
    cluster = fleet(start_s=30.0)
    for _ in range(100):
        queue_ms = 400_000.0 / cluster.counts[Pool.PREFILL]  # whatever the model says, it does not get shorter
        cluster.tick(demand(0.1, output=10), ttft={TtftStage.PREFILL_QUEUE: 2 * POLICY.slo.ttft_ms}, queue_ms=queue_ms)
    assert cluster.total(Pool.PREFILL) >= 3


def test_half_an_hour_of_steady_load_changes_nothing() -> None:
    noise = random.Random(7)
    cluster = fleet(prefill=4, decode=2)
    per_worker = 9.0  # a prefill worker at its target utilisation of 0.9
    for _ in range(360):
        cluster.tick(demand(0.8 * 4 * per_worker * noise.uniform(0.97, 1.03), output=10))
    assert cluster.total(Pool.PREFILL) == 4


def test_f22_noise_around_a_boundary_does_not_flap() -> None:
    cluster = fleet(prefill=2)
    counts = []
    for index in range(720):
        cluster.tick(demand(17.5 if index % 2 else 18.5, output=10))
        counts.append(cluster.total(Pool.PREFILL))
    changes = sum(left != right for left, right in pairwise(counts))
    assert changes <= 1


def test_f22_a_number_that_is_none_holds() -> None:
    for bad in (math.nan, math.inf, -1.0):
        decision = fleet(3, 3).tick(demand(bad))
        assert decision.prefill.action is decision.decode.action is Action.HOLD
        assert decision.alerts == ("bad_signal",)


def test_f22_spikes_act_once_in_a_cooldown() -> None:
    cluster = fleet(prefill=4)
    for index in range(240):
        cluster.tick(demand(36.0 if index % 5 == 0 else 1.0, output=10))
    downs = [number for number, decision in enumerate(cluster.decisions) if decision.prefill.action is Action.DOWN]
    assert all(right - left >= 60 / POLICY.tick_s for left, right in pairwise(downs))
    assert cluster.total(Pool.PREFILL) >= POLICY.prefill.min


def test_f22_a_restarted_scaler_does_not_shrink_on_a_past_it_has_not_seen() -> None:
    cluster = fleet(4, 4)
    for _ in range(int(POLICY.scale_down.window_s / POLICY.tick_s) - 1):
        assert cluster.tick(demand(0.5, output=10)).prefill.action is Action.HOLD


def test_rt50_silence_is_idle_with_a_heartbeat_and_unknown_without() -> None:
    idle, blind = fleet(4, 4), fleet(4, 4)
    for _ in range(200):
        idle.tick(IDLE)
        blind.tick(IDLE, has_heartbeat=False)
    assert (idle.total(Pool.PREFILL), idle.total(Pool.DECODE)) == (1, 1)
    assert (blind.total(Pool.PREFILL), blind.total(Pool.DECODE)) == (4, 4)


def test_rt54_a_full_decode_pool_grows_decode_alone() -> None:
    cluster = fleet(2, 2)
    for _ in range(3):
        cluster.tick(demand(0.5, output=10), kv_utilisation=0.95)
    assert (cluster.total(Pool.PREFILL), cluster.total(Pool.DECODE)) == (2, 3)


def test_rt55_no_load_never_scales_up() -> None:
    cluster = fleet()
    for _ in range(10):
        cluster.tick(IDLE)
    assert all(decision.prefill.change == decision.decode.change == 0 for decision in cluster.decisions)


def test_rt49_refused_and_waiting_demand_scales_although_little_completes() -> None:
    cluster = fleet()
    for _ in range(10):
        cluster.tick(demand(40.0, output=10, queued=64))
    assert cluster.total(Pool.PREFILL) > 1


def test_rt49_one_giant_prompt_above_the_slo_grows_nothing_and_says_so() -> None:
    cluster = fleet()
    ttft = {TtftStage.OWN_COMPUTE: 5 * POLICY.slo.ttft_ms, TtftStage.PREFILL_QUEUE: 1.0}
    decision = cluster.tick(demand(0.01, uncached=32_000), ttft=ttft)
    assert decision.alerts == ("infeasible_slo",)
    for _ in range(100):
        cluster.tick(IDLE)
    assert cluster.total(Pool.PREFILL) == 1


def test_rt45_starting_replicas_are_cancelled_before_running_ones() -> None:
    policy = Policy(scale_down=ScaleDown(window_s=0, cooldown_s=0, after_up_s=0))
    starting = (StartingReplica("new0", 100.0), StartingReplica("new1", 100.0))
    seen = snapshot(demand(1.0, output=10), PoolSignals(workers("p", 2), starting), PoolSignals(workers("d", 1)))
    decision, _ = decide(seen, ScalerState(), policy, MODEL)
    assert (decision.prefill.action, decision.prefill.change) == (Action.CANCEL_STARTING, -2)


def test_rt46_a_flood_is_not_followed_by_a_quick_removal() -> None:
    cluster = fleet()
    for _ in range(12):
        cluster.tick(demand(45.0, output=10))
    for _ in range(int(POLICY.scale_down.after_up_s / POLICY.tick_s) - 1):
        assert cluster.tick(demand(0.5, output=10)).prefill.action in (Action.HOLD, Action.CANCEL_STARTING)


def test_rt51_a_replica_that_never_comes_stops_counting_and_blocks_nothing() -> None:
    late = (StartingReplica("new0", 4.0),)
    seen = snapshot(demand(30.0, output=10), PoolSignals(workers("p", 1), late), PoolSignals(workers("d", 1)))
    first, state = decide(seen, ScalerState(), POLICY, MODEL)
    assert first.prefill.current == 1
    second, _ = decide(seen, state, POLICY, MODEL)
    assert second.prefill.action is Action.UP


def test_rt52_a_manual_change_is_taken_as_it_is() -> None:
    cluster = fleet(prefill=2)
    for _ in range(5):
        cluster.tick(demand(10.0, output=10))
    cluster.counts[Pool.PREFILL] = 6  # somebody added four by hand
    for _ in range(200):
        cluster.tick(demand(10.0, output=10))
    assert cluster.total(Pool.PREFILL) == 2


def test_one_hot_worker_is_a_routing_fault_and_no_reason_to_scale() -> None:
    hot = (*workers("p", 3, queue_ms=100.0), WorkerLoad("hot", 9_000.0))
    state = ScalerState()
    alerts = []
    for tick in range(10):
        seen = snapshot(demand(40.0, output=10), PoolSignals(hot), PoolSignals(workers("d", 1)), now_s=5.0 * tick)
        decision, state = decide(seen, state, POLICY, MODEL)
        alerts.append(decision.alerts)
    assert alerts[-1] == ("routing_fault",)
    assert alerts[0] == ()


def test_queue_grows_prefill_decode_wait_grows_decode_and_transfer_grows_nothing() -> None:
    for stage, expected in (
        (TtftStage.PREFILL_QUEUE, (2, 1)),
        (TtftStage.DECODE_WAIT, (1, 2)),
        (TtftStage.EXPOSED_TRANSFER, (1, 1)),
    ):
        cluster = fleet()
        for _ in range(3):
            cluster.tick(demand(0.1, output=10), ttft={stage: 2 * POLICY.slo.ttft_ms})
        assert (cluster.total(Pool.PREFILL), cluster.total(Pool.DECODE)) == expected, stage
    assert cluster.decisions[-1].alerts == ("slow_transfer",)


def test_a_slow_token_rate_grows_decode() -> None:
    cluster = fleet()
    for _ in range(3):
        cluster.tick(demand(0.1), itl_ms=2 * POLICY.slo.itl_ms)
    assert cluster.total(Pool.DECODE) == 2


def test_pools_stay_within_bounds() -> None:
    policy = Policy(prefill=PoolBounds(min=2, max=3))
    cluster = fleet(2, 1, policy)
    for _ in range(100):
        cluster.tick(demand(500.0, output=10))
    assert cluster.total(Pool.PREFILL) == 3
    for _ in range(500):
        cluster.tick(IDLE)
    assert cluster.total(Pool.PREFILL) == 2


class TestBudget:
    POLICY = Policy(budget=Budget(replicas=4), prefill=PoolBounds(max=3), decode=PoolBounds(max=3))

    def test_a_worker_changes_its_role_when_the_other_pool_needs_it_more(self) -> None:
        cluster = fleet(1, 3, self.POLICY)
        for _ in range(60):
            cluster.tick(demand(20.0, uncached=2000, output=20))
        assert (cluster.total(Pool.PREFILL), cluster.total(Pool.DECODE)) == (3, 1)

    def test_role_changes_need_several_ticks_and_keep_their_distance(self) -> None:
        cluster = fleet(1, 3, self.POLICY)
        for index in range(240):
            # Turns before the votes are complete: no ratio is better for long enough.
            heavy = demand(20.0, uncached=2000, output=20) if index % 3 else demand(5.0, uncached=20, output=400)
            cluster.tick(heavy)
        flips = [
            decision
            for decision in cluster.decisions
            if Action.FLIP in (decision.prefill.action, decision.decode.action)
        ]
        assert flips == []

    def test_the_budget_is_never_exceeded(self) -> None:
        cluster = fleet(1, 1, self.POLICY)
        for _ in range(100):
            cluster.tick(demand(100.0, uncached=2000, output=400))
            assert cluster.total(Pool.PREFILL) + cluster.total(Pool.DECODE) <= 4


@pytest.mark.parametrize("seed", range(5))
def test_any_traffic_keeps_every_pool_within_bounds_and_steps(seed: int) -> None:
    chance = random.Random(seed)
    cluster = fleet(start_s=chance.uniform(5, 100))
    for _ in range(600):
        before = {pool: cluster.total(pool) for pool in Pool}
        cluster.tick(demand(chance.choice((0.0, 1.0, 20.0, 90.0)), chance.uniform(1, 4000), chance.uniform(1, 500)))
        for pool in Pool:
            assert POLICY.prefill.min <= cluster.total(pool) <= POLICY.prefill.max
            assert cluster.total(pool) - before[pool] <= max(1, before[pool] // 2)


def test_the_model_is_the_one_of_the_sweep() -> None:
    model = CapacityModel(1.0, 0.5, 0.001, 2.0, 0.25, 0.0001, 1000, 64)
    assert model.prefill_ms(100, 50) == pytest.approx(1 + 50 + 0.001 * 100 * 100)
    assert model.tpot_ms(8, 100) == pytest.approx(2 + 2 + 0.0001 * 800)


def test_a_ramp_is_met_before_it_is_there() -> None:
    """With the forecast each replica of the same ramp is asked for earlier, and none beyond what it comes to."""
    first_at: dict[str, list[int]] = {}
    for method in ("off", "auto"):
        policy = Policy(forecast=Forecasting(method=method, horizon_s=60.0))
        cluster = fleet(policy=policy)
        sizes = []
        for tick in range(140):
            cluster.tick(demand(4 + 0.2 * tick, output=10))
            sizes.append(cluster.total(Pool.PREFILL))
        assert sizes[-1] == 4
        first_at[method] = [sizes.index(size) for size in (2, 3, 4)]
    assert first_at["auto"] < first_at["off"]
    assert all(early <= late for early, late in zip(first_at["auto"], first_at["off"], strict=True))
    assert cluster.decisions[-1].forecast is not None


def test_a_step_of_arrivals_is_not_taken_for_a_trend() -> None:
    cluster = fleet(start_s=30.0)
    for _ in range(100):
        cluster.tick(demand(8.0, output=10))
    largest = max(cluster.tick(demand(32.0, output=10)).prefill.wish for _ in range(60))
    assert largest == cluster.decisions[-1].prefill.wish


def test_an_slo_that_one_request_alone_misses_is_infeasible_and_says_so() -> None:
    slow = Policy(slo=Slo(itl_ms=5.0))  # one sequence alone takes 11 ms a token
    assert fleet(policy=slow).tick(demand(1.0)).alerts == ("infeasible_slo",)
    assert fleet(policy=Policy(slo=Slo(ttft_ms=50.0))).tick(demand(1.0)).alerts == ("infeasible_slo",)
    assert fleet().tick(demand(1.0)).alerts == ()


def test_more_than_the_policy_allows_is_an_alert_and_not_a_larger_pool() -> None:
    cluster = fleet(policy=Policy(prefill=PoolBounds(max=2)))
    for _ in range(30):
        cluster.tick(demand(50.0, output=10))
    assert cluster.total(Pool.PREFILL) == 2
    assert cluster.decisions[-1].alerts == ("prefill_at_maximum",)


@pytest.mark.parametrize("period_ticks", [1, 2, 3, 6, 12, 24])
def test_f22_two_and_one_never_flap_whatever_the_period(period_ticks: int) -> None:
    cluster = fleet(prefill=2, start_s=10.0)
    counts = []
    for tick in range(1440):  # two hours around the boundary between one replica and two
        is_high = tick // period_ticks % 2 == 0
        cluster.tick(demand(12.0 if is_high else 6.0, output=10))
        counts.append(cluster.total(Pool.PREFILL))
    changes = [index for index, (left, right) in enumerate(pairwise(counts)) if left != right]
    assert len(changes) <= 1


def test_f22_after_any_removal_minutes_pass_before_the_next() -> None:
    cluster = fleet(prefill=6, decode=1)
    for _ in range(400):
        cluster.tick(IDLE)
    downs = [number for number, decision in enumerate(cluster.decisions) if decision.prefill.action is Action.DOWN]
    assert len(downs) == 5
    assert downs[0] >= POLICY.scale_down.window_s / POLICY.tick_s - 1
    assert all(right - left >= POLICY.scale_down.cooldown_s / POLICY.tick_s for left, right in pairwise(downs))


SHIPPED = Path(__file__).parents[3] / "deploy" / "policies"


def _settled(name: str, load: Demand, ticks: int = 200) -> Fleet:
    cluster = fleet(policy=load_policy(SHIPPED / f"{name}.yaml"), start_s=20.0)
    for _ in range(ticks):
        cluster.tick(load)
    return cluster


def test_latency_first_takes_more_replicas_for_the_same_load_than_throughput_first() -> None:
    load = demand(30.0, uncached=1000, output=100)
    latency, throughput = _settled("latency-first", load), _settled("throughput-first", load)
    assert latency.total(Pool.PREFILL) > throughput.total(Pool.PREFILL)
    assert latency.total(Pool.DECODE) >= throughput.total(Pool.DECODE)


def test_cost_capped_never_pays_for_more_than_eight_and_splits_them_by_the_load() -> None:
    prompts = _settled("cost-capped", demand(200.0, uncached=2000, output=10), ticks=600)
    answers = _settled("cost-capped", demand(200.0, uncached=50, output=400), ticks=600)
    for cluster in (prompts, answers):
        assert cluster.total(Pool.PREFILL) + cluster.total(Pool.DECODE) == 8
    assert prompts.total(Pool.PREFILL) > prompts.total(Pool.DECODE)
    assert answers.total(Pool.DECODE) > answers.total(Pool.PREFILL)
