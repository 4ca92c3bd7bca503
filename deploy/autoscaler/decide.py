"""The decision of one tick, as a pure function of what was seen, what was decided before, and the policy.

1. Unknown or skewed signals: hold. 2. A hot worker: a routing fault, hold. 3. Each pool's wish: what the demand needs,
now or by the forecast, lifted by the stage that TTFT is lost in and by ITL. 4. With a budget: the best split instead.
5. Hysteresis: several ticks to grow, the largest wish of minutes to shrink, one at a time
and only when one fewer still meets the SLO.
"""

from __future__ import annotations

import enum
import math
import statistics
from dataclasses import dataclass, field, replace

from deploy.autoscaler.capacity import (
    CapacityModel,
    decode_capacity,
    decode_need,
    mean_context,
    prefill_capacity,
    prefill_need,
)
from deploy.autoscaler.forecast import Forecast, ForecastState, forecast, observe
from deploy.autoscaler.policy import Policy, PoolBounds
from deploy.autoscaler.signals import Pool, Snapshot, TtftStage

# Start-up times that what was started may take to work off what gathered before it came.
SETTLE_HORIZONS = 2


class Action(enum.Enum):
    HOLD = "hold"
    UP = "up"
    CANCEL_STARTING = "cancel_starting"  # of a scale-down: those that serve nobody yet go first
    DOWN = "down"
    FLIP = "flip"  # a worker of this pool takes the other role


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """What happens to one pool, and why, in words."""

    pool: Pool
    action: Action
    change: int  # replicas more (or fewer, negative)
    wish: int  # replicas that the demand asks for, within bounds
    current: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    prefill: PoolDecision
    decode: PoolDecision
    alerts: tuple[str, ...] = ()
    forecast: Forecast | None = None  # of the demand; None: it was not looked at


@dataclass(frozen=True, slots=True)
class PoolHistory:
    """What hysteresis remembers of one pool."""

    votes: tuple[bool, ...] = ()  # whether each of the last ticks asked for more
    wishes: tuple[tuple[float, int], ...] = ()  # (time, wish) within the scale-down window
    watched_since_s: float = math.inf  # a scaler that just started knows no past, so it must not shrink on it
    last_up_s: float = -math.inf
    last_down_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class ScalerState:
    """Everything that one tick hands to the next. A new scaler starts with the default."""

    prefill: PoolHistory = field(default_factory=PoolHistory)
    decode: PoolHistory = field(default_factory=PoolHistory)
    hot_since_s: dict[str, float] = field(default_factory=dict)
    flip_votes: tuple[Pool, ...] = ()  # the pools that would have given a worker, tick by tick
    last_flip_s: float = -math.inf
    forecast: ForecastState = field(default_factory=ForecastState)

    def history(self, pool: Pool) -> PoolHistory:
        return self.prefill if pool is Pool.PREFILL else self.decode


def decide(
    snapshot: Snapshot, state: ScalerState, policy: Policy, model: CapacityModel
) -> tuple[Decision, ScalerState]:
    """The decision of this tick and the state for the next. It changes nothing by itself."""
    if not snapshot.has_heartbeat:
        return _hold(snapshot, "no fresh reports: unknown is not idle"), state
    if not snapshot.is_sane:
        return _hold(snapshot, "a signal is not a finite number", alerts=("bad_signal",)), state
    hot_since = _hot_workers(snapshot, state.hot_since_s, policy)
    state = replace(state, hot_since_s=hot_since)
    if faults := [worker for worker, since in hot_since.items() if snapshot.now_s - since >= policy.hot_worker_s]:
        reason = f"routing fault: {', '.join(sorted(faults))} queues far above the median"
        return _hold(snapshot, reason, alerts=("routing_fault",)), state

    alerts = _alerts(snapshot, policy, model)
    snapshot, state, expected = _look_ahead(snapshot, state, policy)
    if policy.budget.replicas:
        flipped = _flip(snapshot, state, policy, model)
        if flipped is not None:
            decision, state = flipped
            return replace(decision, alerts=alerts, forecast=expected), state
        state = _count_flip_vote(snapshot, state, policy, model)
    decisions = {}
    for pool in Pool:
        decisions[pool], history = _decide_pool(pool, snapshot, state.history(pool), policy, model)
        state = replace(state, prefill=history) if pool is Pool.PREFILL else replace(state, decode=history)
    return Decision(decisions[Pool.PREFILL], decisions[Pool.DECODE], alerts, expected), state


def _look_ahead(snapshot: Snapshot, state: ScalerState, policy: Policy) -> tuple[Snapshot, ScalerState, Forecast]:
    """The snapshot with the larger of what comes now and what is expected once a replica started now is ready."""
    settings, now_per_s = policy.forecast, snapshot.demand.requests_per_s
    seen = observe(state.forecast, snapshot.now_s, now_per_s, settings.horizon_s, settings.season_s)
    expected = forecast(seen, settings.method, settings.horizon_s)
    ahead = replace(snapshot.demand, requests_per_s=max(now_per_s, expected.requests_per_s))
    return replace(snapshot, demand=ahead), replace(state, forecast=seen), expected


def wish(pool: Pool, snapshot: Snapshot, last_up_s: float, policy: Policy, model: CapacityModel) -> tuple[int, str]:
    """Replicas that this tick asks for, within the pool's bounds, and why. `last_up_s`: when the pool last grew."""
    bounds = _bounds(pool, policy)
    if snapshot.is_idle:
        return bounds.min, "idle"
    need = (prefill_need if pool is Pool.PREFILL else decode_need)(snapshot.demand, model, policy)
    replicas, reason = need.replicas, need.reason
    if pressure := _pressure(pool, snapshot, policy):
        # Measured distress outranks the model: one more than serve now. A replica that is starting already answers it,
        # and the measure stays bad until it does, so counting from the whole pool would overshoot.
        with_pressure = len(snapshot.pool(pool).ready) + 1
        if _is_being_answered(pool, snapshot, last_up_s, policy, model):
            with_pressure = min(with_pressure, max(replicas + 1, snapshot.pool(pool).count(snapshot.now_s)))
        if with_pressure > replicas:
            replicas, reason = with_pressure, pressure
    return max(bounds.min, min(bounds.max, replicas)), reason


def _decide_pool(
    pool: Pool, snapshot: Snapshot, history: PoolHistory, policy: Policy, model: CapacityModel
) -> tuple[PoolDecision, PoolHistory]:
    now_s, signals = snapshot.now_s, snapshot.pool(pool)
    current = signals.count(now_s)
    wanted, reason = wish(pool, snapshot, history.last_up_s, policy, model)
    if policy.budget.replicas:
        # The pools share a budget: neither may grow into what the other one has.
        other = snapshot.pool(_other(pool)).count(now_s)
        wanted = min(wanted, max(_bounds(pool, policy).min, policy.budget.replicas - other))
    window = (*(entry for entry in history.wishes if entry[0] > now_s - policy.scale_down.window_s), (now_s, wanted))
    votes = (*history.votes, wanted > current)[-policy.scale_up.of_ticks :]
    since_s = min(history.watched_since_s, now_s)
    history = replace(history, votes=votes, wishes=window, watched_since_s=since_s)

    if wanted > current:
        if sum(votes) < policy.scale_up.ticks and current >= _bounds(pool, policy).min:
            waiting = f"{reason}; {sum(votes)} of {policy.scale_up.ticks} ticks"
            return PoolDecision(pool, Action.HOLD, 0, wanted, current, waiting), history
        step = max(1, math.floor(current * policy.scale_up.max_step))
        change = max(min(wanted - current, step), _bounds(pool, policy).min - current)
        return PoolDecision(pool, Action.UP, change, wanted, current, reason), replace(
            history, votes=(), last_up_s=now_s
        )
    largest = max(replicas for _, replicas in window)
    if largest < current:
        return _shrink(pool, snapshot, history, policy, model, largest)
    return PoolDecision(pool, Action.HOLD, 0, wanted, current, reason), history


def _shrink(
    pool: Pool, snapshot: Snapshot, history: PoolHistory, policy: Policy, model: CapacityModel, largest: int
) -> tuple[PoolDecision, PoolHistory]:
    """At most one ready replica fewer; replicas that are still starting go first and all at once."""
    now_s, signals = snapshot.now_s, snapshot.pool(pool)
    current = signals.count(now_s)

    def hold(reason: str) -> tuple[PoolDecision, PoolHistory]:
        return PoolDecision(pool, Action.HOLD, 0, largest, current, reason), history

    starting = sum(replica.deadline_s > now_s for replica in signals.starting)
    if starting:
        change = -min(starting, current - largest)
        decision = PoolDecision(pool, Action.CANCEL_STARTING, change, largest, current, "no longer needed")
        return decision, history
    if now_s - history.watched_since_s < policy.scale_down.window_s:
        return hold("not watched for long enough to shrink")
    if now_s - history.last_up_s < policy.scale_down.after_up_s:
        return hold("too soon after growing")
    if now_s - history.last_down_s < policy.scale_down.cooldown_s:
        return hold("too soon after shrinking")
    if signals.num_draining:
        return hold("a worker is still draining")
    if not _one_fewer_meets_slo(pool, snapshot, policy, model):
        return hold("one fewer would not meet the SLO with its margin")
    decision = PoolDecision(pool, Action.DOWN, -1, largest, current, f"at most {largest} were needed lately")
    return decision, replace(history, last_down_s=now_s)


def _one_fewer_meets_slo(pool: Pool, snapshot: Snapshot, policy: Policy, model: CapacityModel) -> bool:
    """Whether current - 1 replicas carry the demand with the policy's margin to spare."""
    if snapshot.demand.requests_per_s == 0:
        return True
    capacity = (prefill_capacity if pool is Pool.PREFILL else decode_capacity)(snapshot.demand, model, policy)
    remaining = snapshot.pool(pool).count(snapshot.now_s) - 1
    return snapshot.demand.requests_per_s <= remaining * capacity * (1 - policy.scale_down.margin)


def _pressure(pool: Pool, snapshot: Snapshot, policy: Policy) -> str:
    """Why this pool hurts its users now; empty if it does not."""
    stages = snapshot.ttft_p90_ms
    if pool is Pool.DECODE and snapshot.itl_p90_ms > policy.slo.itl_ms:
        return f"ITL p90 {snapshot.itl_p90_ms:.0f} ms is above the SLO of {policy.slo.itl_ms:.0f} ms"
    kv = [worker.kv_utilisation for worker in snapshot.decode.ready]
    if pool is Pool.DECODE and kv and statistics.fmean(kv) > policy.kv_utilisation:
        return f"KV is {statistics.fmean(kv):.0%} full"
    if not stages or sum(stages.values()) <= policy.slo.ttft_ms:
        return ""
    largest = max(stages, key=lambda stage: stages[stage])
    grows = {TtftStage.PREFILL_QUEUE: Pool.PREFILL, TtftStage.DECODE_WAIT: Pool.DECODE}.get(largest)
    if grows is not pool:
        return ""
    return f"TTFT p90 is above the SLO of {policy.slo.ttft_ms:.0f} ms, most of it {largest.value}"


def _is_being_answered(pool: Pool, snapshot: Snapshot, last_up_s: float, policy: Policy, model: CapacityModel) -> bool:
    """Whether distress may be what gathered before the pool grew: then it asks for one more than the model at most.

    The pool grew lately, or what waits for prefill is worked off soon with what there is. Until then, and as long as
    those who waited are in the percentiles, each tick looks as bad as the one before.
    """
    settle_s = SETTLE_HORIZONS * policy.forecast.horizon_s
    if snapshot.now_s - last_up_s < settle_s:
        return True
    if pool is Pool.DECODE:
        return False
    demand, signals = snapshot.demand, snapshot.prefill
    service_s = model.prefill_ms(demand.uncached_tokens_per_request, demand.cached_tokens_per_request) / 1000
    backlog_s = sum(worker.queue_ms for worker in signals.ready) / 1000 + demand.queued_requests * service_s
    spare = signals.count(snapshot.now_s) - demand.requests_per_s * service_s
    return spare > 0 and backlog_s / spare < settle_s


def _alerts(snapshot: Snapshot, policy: Policy, model: CapacityModel) -> tuple[str, ...]:
    """What no number of replicas mends, and what more than the policy allows would be needed for."""
    alerts = []
    stages = snapshot.ttft_p90_ms
    is_slow = bool(stages) and sum(stages.values()) > policy.slo.ttft_ms
    if (is_slow and stages.get(TtftStage.OWN_COMPUTE, 0.0) > policy.slo.ttft_ms) or _is_infeasible(
        snapshot, policy, model
    ):
        alerts.append("infeasible_slo")
    elif is_slow and max(stages, key=lambda stage: stages[stage]) is TtftStage.EXPOSED_TRANSFER:
        alerts.append("slow_transfer")
    if not snapshot.is_idle:
        for pool, need in ((Pool.PREFILL, prefill_need), (Pool.DECODE, decode_need)):
            if need(snapshot.demand, model, policy).replicas > _bounds(pool, policy).max:
                alerts.append(f"{pool.value}_at_maximum")
    return tuple(alerts)


def _is_infeasible(snapshot: Snapshot, policy: Policy, model: CapacityModel) -> bool:
    """Whether one prompt alone on a prefill worker, or one sequence alone on a decode worker, is too slow already."""
    demand = snapshot.demand
    if demand.requests_per_s == 0:
        return False
    alone_ms = model.prefill_ms(demand.uncached_tokens_per_request, demand.cached_tokens_per_request)
    return alone_ms > policy.slo.ttft_ms or model.tpot_ms(1, mean_context(demand)) > policy.slo.itl_ms


def _hot_workers(snapshot: Snapshot, before: dict[str, float], policy: Policy) -> dict[str, float]:
    """Since when each worker queues far above its pool's median. More replicas would not help it."""
    hot = {}
    for signals in (snapshot.prefill, snapshot.decode):
        if len(signals.ready) < 2:
            continue
        median = statistics.median(worker.queue_ms for worker in signals.ready)
        # A queue shorter than the SLO hurts nobody, whatever the median.
        limit = max(policy.hot_worker_factor * median, policy.slo.ttft_ms)
        for worker in signals.ready:
            if worker.queue_ms > limit:
                hot[worker.worker_id] = before.get(worker.worker_id, snapshot.now_s)
    return hot


def best_split(snapshot: Snapshot, policy: Policy, model: CapacityModel) -> tuple[int, int]:
    """Integers (P, D) within the budget and the bounds that carry the most requests a second."""
    per_prefill = prefill_capacity(snapshot.demand, model, policy)
    per_decode = decode_capacity(snapshot.demand, model, policy)
    budget = policy.budget.replicas
    splits = [
        (prefill, budget - prefill)
        for prefill in range(policy.prefill.min, policy.prefill.max + 1)
        if policy.decode.min <= budget - prefill <= policy.decode.max
    ]
    if not splits:
        return policy.prefill.min, policy.decode.min
    return max(splits, key=lambda split: min(split[0] * per_prefill, split[1] * per_decode))


def _flip_giver(snapshot: Snapshot, policy: Policy, model: CapacityModel) -> Pool | None:
    """The pool that should give one worker to the other; None when the split is good enough."""
    if snapshot.demand.requests_per_s == 0:
        return None
    prefill, decode = snapshot.prefill.count(snapshot.now_s), snapshot.decode.count(snapshot.now_s)
    if prefill + decode < policy.budget.replicas:
        return None  # there is room to grow: nobody has to give
    per_prefill = prefill_capacity(snapshot.demand, model, policy)
    per_decode = decode_capacity(snapshot.demand, model, policy)
    best = best_split(snapshot, policy, model)
    gain = min(best[0] * per_prefill, best[1] * per_decode) / min(prefill * per_prefill, decode * per_decode)
    if gain < 1 + policy.budget.flip_gain or best[0] == prefill:
        return None
    giver = Pool.DECODE if best[0] > prefill else Pool.PREFILL
    return giver if len(snapshot.pool(giver).ready) > _bounds(giver, policy).min else None


def _count_flip_vote(snapshot: Snapshot, state: ScalerState, policy: Policy, model: CapacityModel) -> ScalerState:
    giver = _flip_giver(snapshot, policy, model)
    votes = () if giver is None else (*(vote for vote in state.flip_votes if vote is giver), giver)
    return replace(state, flip_votes=votes[-policy.budget.flip_ticks :])


def _flip(
    snapshot: Snapshot, state: ScalerState, policy: Policy, model: CapacityModel
) -> tuple[Decision, ScalerState] | None:
    """A role change that enough ticks in a row agreed on; None if there is none to make now."""
    giver = _flip_giver(snapshot, policy, model)
    agreed = giver is not None and (*state.flip_votes, giver)[-policy.budget.flip_ticks :].count(giver)
    if giver is None or agreed < policy.budget.flip_ticks:
        return None
    if snapshot.now_s - state.last_flip_s < policy.budget.residence_s:
        return None
    best = dict(zip(Pool, best_split(snapshot, policy, model), strict=True))
    reason = f"{best[Pool.PREFILL]} prefill and {best[Pool.DECODE]} decode carry more"
    decisions = {}
    for pool in Pool:
        action, change = (Action.FLIP, -1) if pool is giver else (Action.HOLD, 0)
        current = snapshot.pool(pool).count(snapshot.now_s)
        decisions[pool] = PoolDecision(pool, action, change, best[pool], current, reason)
    next_state = replace(state, flip_votes=(), last_flip_s=snapshot.now_s)
    return Decision(decisions[Pool.PREFILL], decisions[Pool.DECODE]), next_state


def _hold(snapshot: Snapshot, reason: str, alerts: tuple[str, ...] = ()) -> Decision:
    held = {}
    for pool in Pool:
        current = snapshot.pool(pool).count(snapshot.now_s)
        held[pool] = PoolDecision(pool, Action.HOLD, 0, current, current, reason)
    return Decision(held[Pool.PREFILL], held[Pool.DECODE], alerts)


def _bounds(pool: Pool, policy: Policy) -> PoolBounds:
    return policy.prefill if pool is Pool.PREFILL else policy.decode


def _other(pool: Pool) -> Pool:
    return Pool.DECODE if pool is Pool.PREFILL else Pool.PREFILL
