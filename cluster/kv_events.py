"""What a worker's prefix cache holds, told to routers through a bounded Redis stream for each worker.

    engine thread ──stored, removed, ...──> KvEventPublisher ──XADD tandem:kv:<worker>──> KvEventReader ──> index
    a router that missed something ──SET tandem:kv-ask:<worker>──> the publisher sends a snapshot

Events of one incarnation are numbered from 1; a snapshot carries the number of the last event it contains. Block hashes
are keyed and say nothing of tokens. Losing events costs time, never correctness: a reader sees the gap and asks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from tandem.v1 import common_pb2, membership_pb2

from cluster.ended_tasks import end_tasks
from cluster.identity import BlockHash, WorkerId
from cluster.redis_client import RedisClient, RedisUnavailable

STREAM_PREFIX = b"tandem:kv:"
ASK_PREFIX = b"tandem:kv-ask:"
EVENT_FIELD = b"event"
# Entries a stream keeps: some minutes of a busy worker. A reader that is further behind asks for a snapshot.
MAX_STREAM_ENTRIES = 4096
# Beyond it the notes are dropped and a snapshot is sent instead.
MAX_PENDING_EVENTS = 8192
# A router enters so many in two milliseconds; a larger snapshot comes in parts, and requests are served between them.
MAX_HASHES_PER_EVENT = 4_096
# Notes go out at once after a pause, and at most this often: a worker that is asked nothing sends nothing.
FLUSH_INTERVAL_S = 0.05
# What an idle worker still does: it looks whether a router asks for a snapshot, and keeps its stream from expiring.
ASK_INTERVAL_S = 1.0
# A stream outlives its worker by this.
STREAM_TTL_S = 60
ASK_TTL_S = 10
READ_INTERVAL_S = 0.1
# What one command may bring: it must arrive and be parsed within the time of a command, also when every worker has just
# sent a snapshot (64 KiB an entry). Streams that are short are read many at a time, long ones a few.
READ_BATCH = 32
MIN_STREAMS_PER_READ = 4
# Two milliseconds of entering hashes: then the event loop looks after requests.
PAUSE_AFTER_BYTES = MAX_HASHES_PER_EVENT * 16
GROW_BELOW_BYTES, SHRINK_ABOVE_BYTES = 1 << 20, 4 << 20

_START_OF_STREAM = b"0"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Note:
    op: membership_pb2.KvEventOp.ValueType
    hashes: tuple[BlockHash, ...] = ()
    parent: BlockHash | None = None


class KvEventPublisher:
    """Takes notes from any thread, sends them from the event loop. Owned by the worker: `start`, later `stop`."""

    def __init__(self, redis: RedisClient, identity: common_pb2.WorkerIdentity) -> None:
        self._redis = redis
        self._identity = identity
        self._stream = STREAM_PREFIX + identity.worker_id.encode()
        self._ask = ASK_PREFIX + identity.worker_id.encode()
        self._lock = threading.Lock()
        self._pending: deque[_Note] = deque()
        self._held: set[BlockHash] = set()  # in the pool
        self._below: set[BlockHash] = set()  # in a lower tier and not in the pool
        self._has_tiers = False
        # What an earlier process left in the stream is void.
        self._needs_snapshot = True
        self._last_seq = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_notes = asyncio.Event()
        self._is_told = False  # the loop knows that there are notes: it need not be told of each
        self._task: asyncio.Task[None] | None = None

    @property
    def last_seq(self) -> int:
        """The last event sent: `kv_event_seq` of the worker's record."""
        return self._last_seq

    def stored(self, parent: BlockHash | None, hashes: Sequence[BlockHash]) -> None:
        with self._lock:
            self._held.update(hashes)
            self._below.difference_update(hashes)
            self._note(_Note(membership_pb2.KV_EVENT_OP_STORED, tuple(hashes), parent))

    def removed(self, hashes: Sequence[BlockHash]) -> None:
        if hashes:
            with self._lock:
                self._held.difference_update(hashes)
                self._note(_Note(membership_pb2.KV_EVENT_OP_REMOVED, tuple(hashes)))

    def demoted(self, hashes: Sequence[BlockHash]) -> None:
        """The pool has them no more, a lower tier has."""
        if hashes:
            with self._lock:
                self._held.difference_update(hashes)
                self._below.update(hashes)
                self._note(_Note(membership_pb2.KV_EVENT_OP_DEMOTED, tuple(hashes)))

    def has_tiers(self) -> None:
        """From now on `came_below` and `went_below` tell what the lower tiers do by themselves."""
        self._has_tiers = True

    def came_below(self, hashes: Sequence[BlockHash]) -> None:
        """A lower tier has them: of an earlier process, or another worker's."""
        with self._lock:
            new = tuple(block for block in hashes if block not in self._held and block not in self._below)
            if new:
                self._below.update(new)
                self._note(_Note(membership_pb2.KV_EVENT_OP_DEMOTED, new))

    def went_below(self, hashes: Sequence[BlockHash]) -> None:
        """No lower tier has them any more. Those that are in the pool stay what they are."""
        with self._lock:
            gone = tuple(block for block in hashes if block in self._below)
            if gone:
                self._below.difference_update(gone)
                self._note(_Note(membership_pb2.KV_EVENT_OP_REMOVED, gone))

    def cleared(self) -> None:
        with self._lock:
            self._held.clear()
            self._below.clear()
            self._pending.clear()
            self._note(_Note(membership_pb2.KV_EVENT_OP_CLEARED))

    def start(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._send_for_ever(), name="kv-events")

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None

    def _note(self, note: _Note) -> None:
        if len(self._pending) >= MAX_PENDING_EVENTS:
            self._pending.clear()
            self._needs_snapshot = True
        else:
            self._pending.append(note)
        if self._loop is not None and not self._is_told:
            self._is_told = True
            with suppress(RuntimeError):  # the loop has ended: nobody is left to be told
                self._loop.call_soon_threadsafe(self._has_notes.set)

    async def _send_for_ever(self) -> None:
        next_ask_s = 0.0
        while True:
            try:
                if time.monotonic() >= next_ask_s:
                    next_ask_s = time.monotonic() + ASK_INTERVAL_S
                    await self._look_for_asks()
                if await self._flush():
                    await asyncio.sleep(FLUSH_INTERVAL_S)
            except RedisUnavailable:
                # Nobody knows which of the last events arrived. A Redis that is away is not asked for each note.
                self._needs_snapshot = True
                await asyncio.sleep(ASK_INTERVAL_S)
            await self._notes_or_time_to_ask(next_ask_s - time.monotonic())

    async def _notes_or_time_to_ask(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_notes.wait()

    async def _look_for_asks(self) -> None:
        if await self._redis.run(self._take_ask):
            self._needs_snapshot = True

    async def _take_ask(self, redis: Any) -> bool:
        asked, _ = (
            await redis.pipeline(transaction=False).getdel(self._ask).expire(self._stream, STREAM_TTL_S).execute()
        )
        return asked is not None

    async def _flush(self) -> bool:
        """Sends what there is. Whether there was something."""
        events = self._take_events()
        if events:
            await self._redis.run(lambda redis: self._add(redis, events))
        return bool(events)

    def _take_events(self) -> list[membership_pb2.KvEvent]:
        """The notes as numbered events; in their place, when some were lost, all that is held."""
        with self._lock:
            if self._needs_snapshot:
                self._needs_snapshot = False
                self._pending.clear()
                self._all_taken()
                return self._snapshot(sorted(self._held), sorted(self._below))
            notes = [self._pending.popleft() for _ in range(min(len(self._pending), MAX_STREAM_ENTRIES // 4))]
            if not self._pending:
                self._all_taken()
        return [self._event(note.op, note.hashes, note.parent) for note in notes]

    def _all_taken(self) -> None:
        """The next note wakes the loop again. On the event loop, under the lock."""
        self._is_told = False
        self._has_notes.clear()

    def _snapshot(self, held: list[BlockHash], below: list[BlockHash]) -> list[membership_pb2.KvEvent]:
        """A snapshot of the first part; the rest of a very large cache, and lower tiers, follow in further events."""
        first = membership_pb2.KvEvent(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            seq=self._last_seq,
            op=membership_pb2.KV_EVENT_OP_SNAPSHOT,
            block_hashes=b"".join(held[:MAX_HASHES_PER_EVENT]),
            has_tiers=self._has_tiers,
        )
        stored, demoted = membership_pb2.KV_EVENT_OP_STORED, membership_pb2.KV_EVENT_OP_DEMOTED
        return [
            first,
            *(self._event(stored, part, None) for part in _parts(held[MAX_HASHES_PER_EVENT:])),
            *(self._event(demoted, part, None) for part in _parts(below)),
        ]

    def _event(
        self, op: membership_pb2.KvEventOp.ValueType, hashes: tuple[BlockHash, ...], parent: BlockHash | None
    ) -> membership_pb2.KvEvent:
        self._last_seq += 1
        return membership_pb2.KvEvent(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            seq=self._last_seq,
            op=op,
            block_hashes=b"".join(hashes),
            parent_hash=parent or b"",
            has_tiers=self._has_tiers,
        )

    async def _add(self, redis: Any, events: Iterable[membership_pb2.KvEvent]) -> None:
        pipeline = redis.pipeline(transaction=False)
        for event in events:
            pipeline.xadd(self._stream, {EVENT_FIELD: event.SerializeToString()}, maxlen=MAX_STREAM_ENTRIES)
        pipeline.expire(self._stream, STREAM_TTL_S)
        await pipeline.execute()


def _parts(hashes: list[BlockHash]) -> Iterator[tuple[BlockHash, ...]]:
    for start in range(0, len(hashes), MAX_HASHES_PER_EVENT):
        yield tuple(hashes[start : start + MAX_HASHES_PER_EVENT])


class KvEventReader:
    """Reads the streams of the watched workers and hands events on, in each stream's order. Never blocks a request."""

    def __init__(self, redis: RedisClient, on_event: Callable[[membership_pb2.KvEvent], None]) -> None:
        """`on_event` runs on the event loop and must not block. It may see an event twice (same seq)."""
        self._redis = redis
        self._on_event = on_event
        self._positions: dict[WorkerId, bytes] = {}
        self._asks: set[WorkerId] = set()
        self._streams_per_read = MIN_STREAMS_PER_READ
        self._is_lost = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._read_for_ever(), name="kv-event-reader")

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None

    def watch(self, worker_id: WorkerId) -> None:
        self._positions.setdefault(worker_id, _START_OF_STREAM)

    def unwatch(self, worker_id: WorkerId) -> None:
        self._positions.pop(worker_id, None)
        self._asks.discard(worker_id)

    def read_again(self, worker_id: WorkerId) -> None:
        """Hands on once more all that the stream still keeps: repairs a gap."""
        if worker_id in self._positions:
            self._positions[worker_id] = _START_OF_STREAM

    def ask_snapshot(self, worker_id: WorkerId) -> None:
        """Has the worker send all that it holds, within `ASK_INTERVAL_S` and a bit."""
        if worker_id in self._positions:
            self._asks.add(worker_id)

    async def _read_for_ever(self) -> None:
        while True:
            try:
                await self._send_asks()
                more = await self._read()
            except RedisUnavailable:
                self._is_lost, more = True, False
                self._streams_per_read = MIN_STREAMS_PER_READ
            await asyncio.sleep(0 if more else READ_INTERVAL_S)

    async def _send_asks(self) -> None:
        if self._is_lost:
            # What came while Redis was away is lost, and an emptied Redis counts its entries anew.
            self._asks.update(self._positions)
            self._positions = dict.fromkeys(self._positions, _START_OF_STREAM)
        for worker_id in sorted(self._asks):
            key = ASK_PREFIX + worker_id.encode()
            await self._redis.run(lambda redis, key=key: redis.set(key, b"1", ex=ASK_TTL_S))  # type: ignore[misc]
            self._asks.discard(worker_id)
        self._is_lost = False

    async def _read(self) -> bool:
        """One pass over all streams. Whether there is more to read at once."""
        has_more = False
        waiting = list(self._positions)
        while waiting:
            group, waiting = waiting[: self._streams_per_read], waiting[self._streams_per_read :]
            has_more |= await self._read_group(group)
        return has_more

    async def _read_group(self, group: Sequence[WorkerId]) -> bool:
        """The next entries of some streams. Whether one of them has more."""
        positions: Any = {
            STREAM_PREFIX + worker_id.encode(): self._positions[worker_id]
            for worker_id in group
            if worker_id in self._positions  # not unwatched meanwhile
        }
        if not positions:
            return False
        answer: Any = await self._redis.run(lambda redis: redis.xread(positions, count=READ_BATCH))
        # RESP3 gives a mapping, RESP2 a list of pairs.
        streams = answer.items() if isinstance(answer, dict) else answer or ()
        longest = num_bytes = 0
        for stream, pages in streams:
            entries = pages[0] if pages and isinstance(pages[0], list) else pages
            longest = max(longest, len(entries))
            num_bytes += await self._hand_on(WorkerId(stream.removeprefix(STREAM_PREFIX).decode()), entries)
        if num_bytes > SHRINK_ABOVE_BYTES:
            self._streams_per_read = max(MIN_STREAMS_PER_READ, self._streams_per_read // 2)
        elif num_bytes < GROW_BELOW_BYTES and len(group) == self._streams_per_read:
            self._streams_per_read *= 2
        return longest >= READ_BATCH

    async def _hand_on(self, worker_id: WorkerId, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> int:
        """One entry after the other; after a long one others have their turn. How many bytes they were."""
        num_bytes = num_since_pause = 0
        if worker_id not in self._positions:  # unwatched meanwhile
            return 0
        for position, fields in entries:
            self._positions[worker_id] = position
            data = fields.get(EVENT_FIELD, b"")
            num_bytes += len(data)
            num_since_pause += len(data)
            try:
                event = membership_pb2.KvEvent.FromString(data)
            except DecodeError:
                _log.warning("a KV event cannot be read", extra={"peer": worker_id})
                continue
            self._on_event(event)
            if self._positions.get(worker_id) != position:
                break  # it asked to read the stream again, for a gap
            if num_since_pause >= PAUSE_AFTER_BYTES:
                num_since_pause = 0
                await asyncio.sleep(0)
                if self._positions.get(worker_id) != position:
                    break  # unwatched meanwhile, or another incarnation is watched
        return num_bytes
