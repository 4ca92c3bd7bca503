"""What counts as known, as capacity and as gone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tandem.v1 import common_pb2, handoff_pb2, membership_pb2, worker_pb2

from cluster.identity import WorkerId
from deploy.autoscaler.fleet import FleetState, FleetWorker
from deploy.autoscaler.policy import Policy
from deploy.autoscaler.sampler import ANNOUNCE_TIMEOUT_S, Reports, Sampler
from deploy.autoscaler.signals import Pool, Snapshot
from tests.deploy.autoscaler.fleet import MODEL

POLICY = Policy()


def ours(worker_id: str, state: FleetState = FleetState.READY, since_s: float = 0.0) -> FleetWorker:
    return FleetWorker(worker_id, Pool(worker_id.partition("-")[0]), state, since_s)


def reports(*worker_ids: str, is_fresh: bool = True, **load: int) -> Reports:
    return Reports(
        is_fresh,
        [membership_pb2.RouterRecord(router_id="r")],
        {WorkerId(name): worker(name, **load) for name in worker_ids},
    )


def worker(worker_id: str, **load: int) -> membership_pb2.WorkerRecord:
    role = common_pb2.WORKER_ROLE_PREFILL if worker_id.startswith("prefill") else common_pb2.WORKER_ROLE_DECODE
    return membership_pb2.WorkerRecord(
        identity=common_pb2.WorkerIdentity(worker_id=worker_id, incarnation="1", role=role),
        ready=True,
        layout=handoff_pb2.KvLayout(block_tokens=16),
        load=worker_pb2.LoadReport(**{"total_blocks": 100, "free_blocks": 100, **load}),  # type: ignore[arg-type]
    )


def sample(*fleet: FleetWorker, seen: Reports, now_s: float = 100.0, sampler: Sampler | None = None) -> Snapshot:
    """The second tick's snapshot: the first one has nothing to compare with."""
    sampler = sampler or Sampler(MODEL)
    sampler.sample(now_s - POLICY.tick_s, fleet, POLICY, seen)
    return sampler.sample(now_s, fleet, POLICY, seen)


def names(snapshot: Snapshot, pool: Pool) -> list[str]:
    return [load.worker_id for load in snapshot.pool(pool).ready]


def test_rt50_silent_redis_and_silent_routers_are_unknown_not_idle() -> None:
    fleet = (ours("prefill-0"), ours("decode-0"))
    both = ("prefill-0", "decode-0")
    assert sample(*fleet, seen=reports(*both)).has_heartbeat
    assert not sample(*fleet, seen=reports(*both, is_fresh=False)).has_heartbeat
    no_router = replace(reports(*both), routers=())
    assert not sample(*fleet, seen=no_router).has_heartbeat


def test_f11_an_emptied_redis_is_unknown_until_our_workers_are_back_in_it() -> None:
    fleet = (ours("prefill-0"), ours("decode-0"))
    assert not sample(*fleet, seen=reports("decode-0")).has_heartbeat
    just_ready = (ours("prefill-0", since_s=100.0 - ANNOUNCE_TIMEOUT_S / 2), ours("decode-0"))
    snapshot = sample(*just_ready, seen=reports("decode-0"))
    assert snapshot.has_heartbeat
    assert names(snapshot, Pool.PREFILL) == ["prefill-0"]


def test_rt55_the_lingering_record_of_a_worker_that_ended_is_no_capacity() -> None:
    sampler = Sampler(MODEL)
    sample(ours("decode-0"), ours("decode-1"), seen=reports("decode-0", "decode-1"), sampler=sampler)
    snapshot = sample(ours("decode-0"), seen=reports("decode-0", "decode-1"), now_s=110.0, sampler=sampler)
    assert names(snapshot, Pool.DECODE) == ["decode-0"]


def test_rt52_a_worker_that_somebody_added_by_hand_counts() -> None:
    snapshot = sample(ours("decode-0"), seen=reports("decode-0", "decode-byhand"))
    assert names(snapshot, Pool.DECODE) == ["decode-0", "decode-byhand"]


def test_starting_draining_and_failed_workers_are_told_apart() -> None:
    fleet = (
        ours("decode-0"),
        ours("decode-1", FleetState.STARTING, since_s=90.0),
        ours("decode-2", FleetState.DRAINING),
        ours("decode-3", FleetState.FAILED),
    )
    snapshot = sample(*fleet, seen=reports("decode-0", "decode-2"))
    assert names(snapshot, Pool.DECODE) == ["decode-0"]
    (starting,) = snapshot.decode.starting
    assert (starting.worker_id, starting.deadline_s) == ("decode-1", 90.0 + POLICY.start_timeout_s)
    assert snapshot.decode.num_draining == 1
    assert snapshot.decode.count(100.0) == 2


def test_loads_are_queue_kv_and_requests_and_the_routers_timing_is_used() -> None:
    seen = reports("prefill-0", free_blocks=25, waiting_tokens=1000, running_requests=2, waiting_requests=1)
    router = membership_pb2.RouterRecord(router_id="r", prefill_coefficients=[10.0, 0.5, 0.0])
    sampler = Sampler(MODEL)
    (load,) = sample(ours("prefill-0"), seen=replace(seen, routers=[router]), sampler=sampler).prefill.ready
    assert load.queue_ms == pytest.approx(510.0)
    assert (load.kv_utilisation, load.running) == (0.75, 3)
    assert sampler.model.c1_ms == 0.5


def test_the_smallest_decode_worker_says_how_much_kv_one_holds() -> None:
    sampler = Sampler(MODEL)
    sample(ours("decode-0"), seen=reports("decode-0"), sampler=sampler)
    assert sampler.model.kv_tokens == 1600
