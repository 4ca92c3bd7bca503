"""Carries a decision out on a fleet: which worker goes, and when a start is tried again after one that failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.autoscaler.decide import Action, Decision, PoolDecision
from deploy.autoscaler.fleet import Fleet, FleetState, FleetWorker
from deploy.autoscaler.policy import Policy
from deploy.autoscaler.signals import Pool, Snapshot

# After a worker that could not start, the next one of its pool waits, twice as long each time.
FIRST_RETRY_S = 15.0
MAX_RETRY_S = 600.0


@dataclass(slots=True)
class _Failures:
    """Starts of one pool that failed in a row."""

    count: int = 0
    retry_at_s: float = 0.0


class Actuator:
    """Owned by the autoscaler."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._failures = {pool: _Failures() for pool in Pool}

    def obey(self, decision: Decision, snapshot: Snapshot, workers: Sequence[FleetWorker], policy: Policy) -> list[str]:
        """What was done, a line each. A dry run says what would be done."""
        if policy.dry_run:
            return [f"dry run: {_in_words(one)}" for one in _both(decision) if one.action is not Action.HOLD]
        done = self._clear_up(snapshot, workers, policy)
        for one in _both(decision):
            done += self._carry_out(one, snapshot, workers)
        return done

    def _clear_up(self, snapshot: Snapshot, workers: Sequence[FleetWorker], policy: Policy) -> list[str]:
        """Workers that never came make room: they failed, or their time is over."""
        done = []
        for worker in workers:
            failures = self._failures[worker.pool]
            is_late = worker.state is FleetState.STARTING and snapshot.now_s >= worker.since_s + policy.start_timeout_s
            if worker.state is FleetState.FAILED or is_late:
                self._fleet.stop(worker.worker_id)
                failures.count += 1
                wait_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2 ** (failures.count - 1))
                failures.retry_at_s = snapshot.now_s + wait_s
                why = "was not ready in time" if is_late else "could not start"
                done.append(f"gave {worker.worker_id} up: it {why}; the next start waits {wait_s:.0f} s")
            elif worker.state is FleetState.READY and worker.since_s > failures.retry_at_s:
                failures.count = 0
        return done

    def _carry_out(self, one: PoolDecision, snapshot: Snapshot, workers: Sequence[FleetWorker]) -> list[str]:
        match one.action:
            case Action.UP:
                return self._grow(one, snapshot)
            case Action.CANCEL_STARTING:
                return self._cancel(one, workers)
            case Action.DOWN:
                return self._shrink(one, snapshot, workers)
            case Action.FLIP:
                return self._flip(one, snapshot, workers)
            case Action.HOLD:
                return []

    def _grow(self, one: PoolDecision, snapshot: Snapshot) -> list[str]:
        failures = self._failures[one.pool]
        if failures.count and snapshot.now_s < failures.retry_at_s:
            wait_s = failures.retry_at_s - snapshot.now_s
            return [f"no {one.pool.value} worker started: {failures.count} failed, next try in {wait_s:.0f} s"]
        names = [self._fleet.start(one.pool) for _ in range(one.change)]
        return [f"starting {', '.join(names)}: {one.reason}"]

    def _cancel(self, one: PoolDecision, workers: Sequence[FleetWorker]) -> list[str]:
        """The newest first: they are furthest from serving."""
        starting = [worker for worker in workers if worker.pool is one.pool and worker.state is FleetState.STARTING]
        starting.sort(key=lambda worker: worker.since_s, reverse=True)
        names = [worker.worker_id for worker in starting[: -one.change]]
        for name in names:
            self._fleet.stop(name)
        return [f"no longer starting {', '.join(names)}: {one.reason}"] if names else []

    def _shrink(self, one: PoolDecision, snapshot: Snapshot, workers: Sequence[FleetWorker]) -> list[str]:
        victim = _least_busy(one.pool, snapshot, workers)
        if victim is None:
            return [f"no {one.pool.value} worker of ours could be stopped"]
        self._fleet.stop(victim)
        return [f"draining {victim}: {one.reason}"]

    def _flip(self, one: PoolDecision, snapshot: Snapshot, workers: Sequence[FleetWorker]) -> list[str]:
        victim = _least_busy(one.pool, snapshot, workers)
        if victim is None:
            return [f"no {one.pool.value} worker of ours could change its role"]
        other = Pool.DECODE if one.pool is Pool.PREFILL else Pool.PREFILL
        name = self._fleet.flip(victim, other)
        return [f"draining {victim}, then {name} in its place: {one.reason}"]


def _least_busy(pool: Pool, snapshot: Snapshot, workers: Sequence[FleetWorker]) -> str | None:
    """Of our ready workers the one with the fewest requests; among equals the newest, whose cache is smallest."""
    running = {load.worker_id: load.running for load in snapshot.pool(pool).ready}
    ours = [
        worker
        for worker in workers
        if worker.pool is pool and worker.state is FleetState.READY and worker.worker_id in running
    ]
    if not ours:
        return None
    return min(ours, key=lambda worker: (running[worker.worker_id], -worker.since_s)).worker_id


def _both(decision: Decision) -> tuple[PoolDecision, PoolDecision]:
    return decision.prefill, decision.decode


def _in_words(one: PoolDecision) -> str:
    return f"{one.pool.value} {one.action.value} {one.change:+d} of {one.current}: {one.reason}"
