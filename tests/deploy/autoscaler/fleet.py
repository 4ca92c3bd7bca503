"""A fleet on a virtual clock: it obeys the decisions, starts and drains replicas in time, and never sleeps."""

from __future__ import annotations

from dataclasses import dataclass, field

from deploy.autoscaler.capacity import CapacityModel
from deploy.autoscaler.decide import Action, Decision, PoolDecision, ScalerState, decide
from deploy.autoscaler.policy import Policy
from deploy.autoscaler.signals import Demand, Pool, PoolSignals, Snapshot, StartingReplica, TtftStage, WorkerLoad

# A prefill worker reads a 1,000-token prompt in 100 ms; a decode worker gives 32 sequences a token in 42 ms.
MODEL = CapacityModel(
    c0_ms=0.0,
    c1_ms=0.1,
    c2_ms=0.0,
    alpha_ms=10.0,
    beta_ms=1.0,
    gamma_ms=0.0,
    kv_tokens=100_000,
    max_batch=32,
)


def demand(requests_per_s: float, uncached: float = 1000.0, output: float = 100.0, queued: int = 0) -> Demand:
    return Demand(requests_per_s, uncached, 0.0, output, queued)


def workers(prefix: str, count: int, queue_ms: float = 0.0, kv_utilisation: float = 0.0) -> tuple[WorkerLoad, ...]:
    return tuple(WorkerLoad(f"{prefix}{index}", queue_ms, kv_utilisation) for index in range(count))


@dataclass
class Fleet:
    """Replica counts by pool under a policy; `tick` shows them to `decide` and does what it says."""

    policy: Policy
    counts: dict[Pool, int]
    start_s: float = 30.0
    model: CapacityModel = MODEL
    now_s: float = 0.0
    state: ScalerState = field(default_factory=ScalerState)
    starting: dict[Pool, list[float]] = field(default_factory=lambda: {pool: [] for pool in Pool})
    decisions: list[Decision] = field(default_factory=list)

    def tick(
        self,
        load: Demand,
        *,
        has_heartbeat: bool = True,
        ttft: dict[TtftStage, float] | None = None,
        itl_ms: float = 0.0,
        queue_ms: float = 0.0,
        kv_utilisation: float = 0.0,
    ) -> Decision:
        self.now_s += self.policy.tick_s
        for pool in Pool:
            self.counts[pool] += sum(ready_at <= self.now_s for ready_at in self.starting[pool])
            self.starting[pool] = [ready_at for ready_at in self.starting[pool] if ready_at > self.now_s]
        snapshot = Snapshot(
            self.now_s,
            has_heartbeat,
            load,
            prefill=self._signals(Pool.PREFILL, queue_ms, 0.0),
            decode=self._signals(Pool.DECODE, 0.0, kv_utilisation),
            ttft_p90_ms=ttft or {},
            itl_p90_ms=itl_ms,
        )
        decision, self.state = decide(snapshot, self.state, self.policy, self.model)
        self.decisions.append(decision)
        for pool, pool_decision in ((Pool.PREFILL, decision.prefill), (Pool.DECODE, decision.decode)):
            self._obey(pool, pool_decision)
        return decision

    def total(self, pool: Pool) -> int:
        return self.counts[pool] + len(self.starting[pool])

    def _signals(self, pool: Pool, queue_ms: float, kv_utilisation: float) -> PoolSignals:
        starting = tuple(
            StartingReplica(f"new{index}", self.now_s + self.policy.start_timeout_s)
            for index in range(len(self.starting[pool]))
        )
        return PoolSignals(workers(pool.value[0], self.counts[pool], queue_ms, kv_utilisation), starting)

    def _obey(self, pool: Pool, decision: PoolDecision) -> None:
        if decision.action is Action.UP:
            self.starting[pool] += [self.now_s + self.start_s] * decision.change
        elif decision.action is Action.CANCEL_STARTING:
            del self.starting[pool][decision.change :]
        elif decision.action is Action.DOWN:
            self.counts[pool] += decision.change
        elif decision.action is Action.FLIP:
            other = Pool.DECODE if pool is Pool.PREFILL else Pool.PREFILL
            self.counts[pool] -= 1
            self.starting[other].append(self.now_s + self.start_s)
