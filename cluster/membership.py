"""Workers announce themselves in Redis; routers read who is there. Soft state: nobody waits for it.

    worker: Registration   ── SET tandem:worker:<id> <record> PX ttl, at every heartbeat ──> Redis
    router: MembershipView <── SCAN + MGET, twice a heartbeat ───────────────────────────── Redis
    router: Registration   ── SET tandem:router:<id>, the load offered to it; the autoscaler reads it ──> Redis

An emptied Redis is full again after one heartbeat. A lost one changes nothing: the view keeps its last known set.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message
from tandem.v1 import membership_pb2

from cluster.ended_tasks import end_tasks
from cluster.identity import Incarnation, WorkerId
from cluster.membership_state import MembershipChange, MembershipState
from cluster.redis_client import RedisClient, RedisUnavailable
from cluster.redis_version import known_faults

WORKER_KEY_PREFIX = b"tandem:worker:"
ROUTER_KEY_PREFIX = b"tandem:router:"
# A record outlives two lost heartbeats.
TTL_HEARTBEATS = 3
POLL_INTERVAL_S = 0.5
# Spreads the heartbeats of workers that a launcher started in the same instant.
HEARTBEAT_JITTER = 0.1

Record = TypeVar("Record", bound=Message)

_log = logging.getLogger(__name__)


class HeartbeatRecord(Protocol):
    """`WorkerRecord` and `RouterRecord`."""

    heartbeat_seq: int

    def SerializeToString(self) -> bytes: ...


class Registration:
    """Keeps a process's record alive in Redis. Owned by that process: `start`, later `stop`."""

    def __init__(
        self, redis: RedisClient, key: bytes, read_record: Callable[[], HeartbeatRecord], heartbeat_s: float
    ) -> None:
        """`read_record` gives the record as of now; its heartbeat_seq is set here."""
        self._redis = redis
        self._key = key
        self._read_record = read_record
        self._heartbeat_s = heartbeat_s
        self._seq = 0
        self._announced = asyncio.Event()
        self._link = _LinkLog("heartbeat")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._beat_for_ever(), name="membership-heartbeat")

    def announce(self) -> None:
        """Sends the record now, not at the next heartbeat: it became ready, or it drains."""
        self._announced.set()

    async def stop(self) -> None:
        """Ends the heartbeat and withdraws the record, so that routers need not wait for its expiry."""
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None
        with contextlib.suppress(RedisUnavailable):
            await self._redis.run(lambda redis: redis.delete(self._key))

    async def _beat_for_ever(self) -> None:
        while True:
            await self._beat()
            pause_s = self._heartbeat_s * random.uniform(1 - HEARTBEAT_JITTER, 1)  # noqa: S311
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._announced.wait()
            self._announced.clear()

    async def _beat(self) -> None:
        self._seq += 1
        record = self._read_record()
        record.heartbeat_seq = self._seq
        ttl_ms = int(self._heartbeat_s * TTL_HEARTBEATS * 1000)
        try:
            await self._redis.run(lambda redis: redis.set(self._key, record.SerializeToString(), px=ttl_ms))
        except RedisUnavailable as error:
            self._link.lost(error)
        else:
            self._link.healthy()


class MembershipView:
    """The workers a router knows of. Reading it never waits; it is refreshed in the background."""

    def __init__(
        self,
        redis: RedisClient,
        on_change: Callable[[MembershipChange], None],
        state: MembershipState | None = None,
        clock: Callable[[], float] = time.monotonic,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        """`on_change` is called on the event loop, once for each change, and must not block."""
        self._redis = redis
        self._poll_interval_s = poll_interval_s
        self._on_change = on_change
        self._state = state or MembershipState()
        self._clock = clock
        self._last_contact_s: float | None = None
        self._first_poll_done = asyncio.Event()
        self._link = _LinkLog("membership view")
        self._task: asyncio.Task[None] | None = None

    @property
    def workers(self) -> Mapping[WorkerId, membership_pb2.WorkerRecord]:
        """The last known set."""
        return self._state.workers

    @property
    def is_redis_healthy(self) -> bool:
        return self._link.is_healthy

    @property
    def age_s(self) -> float | None:
        """Time since Redis last answered; None: it never has."""
        return None if self._last_contact_s is None else self._clock() - self._last_contact_s

    def start(self) -> None:
        self._task = asyncio.create_task(self._poll_for_ever(), name="membership-view")

    async def wait_for_first_poll(self) -> None:
        """Returns after the first attempt to read Redis, whether it answered or not."""
        await self._first_poll_done.wait()

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None

    def peer_gone(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """The router saw that this process ended: it leaves now and stays away until it has restarted."""
        self._publish(self._state.peer_gone(worker_id, incarnation))

    async def _poll_for_ever(self) -> None:
        while True:
            await self._poll()
            self._first_poll_done.set()
            await asyncio.sleep(self._poll_interval_s)

    async def _poll(self) -> None:
        try:
            records = await _read_records(self._redis, WORKER_KEY_PREFIX, membership_pb2.WorkerRecord)
        except RedisUnavailable as error:
            self._state.redis_lost()
            self._link.lost(error)
            return
        self._link.healthy()
        if self._last_contact_s is None:
            await self._warn_about_server()
        self._last_contact_s = self._clock()
        self._publish(self._state.listed(records, self._clock()))

    async def _warn_about_server(self) -> None:
        with contextlib.suppress(RedisUnavailable):
            faults = known_faults(await self._redis.run(lambda redis: redis.info("server")))
            if faults:
                _log.warning("the Redis server has known faults", extra={"faults": faults})

    def _publish(self, changes: list[MembershipChange]) -> None:
        for change in changes:
            self._on_change(change)


async def read_router_records(redis: RedisClient) -> list[membership_pb2.RouterRecord]:
    """What every living router said last. Raises `RedisUnavailable`."""
    return await _read_records(redis, ROUTER_KEY_PREFIX, membership_pb2.RouterRecord)


def worker_key(worker_id: str) -> bytes:
    return WORKER_KEY_PREFIX + worker_id.encode()


def router_key(router_id: str) -> bytes:
    return ROUTER_KEY_PREFIX + router_id.encode()


async def _read_records(redis: RedisClient, prefix: bytes, kind: type[Record]) -> list[Record]:
    """Every record that is there and readable."""
    # SCAN may give a key twice.
    keys = sorted({key async for key in redis.scan(prefix + b"*")})
    values = await redis.run(lambda client: client.mget(keys)) if keys else []
    return [record for value in values if value is not None and (record := _parse(value, kind)) is not None]


def _parse(value: Any, kind: type[Record]) -> Record | None:
    try:
        return kind.FromString(value)
    except DecodeError:
        _log.warning("a record in Redis cannot be read: another version writes there?")
        return None


class _LinkLog:
    """Says once that Redis was lost, and once that it is back."""

    def __init__(self, user: str) -> None:
        self._user = user
        self.is_healthy = False
        self._reported_loss = False

    def lost(self, error: RedisUnavailable) -> None:
        self.is_healthy = False
        if not self._reported_loss:
            self._reported_loss = True
            _log.warning("Redis is lost, going on without it", extra={"user": self._user, "reason": str(error)})

    def healthy(self) -> None:
        self.is_healthy = True
        if self._reported_loss:
            self._reported_loss = False
            _log.info("Redis is back", extra={"user": self._user})
