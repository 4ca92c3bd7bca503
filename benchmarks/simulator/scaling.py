"""The real autoscaler on a virtual clock: its signals from the simulation, its decisions into the fleet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from benchmarks.request_record import Outcome
from benchmarks.simulator.event_queue import EventQueue
from benchmarks.simulator.fleet import Fleet
from benchmarks.simulator.request_life import RequestLife
from benchmarks.simulator.simulation_settings import SimulationSettings
from deploy.autoscaler.decide import Action, Decision, PoolDecision, ScalerState, decide
from deploy.autoscaler.policy import Policy
from deploy.autoscaler.signals import Demand, Pool, PoolSignals, Snapshot, StartingReplica, TtftStage, WorkerLoad
from router.worker_state import Role

# Demand and latencies of the last minute: one tick alone is a handful of requests.
WINDOW_S = 60.0
ROLE_OF = {Pool.PREFILL: Role.PREFILL, Pool.DECODE: Role.DECODE}


@dataclass(frozen=True, slots=True)
class ScalingStep:
    """A decision that changed something."""

    time_s: float
    decision: PoolDecision


class Scaling:
    """Owned by the simulation; `tick` every `tick_s`."""

    def __init__(self, settings: SimulationSettings, events: EventQueue, fleet: Fleet) -> None:
        if settings.policy is None:
            raise ValueError("scaling needs a policy")
        self.steps: list[ScalingStep] = []
        self._policy: Policy = settings.policy
        self._settings = settings
        self._events = events
        self._fleet = fleet
        self._state = ScalerState()
        self._arrived: deque[tuple[float, RequestLife]] = deque()
        self._ended: deque[tuple[float, RequestLife]] = deque()

    @property
    def tick_s(self) -> float:
        return self._policy.tick_s

    def arrived(self, life: RequestLife) -> None:
        self._arrived.append((self._events.now_s, life))

    def ended(self, life: RequestLife) -> None:
        self._ended.append((self._events.now_s, life))

    def tick(self) -> None:
        for seen in (self._arrived, self._ended):
            while seen and seen[0][0] < self._events.now_s - WINDOW_S:
                seen.popleft()
        decision, self._state = decide(self.snapshot(), self._state, self._policy, self._settings.model)
        if not self._policy.dry_run:
            self._carry_out(decision)

    def snapshot(self) -> Snapshot:
        good = [life for _, life in self._ended if life.outcome is Outcome.OK]
        stages = [life.stages for life in good]
        columns = {
            TtftStage.ROUTE: [stage.route for stage in stages],
            TtftStage.PREFILL_QUEUE: [stage.queue for stage in stages],
            TtftStage.OWN_COMPUTE: [stage.compute for stage in stages],
            TtftStage.EXPOSED_TRANSFER: [stage.transfer for stage in stages],
            TtftStage.DECODE_WAIT: [stage.wait for stage in stages],
        }
        itl = [
            (life.chunk_times_s[-1] - life.chunk_times_s[0]) / (life.num_generated - 1) * 1e3
            for life in good
            if life.num_generated > 1
        ]
        return Snapshot(
            now_s=self._events.now_s,
            has_heartbeat=True,
            demand=self._demand(good),
            prefill=self._pool(Pool.PREFILL),
            decode=self._pool(Pool.DECODE),
            ttft_p90_ms={stage: float(np.quantile(values, 0.9)) for stage, values in columns.items() if values},
            itl_p90_ms=float(np.quantile(itl, 0.9)) if itl else 0.0,
        )

    def _demand(self, good: list[RequestLife]) -> Demand:
        window_s = min(WINDOW_S, max(self._events.now_s, 1e-9))
        arrived = [life for _, life in self._arrived]
        prompts = [life.arrival.num_prompt_tokens for life in arrived]
        num_cached = sum(life.cached_tokens or 0 for life in good)
        cached_share = num_cached / max(1, sum(life.arrival.num_prompt_tokens for life in good))
        mean_prompt = float(np.mean(prompts)) if prompts else 0.0
        outputs = [life.num_generated for life in good] or [life.arrival.output_tokens for life in arrived]
        return Demand(
            requests_per_s=len(arrived) / window_s,
            uncached_tokens_per_request=mean_prompt * (1 - cached_share),
            cached_tokens_per_request=mean_prompt * cached_share,
            output_tokens_per_request=float(np.mean(outputs)) if outputs else 0.0,
        )

    def _pool(self, pool: Pool) -> PoolSignals:
        role = ROLE_OF[pool]
        ready = []
        for worker in self._fleet.workers(role):
            load = worker.state.load
            used = 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
            queue_ms = self._settings.model.c1_ms * load.waiting_tokens
            ready.append(WorkerLoad(worker.state.worker_id, queue_ms, used, load.running_requests))
        starting = tuple(
            StartingReplica(one.worker_id, one.deadline_s) for one in self._fleet.starting if one.role is role
        )
        return PoolSignals(tuple(ready), starting, self._fleet.num_draining(role))

    def _carry_out(self, decision: Decision) -> None:
        for pool_decision in (decision.prefill, decision.decode):
            role = ROLE_OF[pool_decision.pool]
            match pool_decision.action:
                case Action.UP:
                    for _ in range(pool_decision.change):
                        self._fleet.start(role, self._settings.start_delay_s, self._policy.start_timeout_s)
                case Action.CANCEL_STARTING:
                    for _ in range(-pool_decision.change):
                        self._fleet.cancel_starting(role)
                case Action.DOWN:
                    for _ in range(-pool_decision.change):
                        self._fleet.drain(role)
                case Action.FLIP:
                    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
                    self._fleet.drain(
                        role,
                        then=lambda other=other: self._fleet.start(  # type: ignore[misc]
                            other, self._settings.start_delay_s, self._policy.start_timeout_s
                        ),
                    )
                case Action.HOLD:
                    continue
            self.steps.append(ScalingStep(self._events.now_s, pool_decision))
