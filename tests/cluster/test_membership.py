"""Registration and view against a real Redis that is killed, emptied, stopped and started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from tandem.v1 import common_pb2, membership_pb2

from cluster.identity import Incarnation, WorkerId, new_incarnation
from cluster.membership import MembershipView, Registration, read_router_records, router_key, worker_key
from cluster.membership_state import ChangeKind, MembershipChange
from tests.cluster.conftest import RedisServer

pytestmark = pytest.mark.cluster

HEARTBEAT_S = 0.5
A = WorkerId("decode-0")


class Worker:
    """A registration with the record that it sends."""

    def __init__(self, server: RedisServer, worker_id: str = A) -> None:
        identity = common_pb2.WorkerIdentity(worker_id=worker_id, incarnation=new_incarnation())
        self.record = membership_pb2.WorkerRecord(identity=identity, control_address="unix:/x")
        self.registration = Registration(server.client(), worker_key(worker_id), self._read, HEARTBEAT_S)

    def _read(self) -> membership_pb2.WorkerRecord:
        copy = membership_pb2.WorkerRecord()
        copy.CopyFrom(self.record)
        return copy


@asynccontextmanager
async def registered(server: RedisServer) -> AsyncIterator[Worker]:
    worker = Worker(server)
    worker.registration.start()
    yield worker
    await worker.registration.stop()


@asynccontextmanager
async def viewing(server: RedisServer) -> AsyncIterator[tuple[MembershipView, list[MembershipChange]]]:
    changes: list[MembershipChange] = []
    view = MembershipView(server.client(), changes.append)
    view.start()
    yield view, changes
    await view.stop()


async def until(is_reached: Callable[[], bool], timeout_s: float = 60.0) -> float:
    """Seconds until it holds; fails after the timeout."""
    started = time.monotonic()
    while not is_reached():
        if time.monotonic() - started > timeout_s:
            pytest.fail(f"not reached within {timeout_s} s")
        await asyncio.sleep(0.01)
    return time.monotonic() - started


async def test_worker_appears_and_withdraws(redis_server: RedisServer) -> None:
    async with viewing(redis_server) as (view, changes):
        async with registered(redis_server):
            await until(lambda: A in view.workers)
            assert view.workers[A].control_address == "unix:/x"
        await until(lambda: A not in view.workers)
        assert [change.kind for change in changes if change.kind is not ChangeKind.UPDATED] == [
            ChangeKind.JOINED,
            ChangeKind.LEFT,
        ]


async def test_announce_does_not_wait_for_the_heartbeat(redis_server: RedisServer) -> None:
    worker = Worker(redis_server)
    worker.registration = Registration(redis_server.client(), worker_key(A), worker._read, heartbeat_s=60)
    async with viewing(redis_server) as (view, _):
        worker.registration.start()
        await until(lambda: A in view.workers)
        worker.record.ready = True
        worker.registration.announce()
        await until(lambda: view.workers[A].ready)
        await worker.registration.stop()


async def test_f10_killed_and_emptied_redis_loses_nobody_and_is_refilled(redis_server: RedisServer) -> None:
    async with viewing(redis_server) as (view, changes), registered(redis_server):
        await until(lambda: A in view.workers)
        await redis_server.kill()
        await until(lambda: not view.is_redis_healthy)
        assert A in view.workers
        seq_before = view.workers[A].heartbeat_seq
        await redis_server.start()
        await until(lambda: view.workers[A].heartbeat_seq > seq_before)
        assert ChangeKind.LEFT not in {change.kind for change in changes}


async def test_f11_flushed_redis_is_refilled_within_a_heartbeat(redis_server: RedisServer) -> None:
    async with viewing(redis_server) as (view, changes), registered(redis_server):
        await until(lambda: A in view.workers)
        await redis_server.flush()
        seq_before = view.workers[A].heartbeat_seq
        await until(lambda: view.workers[A].heartbeat_seq > seq_before)
        assert ChangeKind.LEFT not in {change.kind for change in changes}


async def test_f13_hung_redis_blocks_neither_the_view_nor_the_event_loop(redis_server: RedisServer) -> None:
    async with viewing(redis_server) as (view, changes), registered(redis_server):
        await until(lambda: A in view.workers)
        redis_server.suspend()
        try:
            await until(lambda: not view.is_redis_healthy)
            lags_s = [await loop_lag_s() for _ in range(100)]
            assert sorted(lags_s)[98] < 0.4  # a command that the loop waited for would cost its 0.5 s
            assert A in view.workers
        finally:
            redis_server.resume()
        await until(lambda: view.is_redis_healthy)
        assert ChangeKind.LEFT not in {change.kind for change in changes}


async def test_f16_two_views_of_which_one_lost_redis_agree_afterwards(redis_server: RedisServer) -> None:
    async with (
        viewing(redis_server) as (first, _),
        viewing(redis_server) as (second, _),
        registered(redis_server) as worker,
    ):
        await until(lambda: A in first.workers and A in second.workers)
        second.peer_gone(A, Incarnation(worker.record.identity.incarnation))
        assert A in first.workers
        assert A not in second.workers
        worker.record.identity.incarnation = new_incarnation()
        await until(lambda: dict(first.workers) == dict(second.workers) and A in second.workers)


async def test_restarted_worker_is_seen_as_another_peer(redis_server: RedisServer) -> None:
    async with viewing(redis_server) as (view, changes), registered(redis_server) as worker:
        await until(lambda: A in view.workers)
        worker.record.identity.incarnation = new_incarnation()
        await until(lambda: ChangeKind.RESTARTED in {change.kind for change in changes})


async def test_view_starts_without_redis_and_without_waiting(redis_server: RedisServer) -> None:
    await redis_server.kill()
    async with viewing(redis_server) as (view, _):
        await asyncio.wait_for(view.wait_for_first_poll(), 60)
        assert not view.workers
        assert not view.is_redis_healthy
        assert view.age_s is None


async def test_s_b14_server_with_known_faults_is_named_at_first_contact(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The embedded server has none that is known today: this one's version becomes faulty.
    fixed_by_branch = {"redis": {}, "valkey": {(9, 1): (9, 1, 99)}}
    monkeypatch.setattr("cluster.redis_version._LUA_FIXED", fixed_by_branch)
    async with viewing(redis_server) as (view, _):
        await until(lambda: view.age_s is not None)
    assert any("CVE-2025-49844" in getattr(record, "faults", "") for record in caplog.records)


async def test_unreadable_record_is_skipped(redis_server: RedisServer) -> None:
    await redis_server.client().run(lambda redis: redis.set(b"tandem:worker:odd", b"\xff\xff"))
    async with viewing(redis_server) as (view, _), registered(redis_server):
        await until(lambda: A in view.workers)
        assert list(view.workers) == [A]


async def loop_lag_s() -> float:
    started = time.monotonic()
    await asyncio.sleep(0.005)
    return time.monotonic() - started - 0.005


async def test_a_routers_record_is_read_while_it_lives_and_gone_afterwards(redis_server: RedisServer) -> None:
    redis = redis_server.client()
    record = membership_pb2.RouterRecord(router_id="router-0", prompts_arrived=7)
    registration = Registration(redis_server.client(), router_key("router-0"), lambda: record, HEARTBEAT_S)
    registration.start()
    started = time.monotonic()
    while not (records := await read_router_records(redis)):
        assert time.monotonic() - started < 60
        await asyncio.sleep(0.01)
    assert (records[0].router_id, records[0].prompts_arrived) == ("router-0", 7)
    assert records[0].heartbeat_seq >= 1
    await registration.stop()
    assert await read_router_records(redis) == []
    await redis.close()
