"""One tick's snapshot from three sources: routers' records, workers' records, and the fleet's own states.

    Redis ── router records ──> LoadMeter ──> demand, percentiles     (offered_load.py)
          ── worker records ──> membership view ──> loads
    fleet ── starting, draining, failed

When Redis or every router is silent, or a worker that runs is missing, nothing is known and the snapshot says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tandem.v1 import common_pb2, membership_pb2

from cluster.identity import WorkerId
from deploy.autoscaler.capacity import CapacityModel
from deploy.autoscaler.fleet import FleetState, FleetWorker
from deploy.autoscaler.offered_load import LoadMeter
from deploy.autoscaler.policy import Policy
from deploy.autoscaler.signals import Demand, Pool, PoolSignals, Snapshot, StartingReplica, WorkerLoad

# Arrivals of this many ticks count: a single one holds little.
WINDOW_TICKS = 3
# A worker that became ready says so in Redis at once; after this long something is wrong.
ANNOUNCE_TIMEOUT_S = 5.0
NO_DEMAND = Demand(0.0, 0.0, 0.0, 0.0)
_POOLS = {common_pb2.WORKER_ROLE_PREFILL: Pool.PREFILL, common_pb2.WORKER_ROLE_DECODE: Pool.DECODE}


@dataclass(frozen=True, slots=True)
class Reports:
    """What Redis held at this tick. `is_fresh` False: it did not answer."""

    is_fresh: bool
    routers: Sequence[membership_pb2.RouterRecord] = ()
    workers: Mapping[WorkerId, membership_pb2.WorkerRecord] | None = None


class ReportReader(Protocol):
    async def read(self) -> Reports: ...


class Sampler:
    """Owned by the autoscaler."""

    def __init__(self, prior: CapacityModel) -> None:
        self.model = prior
        self._meter = LoadMeter()
        self._ours: set[str] = set()  # every name that the fleet ever had: names are not used twice

    def sample(self, now_s: float, fleet: Sequence[FleetWorker], policy: Policy, reports: Reports) -> Snapshot:
        """The snapshot of this tick; `model` is brought up to date with it."""
        workers = self._living(fleet, reports.workers or {})
        load = self._meter.read(now_s, WINDOW_TICKS * policy.tick_s, reports.routers) if reports.routers else None
        self._learn(reports, workers)
        is_known = reports.is_fresh and load is not None and not _missing(now_s, fleet, workers)
        return Snapshot(
            now_s=now_s,
            has_heartbeat=is_known,
            demand=NO_DEMAND if load is None else load.demand,
            prefill=self._signals(Pool.PREFILL, fleet, policy, workers),
            decode=self._signals(Pool.DECODE, fleet, policy, workers),
            ttft_p90_ms={} if load is None else dict(load.ttft_p90_ms),
            itl_p90_ms=0.0 if load is None else load.itl_p90_ms,
        )

    def _living(
        self, fleet: Sequence[FleetWorker], workers: Mapping[WorkerId, membership_pb2.WorkerRecord]
    ) -> dict[WorkerId, membership_pb2.WorkerRecord]:
        """Without those that have ended and whose last record lingers: they are no capacity any more."""
        names = {worker.worker_id for worker in fleet}
        self._ours |= names
        return {name: record for name, record in workers.items() if name in names or name not in self._ours}

    def _learn(self, reports: Reports, workers: Mapping[WorkerId, membership_pb2.WorkerRecord]) -> None:
        """Coefficients as the routers have fitted them, and the KV that a decode worker really has."""
        for router in reports.routers:
            if len(router.prefill_coefficients) == 3:
                c0, c1, c2 = router.prefill_coefficients
                self.model = replace(self.model, c0_ms=c0, c1_ms=c1, c2_ms=c2)
            if len(router.decode_coefficients) == 3:
                alpha, beta, gamma = router.decode_coefficients
                self.model = replace(self.model, alpha_ms=alpha, beta_ms=beta, gamma_ms=gamma)
        capacities = [
            record.load.total_blocks * record.layout.block_tokens
            for record in workers.values()
            if record.identity.role == common_pb2.WORKER_ROLE_DECODE
        ]
        if capacities and min(capacities) > 0:
            self.model = replace(self.model, kv_tokens=min(capacities))

    def _signals(
        self,
        pool: Pool,
        fleet: Sequence[FleetWorker],
        policy: Policy,
        workers: Mapping[WorkerId, membership_pb2.WorkerRecord],
    ) -> PoolSignals:
        ours = {worker.worker_id: worker for worker in fleet if worker.pool is pool}
        ready = [
            self._load(record)
            for worker_id, record in sorted(workers.items())
            if _POOLS.get(record.identity.role) is pool
            and record.ready
            and not record.load.draining
            and (worker_id not in ours or ours[worker_id].state is FleetState.READY)
        ]
        reported = {load.worker_id for load in ready}
        # Ready, and its first report is on its way.
        ready += [
            WorkerLoad(worker.worker_id, 0.0)
            for worker in ours.values()
            if worker.state is FleetState.READY and worker.worker_id not in reported
        ]
        return PoolSignals(
            ready=tuple(ready),
            starting=tuple(
                StartingReplica(worker.worker_id, worker.since_s + policy.start_timeout_s)
                for worker in ours.values()
                if worker.state is FleetState.STARTING
            ),
            num_draining=sum(worker.state is FleetState.DRAINING for worker in ours.values()),
        )

    def _load(self, record: membership_pb2.WorkerRecord) -> WorkerLoad:
        load = record.load
        waiting_ms = self.model.prefill_ms(load.waiting_tokens, 0) if load.waiting_tokens else 0.0
        return WorkerLoad(
            worker_id=record.identity.worker_id,
            queue_ms=max(load.queue_ms, waiting_ms),
            kv_utilisation=1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0,
            running=load.running_requests + load.waiting_requests,
        )


def _missing(
    now_s: float, fleet: Sequence[FleetWorker], workers: Mapping[WorkerId, membership_pb2.WorkerRecord]
) -> bool:
    """Whether a worker runs and has long been silent: then the others' silence may be the same fault."""
    return any(
        worker.state is FleetState.READY
        and worker.worker_id not in workers
        and now_s - worker.since_s > ANNOUNCE_TIMEOUT_S
        for worker in fleet
    )
