"""KV events from notes to a reader, through a real Redis that is emptied, killed and stopped."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError
from tandem.v1 import common_pb2, membership_pb2

from cluster import kv_events
from cluster.block_hash import HashScope, hash_blocks
from cluster.embedded_redis import USER
from cluster.identity import BlockHash, WorkerId, new_incarnation
from cluster.kv_events import KvEventPublisher, KvEventReader
from cluster.redis_client import Answer, RedisClient
from router.cache_view import CacheView
from router.prefix_index import PrefixIndex
from tests.cluster.conftest import RedisServer

pytestmark = pytest.mark.cluster

A = WorkerId("prefill-0")
TIMEOUT_S = 60.0


def block_hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


class Index:
    """What a router would know: events applied in order of seq, gaps noticed."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.incarnation = ""
        self.last_seq = 0
        self.gaps = 0
        self.snapshots = 0

    def apply(self, event: membership_pb2.KvEvent) -> None:
        if event.incarnation != self.incarnation:
            self.incarnation, self.last_seq = event.incarnation, 0
            self.held.clear()
        hashes = [event.block_hashes[at : at + 16] for at in range(0, len(event.block_hashes), 16)]
        if event.op == membership_pb2.KV_EVENT_OP_SNAPSHOT:
            self.snapshots += 1
            self.held, self.last_seq = set(hashes), event.seq
            return
        if event.seq <= self.last_seq:
            return
        self.gaps += event.seq != self.last_seq + 1
        self.last_seq = event.seq
        if event.op == membership_pb2.KV_EVENT_OP_STORED:
            self.held.update(hashes)
        elif event.op == membership_pb2.KV_EVENT_OP_REMOVED:
            self.held.difference_update(hashes)
        else:
            self.held.clear()


@asynccontextmanager
async def publishing(server: RedisServer) -> AsyncIterator[KvEventPublisher]:
    identity = common_pb2.WorkerIdentity(worker_id=A, incarnation=new_incarnation())
    publisher = KvEventPublisher(server.client(), identity)
    publisher.start()
    yield publisher
    await publisher.stop()


@asynccontextmanager
async def reading(server: RedisServer) -> AsyncIterator[tuple[KvEventReader, Index]]:
    index = Index()
    reader = KvEventReader(server.client(), index.apply)
    reader.watch(A)
    reader.start()
    yield reader, index
    await reader.stop()


async def until(is_reached: Callable[[], bool]) -> float:
    started_s = time.monotonic()
    while not is_reached():
        if time.monotonic() - started_s > TIMEOUT_S:
            pytest.fail("not reached in time")
        await asyncio.sleep(0.01)
    return time.monotonic() - started_s


async def test_reader_follows_what_is_stored_removed_and_cleared(redis_server: RedisServer) -> None:
    async with publishing(redis_server) as publisher, reading(redis_server) as (_, index):
        publisher.stored(None, [block_hash(number) for number in range(10)])
        publisher.stored(block_hash(9), [block_hash(10)])
        publisher.removed([block_hash(3)])
        await until(lambda: index.held == {block_hash(number) for number in range(11) if number != 3})
        publisher.cleared()
        publisher.stored(None, [block_hash(99)])
        await until(lambda: index.held == {block_hash(99)})
        assert index.gaps == 0
        assert index.last_seq == publisher.last_seq


async def test_f40_new_incarnation_wipes_what_was_known_of_the_old_one(redis_server: RedisServer) -> None:
    async with reading(redis_server) as (_, index):
        async with publishing(redis_server) as publisher:
            publisher.stored(None, [block_hash(1)])
            await until(lambda: index.held == {block_hash(1)})
        async with publishing(redis_server):
            await until(lambda: index.held == set())


async def test_f40_asked_worker_sends_all_it_holds(redis_server: RedisServer) -> None:
    async with publishing(redis_server) as publisher, reading(redis_server) as (reader, index):
        publisher.stored(None, [block_hash(1), block_hash(2)])
        await until(lambda: len(index.held) == 2)
        index.held.clear()  # as after a lost event
        snapshots = index.snapshots
        reader.ask_snapshot(A)
        await until(lambda: index.held == {block_hash(1), block_hash(2)} and index.snapshots == snapshots + 1)


async def test_f40_gap_is_repaired_from_the_stream(redis_server: RedisServer) -> None:
    async with publishing(redis_server) as publisher, reading(redis_server) as (reader, index):
        for number in range(5):
            publisher.stored(None, [block_hash(number)])
        await until(lambda: len(index.held) == 5)
        index.held.clear()
        index.last_seq = 0
        reader.read_again(A)
        await until(lambda: len(index.held) == 5)


async def test_f10_index_is_whole_again_after_an_empty_restart(redis_server: RedisServer) -> None:
    async with publishing(redis_server) as publisher, reading(redis_server) as (_, index):
        publisher.stored(None, [block_hash(1)])
        await until(lambda: index.held == {block_hash(1)})
        await redis_server.kill()
        publisher.stored(block_hash(1), [block_hash(2)])
        publisher.removed([block_hash(1)])
        await redis_server.start()
        await until(lambda: index.held == {block_hash(2)})


async def test_f11_flush_is_followed_by_a_snapshot_for_whoever_asks(redis_server: RedisServer) -> None:
    async with publishing(redis_server) as publisher:
        publisher.stored(None, [block_hash(1)])
        await redis_server.flush()
        async with reading(redis_server) as (reader, index):
            reader.ask_snapshot(A)
            await until(lambda: index.held == {block_hash(1)})


class CountingClient(RedisClient):
    """A client that knows how often it was used."""

    num_commands = 0

    async def run(self, command: Callable[[Any], Awaitable[Answer]]) -> Answer:
        self.num_commands += 1
        return await super().run(command)


async def test_a_publisher_that_has_nothing_to_tell_hardly_wakes_up(redis_server: RedisServer) -> None:
    client = CountingClient(redis_server.embedded.url, redis_server.embedded.password_file)
    publisher = KvEventPublisher(client, common_pb2.WorkerIdentity(worker_id=A, incarnation=new_incarnation()))
    publisher.start()
    started_s = time.monotonic()
    await until(lambda: client.num_commands >= 4)  # the first snapshot, and looking for asks
    took_s = time.monotonic() - started_s
    await publisher.stop()
    await client.close()
    assert took_s >= 1.8 * kv_events.ASK_INTERVAL_S


async def test_a_note_goes_out_without_waiting_for_the_next_look_for_asks(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "ASK_INTERVAL_S", 100 * TIMEOUT_S)
    async with publishing(redis_server) as publisher, reading(redis_server) as (_, index):
        for number in range(3):
            await asyncio.to_thread(publisher.stored, None, [block_hash(number)])  # as from the engine's thread
            await until(lambda: len(index.held) == number + 1)  # noqa: B023  awaited here and now
        assert index.gaps == 0


async def test_more_notes_than_fit_become_a_snapshot(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_PENDING_EVENTS", 10)
    async with publishing(redis_server) as publisher, reading(redis_server) as (_, index):
        for number in range(1000):
            publisher.stored(None, [block_hash(number)])
        await until(lambda: len(index.held) == 1000)
        assert index.snapshots >= 1


async def test_large_cache_comes_in_parts(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_HASHES_PER_EVENT", 100)
    async with publishing(redis_server) as publisher, reading(redis_server) as (reader, index):
        publisher.stored(None, [block_hash(number) for number in range(950)])
        await until(lambda: len(index.held) == 950)
        index.held.clear()
        reader.ask_snapshot(A)
        await until(lambda: len(index.held) == 950)
        assert index.gaps == 0


async def test_f13_hung_redis_keeps_nobody_waiting(redis_server: RedisServer) -> None:
    async with publishing(redis_server) as publisher, reading(redis_server) as (_, index):
        redis_server.suspend()
        try:
            started_s = time.monotonic()
            for number in range(1000):
                publisher.stored(None, [block_hash(number)])
            assert time.monotonic() - started_s < 10.0  # a thousand timeouts of a command: minutes
        finally:
            redis_server.resume()
        await until(lambda: len(index.held) == 1000)


async def test_s_b43_events_hold_hashes_and_no_tokens_and_are_read_with_the_password_alone(
    redis_server: RedisServer,
) -> None:
    tokens = list(range(16_000, 16_064))
    hashes = hash_blocks(np.array(tokens, dtype=np.int32), HashScope(b"secret scope", "model", 16))
    async with publishing(redis_server) as publisher, reading(redis_server) as (_, index):
        await until(lambda: index.snapshots == 1)
        publisher.stored(None, hashes)
        await until(lambda: index.held >= set(hashes))
        stream = kv_events.STREAM_PREFIX + A.encode()
        written = repr(await redis_server.client().run(lambda redis: redis.xrange(stream)))
        assert repr(hashes[0])[2:-1] in written
        assert not any(repr(token.to_bytes(size, "little"))[2:-1] in written for token in tokens for size in (4, 8))
        url = f"unix://{redis_server.embedded.socket}"
        for user, password in ((None, None), ("default", "guess"), (USER, "guess")):
            async with Redis.from_url(url, username=user, password=password) as stranger:
                with pytest.raises((RedisError, OSError)):
                    await stranger.xread({stream: "0"})
    allowed = {"worker_id", "incarnation", "seq", "op", "block_hashes", "parent_hash", "has_tiers"}
    assert set(membership_pb2.KvEvent.DESCRIPTOR.fields_by_name) == allowed


async def test_s_b43_stream_is_bounded_and_expires(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_STREAM_ENTRIES", 400)
    async with publishing(redis_server) as publisher, reading(redis_server) as (_, index):
        await until(lambda: index.snapshots == 1)
        for number in range(2000):
            publisher.stored(None, [block_hash(number)])
        await until(lambda: index.last_seq == 2000)
        client, stream = redis_server.client(), kv_events.STREAM_PREFIX + A.encode()
        # Redis trims by whole nodes of 100 entries.
        assert await client.run(lambda redis: redis.xlen(stream)) <= 500
        assert 0 < await client.run(lambda redis: redis.ttl(stream)) <= kv_events.STREAM_TTL_S


async def test_rt15_s_b67_a_router_that_comes_late_reads_large_caches_in_turns_with_its_requests(
    redis_server: RedisServer,
) -> None:
    """Two million blocks kept a router from serving for a minute: between two parts everybody else has a turn."""
    names = [WorkerId(f"prefill-{number}") for number in range(7)]
    num_blocks = 8 * kv_events.MAX_HASHES_PER_EVENT
    for name in names:
        publisher = KvEventPublisher(
            redis_server.client(), common_pb2.WorkerIdentity(worker_id=name, incarnation=new_incarnation())
        )
        publisher.stored(None, [block_hash(number) for number in range(num_blocks)])
        await publisher._flush()
    entered: Counter[str] = Counter()
    most_between_turns, since_turn = 0, 0

    def enter(event: membership_pb2.KvEvent) -> None:
        nonlocal most_between_turns, since_turn
        num_hashes = len(event.block_hashes) // 16
        entered[event.worker_id] += num_hashes
        since_turn += num_hashes
        most_between_turns = max(most_between_turns, since_turn)

    reader = KvEventReader(redis_server.client(), enter)
    for name in names:
        reader.watch(name)
    reader.start()
    deadline_s = time.monotonic() + TIMEOUT_S
    while sum(entered.values()) < len(names) * num_blocks and time.monotonic() < deadline_s:
        since_turn = 0
        await asyncio.sleep(0)
    await reader.stop()
    assert entered == dict.fromkeys(names, num_blocks)
    assert most_between_turns <= 2 * kv_events.MAX_HASHES_PER_EVENT


async def test_rt15_seven_caches_of_300_000_blocks_are_learnt_while_every_prompt_is_placed(
    redis_server: RedisServer,
) -> None:
    """A router that starts beside a full cluster: it places from its first turn on, knows more at each, then all.

    Then one of the workers leaves with its 300,000: what is forgotten comes in parts as well.
    """
    workers, num_blocks = [WorkerId(f"prefill-{number}") for number in range(7)], 300_000
    chains = {}
    for number, name in enumerate(workers):
        identity = common_pb2.WorkerIdentity(worker_id=name, incarnation=new_incarnation())
        publisher = KvEventPublisher(redis_server.client(), identity)
        hashes = [block_hash(number * num_blocks + block) for block in range(num_blocks)]
        publisher.stored(None, hashes)
        await publisher._flush()
        chains[name] = [*hashes[:50], *hashes[-50:]]  # of the first part that is sent, and of the last
    del publisher, hashes
    index = CountingIndex()
    view = CacheView(index, time.monotonic)
    reader = KvEventReader(redis_server.client(), view.on_event)
    for name in workers:
        view.worker_joined(name)
    view.connect(reader)
    reader.start()
    known: list[int] = []
    deadline_s = time.monotonic() + TIMEOUT_S
    while sum(index.num_blocks(name) for name in workers) < len(workers) * num_blocks:
        assert time.monotonic() < deadline_s, known[-1]
        index.most_between_turns.append(index.take())
        matches = {
            name: view.match(chain, 16, len(chain) * 16).tokens for name, chain in chains.items()
        }  # no block yet
        known.append(sum(tokens.get(name, 0) for name, tokens in matches.items()))
        await asyncio.sleep(0)
    await reader.stop()
    assert known[0] == 0
    assert known == sorted(known)
    assert len(set(known)) > len(workers), "it learnt at once, or not while prompts were placed"
    assert max(index.most_between_turns) <= 2 * kv_events.MAX_HASHES_PER_EVENT
    assert all(view.match(chain, 16, 99 * 16).tokens == {name: 98 * 16 + 15} for name, chain in chains.items())
    view.worker_left(workers[0])
    assert view.match(chains[workers[0]], 16, 1600).tokens == {}
    while index.status().retired_slots:
        view.tick()
    assert index.status().entries == 6 * num_blocks


class CountingIndex(PrefixIndex):
    """Counts what is entered between two turns of others."""

    def __init__(self) -> None:
        super().__init__()
        self.most_between_turns: list[int] = []
        self._num_entered = 0

    def stored(self, worker_id: WorkerId, hashes: Iterable[BlockHash]) -> None:
        entered = list(hashes)
        self._num_entered += len(entered)
        super().stored(worker_id, entered)

    def take(self) -> int:
        num_entered, self._num_entered = self._num_entered, 0
        return num_entered


async def test_rt15_how_much_is_read_at_once_follows_how_much_there_is(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def publish(number: int, num_hashes: int) -> None:
        identity = common_pb2.WorkerIdentity(worker_id=f"w-{number}", incarnation=new_incarnation())
        publisher = KvEventPublisher(redis_server.client(), identity)
        publisher.stored(None, [block_hash(value) for value in range(num_hashes)])
        await publisher._flush()

    reader = KvEventReader(redis_server.client(), lambda _: None)
    for number in range(64):
        reader.watch(WorkerId(f"w-{number}"))
        await publish(number, 10)
    for _ in range(8):
        await reader._read()
    assert reader._streams_per_read >= 64  # short streams: one command for all of them
    monkeypatch.setattr(kv_events, "SHRINK_ABOVE_BYTES", 1000)
    for number in range(64):
        await publish(number, 1000)
    before = reader._streams_per_read
    await reader._read()
    assert kv_events.MIN_STREAMS_PER_READ <= reader._streams_per_read < before


async def test_f40_a_gap_in_the_middle_of_what_was_read_is_read_again(redis_server: RedisServer) -> None:
    """What stands behind the gap in the same answer must not move the reader past it."""
    seen: list[int] = []

    def on_event(event: membership_pb2.KvEvent) -> None:
        seen.append(event.seq)
        if event.seq == 2 and seen.count(2) == 1:
            reader.read_again(A)

    reader = KvEventReader(redis_server.client(), on_event)
    reader.watch(A)
    publisher = KvEventPublisher(
        redis_server.client(), common_pb2.WorkerIdentity(worker_id=A, incarnation=new_incarnation())
    )
    await publisher._flush()  # the empty snapshot of a new process: seq 0
    for number in range(3):
        publisher.stored(None, [block_hash(number)])
    await publisher._flush()
    await reader._read()
    await reader._read()
    assert seen == [0, 1, 2, 0, 1, 2, 3]


def test_blocks_below_the_pool_are_told_apart_in_notes_and_in_snapshots() -> None:
    identity = common_pb2.WorkerIdentity(worker_id=A, incarnation="one")
    publisher = KvEventPublisher(None, identity)  # type: ignore[arg-type]  # nothing is sent here
    publisher.has_tiers()
    publisher._needs_snapshot = False
    hashes = [block_hash(number) for number in range(6)]
    publisher.came_below(hashes[4:])  # of an earlier process
    publisher.stored(None, hashes[:3])
    publisher.came_below(hashes[2:5])  # one is in the pool, one is known: only the third is new
    publisher.demoted(hashes[1:3])
    publisher.went_below([hashes[0], hashes[5]])  # the first is in the pool
    publisher.stored(hashes[0], hashes[1:2])
    told = [
        (event.op, [BlockHash(event.block_hashes[at : at + 16]) for at in range(0, len(event.block_hashes), 16)])
        for event in publisher._take_events()
    ]
    stored, demoted = membership_pb2.KV_EVENT_OP_STORED, membership_pb2.KV_EVENT_OP_DEMOTED
    assert told == [
        (demoted, hashes[4:]),
        (stored, hashes[:3]),
        (demoted, [hashes[3]]),
        (demoted, hashes[1:3]),
        (membership_pb2.KV_EVENT_OP_REMOVED, [hashes[5]]),
        (stored, hashes[1:2]),
    ]
    publisher._needs_snapshot = True
    snapshot, below = publisher._take_events()
    assert (snapshot.op, snapshot.block_hashes) == (membership_pb2.KV_EVENT_OP_SNAPSHOT, b"".join(hashes[:2]))
    assert (below.op, below.block_hashes) == (demoted, b"".join(hashes[2:5]))
    assert snapshot.has_tiers
    assert below.has_tiers
