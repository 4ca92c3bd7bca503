"""What the router believes each worker's prefix cache holds, and how far that belief has been right.

    KvEventReader ──KvEvent──> on_event ──kv_event_log (order, gaps, restarts)──> PrefixIndex
    place: hashes of the prompt ──match──> cached tokens for each worker, weighed by confidence
    first token: what the worker reported as cached ──> confidence, and a resync when it stays low

Believing wrongly costs time, never correctness: workers compare tokens themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from tandem.v1 import membership_pb2

from cluster.block_hash import HASH_BYTES, HashScope, hash_blocks
from cluster.identity import BlockHash, Incarnation, WorkerId
from cluster.telemetry import RouterMetrics
from router.kv_event_log import (
    Apply,
    AskRange,
    AskSnapshot,
    DropWorker,
    EventOp,
    KvEvent,
    LogState,
    Step,
    on_event,
    on_tick,
)
from router.prefix_index import PrefixIndex

CONFIDENCE_KEPT = 0.9  # of the old value, for each request
LOW_CONFIDENCE = 0.3
RESYNC_AFTER_REQUESTS = 20
# A worker that has answered a prompt of whole blocks so long ago and told of none publishes nothing.
SILENT_AFTER_S = 10.0
UNSEEN_HITS_ALERT = 20  # in a row: the worker finds what the index never knew of

_OPS = {
    membership_pb2.KV_EVENT_OP_STORED: EventOp.STORED,
    membership_pb2.KV_EVENT_OP_DEMOTED: EventOp.DEMOTED,
    membership_pb2.KV_EVENT_OP_REMOVED: EventOp.REMOVED,
    membership_pb2.KV_EVENT_OP_CLEARED: EventOp.CLEARED,
    membership_pb2.KV_EVENT_OP_SNAPSHOT: EventOp.SNAPSHOT,
}

_log = logging.getLogger(__name__)


class EventSource(Protocol):
    """Where KV events come from: `cluster.kv_events.KvEventReader`."""

    def watch(self, worker_id: WorkerId) -> None: ...

    def unwatch(self, worker_id: WorkerId) -> None: ...

    def read_again(self, worker_id: WorkerId) -> None: ...

    def ask_snapshot(self, worker_id: WorkerId) -> None: ...


@dataclass(frozen=True, slots=True)
class CacheMatch:
    """Where a prompt's beginning is."""

    tokens: Mapping[WorkerId, int]  # of the prompt, by worker; absent: none
    longest: BlockHash | None  # the last block of the longest prefix that anybody holds
    no_match_because: str = ""  # where nobody holds anything: why, as far as the router can tell
    # Behind the cached ones, what a worker can bring back from its lower tiers; absent: none.
    restorable_tokens: Mapping[WorkerId, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Belief:
    """How much one worker's index entries are worth."""

    confidence: float = 1.0
    num_low: int = 0  # requests in a row
    num_events: int = 0
    was_sent_blocks: bool = False
    first_answered_s: float | None = None  # a prompt of whole blocks: from then on there was something to tell of
    is_silent: bool = False  # no events: what it was sent is taken for what it holds
    num_unseen: int = 0  # hits in a row that nobody predicted
    has_tiers: bool = False


class CacheView:
    """Owned by the router's event loop."""

    def __init__(self, index: PrefixIndex, clock: Callable[[], float]) -> None:
        self._index = index
        # Of workers with lower tiers: what is in any of them or in the pool.
        self._reach = PrefixIndex(index.max_entries)
        self._clock = clock
        self._source: EventSource | None = None
        self._logs: dict[WorkerId, LogState] = {}
        self._beliefs: dict[WorkerId, _Belief] = {}

    @property
    def index(self) -> PrefixIndex:
        return self._index

    def connect(self, source: EventSource) -> None:
        """Events come from here on; workers that are known already are watched."""
        self._source = source
        for worker_id in self._beliefs:
            source.watch(worker_id)

    def worker_joined(self, worker_id: WorkerId) -> None:
        """A new incarnation: what was known of an older one is void."""
        self._drop(worker_id)
        self._logs.pop(worker_id, None)
        self._beliefs[worker_id] = _Belief()
        if self._source is not None:
            self._source.watch(worker_id)

    def worker_left(self, worker_id: WorkerId) -> None:
        self._drop(worker_id)
        self._logs.pop(worker_id, None)
        self._beliefs.pop(worker_id, None)
        if self._source is not None:
            self._source.unwatch(worker_id)

    def on_event(self, message: membership_pb2.KvEvent) -> None:
        """One event of a stream. Malformed ones are dropped: the gap they leave asks for a snapshot."""
        worker_id = WorkerId(message.worker_id)
        belief = self._beliefs.get(worker_id)
        op = _OPS.get(message.op)
        if belief is None or op is None or len(message.block_hashes) % HASH_BYTES:
            return
        belief.num_events += 1
        belief.has_tiers = message.has_tiers
        belief.is_silent = False
        event = KvEvent(Incarnation(message.incarnation), message.seq, op, _split(message.block_hashes))
        state = self._logs.get(worker_id, LogState())
        self._logs[worker_id], steps = on_event(state, event, self._clock())
        self._carry_out(worker_id, steps)

    def tick(self) -> None:
        """Asks again for what was asked for and did not come, and sweeps a part of retired entries."""
        now_s = self._clock()
        for worker_id, state in list(self._logs.items()):
            if state.asked_range_s is None and state.asked_snapshot_s is None:
                continue  # a thousand workers of whom nothing was asked cost nothing
            self._logs[worker_id], steps = on_tick(state, now_s)
            self._carry_out(worker_id, steps)
        for worker_id, belief in self._beliefs.items():
            if not belief.num_events:
                self._notice_silence(worker_id, belief, now_s)
        self._index.sweep()
        self._reach.sweep()

    def match(self, hashes: Sequence[BlockHash], block_tokens: int, num_tokens: int) -> CacheMatch:
        """What each worker is believed to hold of this prompt; the last token is always computed."""
        now_s = self._clock()
        matched = self._index.match(hashes, now_s)
        reached = self._reach.match(hashes, now_s) if self._reach.num_entries else {}
        if not matched and not reached:
            return CacheMatch({}, None, self._cause_of_no_match(hashes, block_tokens, num_tokens))
        most = max(0, num_tokens - 1)
        tokens = {
            worker_id: self._believed(worker_id, num_blocks * block_tokens, most)
            for worker_id, num_blocks in matched.items()
        }
        longest = hashes[max(matched.values()) - 1] if matched else None
        if not reached:
            return CacheMatch(tokens, longest)
        restorable = {
            worker_id: self._believed(worker_id, num_blocks * block_tokens, most) - tokens.get(worker_id, 0)
            for worker_id, num_blocks in reached.items()
            if num_blocks > matched.get(worker_id, 0)
        }
        return CacheMatch(tokens, longest, restorable_tokens=restorable)

    def _believed(self, worker_id: WorkerId, num_tokens: int, most: int) -> int:
        """What so many tokens of the index are worth."""
        belief = self._beliefs.get(worker_id)
        if belief is None:
            return 0
        num_tokens = num_tokens if num_tokens < most else most
        return num_tokens if belief.confidence == 1.0 else int(num_tokens * belief.confidence)

    def _cause_of_no_match(self, hashes: Sequence[BlockHash], block_tokens: int, num_tokens: int) -> str:
        """What an operator who wonders about it should look at first."""
        if not block_tokens:
            return "no worker is known: nobody has said how long a block is"
        if not hashes:
            return f"its {num_tokens} tokens do not fill a block of {block_tokens}"
        if not self._index.num_entries:
            return "no worker has told of a cached block yet: are its KV events published and read?"
        return "no worker holds its first block"

    def watch_silence(self, series: RouterMetrics, model: str) -> None:
        """The gauge of workers that publish no KV events; counted when somebody asks for it."""
        series.silent_workers.labels(model).set_function(
            lambda: sum(belief.is_silent for belief in self._beliefs.values())
        )

    def chosen(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        """The worker will hold these blocks soon: siblings that come before its events follow it."""
        now_s = self._clock()
        self._index.speculate(worker_id, hashes, now_s)
        belief = self._beliefs.get(worker_id)
        if belief is None:
            return
        belief.was_sent_blocks = belief.was_sent_blocks or bool(hashes)
        if belief.is_silent:
            self._index.stored(worker_id, hashes)

    def answered(self, worker_id: WorkerId) -> None:
        """A request that was placed there has its first token, so the worker holds the prompt's KV."""
        belief = self._beliefs.get(worker_id)
        if belief is not None and belief.was_sent_blocks and belief.first_answered_s is None:
            belief.first_answered_s = self._clock()

    def observed(self, worker_id: WorkerId, predicted_tokens: int, reported_tokens: int) -> None:
        """What a worker found in its cache, against what it was believed to hold."""
        belief = self._beliefs.get(worker_id)
        if belief is None:
            return
        if predicted_tokens <= 0:
            self._count_unseen(worker_id, belief, reported_tokens)
            return
        belief.num_unseen = 0
        was_right = min(1.0, reported_tokens / predicted_tokens)
        belief.confidence = CONFIDENCE_KEPT * belief.confidence + (1 - CONFIDENCE_KEPT) * was_right
        belief.num_low = belief.num_low + 1 if belief.confidence < LOW_CONFIDENCE else 0
        if belief.num_low >= RESYNC_AFTER_REQUESTS:
            _log.warning("prefix index is wrong about a worker, asking for a snapshot", extra={"peer": worker_id})
            belief.num_low = 0
            belief.confidence = 1.0
            self._carry_out(worker_id, [DropWorker(), AskSnapshot()])

    def _count_unseen(self, worker_id: WorkerId, belief: _Belief, reported_tokens: int) -> None:
        belief.num_unseen = belief.num_unseen + 1 if reported_tokens > 0 else 0
        if belief.num_unseen == UNSEEN_HITS_ALERT:
            _log.error(
                "a worker finds prefixes that it never told of: are its KV events read?", extra={"peer": worker_id}
            )

    def _notice_silence(self, worker_id: WorkerId, belief: _Belief, now_s: float) -> None:
        if belief.is_silent or belief.first_answered_s is None:
            return
        if now_s - belief.first_answered_s >= SILENT_AFTER_S:
            belief.is_silent = True
            _log.error("a worker publishes no KV events: its cache is guessed", extra={"peer": worker_id})

    def status(self) -> Mapping[str, object]:
        """For `/statusz`: the index's size, and each worker's blocks, events and confidence."""
        index = self._index.status()
        return {
            "entries": index.entries,
            "speculative_entries": index.speculative_entries,
            "rejected": index.rejected,
            "workers": {
                worker_id: {
                    "blocks": self._index.num_blocks(worker_id),
                    "blocks_with_tiers": self._reach.num_blocks(worker_id),
                    "events": belief.num_events,
                    "confidence": round(belief.confidence, 3),
                    "is_silent": belief.is_silent,
                    "unseen_hits": belief.num_unseen,
                }
                for worker_id, belief in self._beliefs.items()
            },
        }

    def _carry_out(self, worker_id: WorkerId, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case DropWorker():
                    self._drop(worker_id)
                case Apply(op, hashes):
                    self._enter(worker_id, op, hashes)
                case AskRange() if self._source is not None:
                    self._source.read_again(worker_id)
                case AskSnapshot() if self._source is not None:
                    self._source.ask_snapshot(worker_id)

    def _enter(self, worker_id: WorkerId, op: EventOp, hashes: Sequence[BlockHash]) -> None:
        if op is EventOp.STORED:
            self._index.stored(worker_id, hashes)
        else:
            self._index.removed(worker_id, hashes)
        belief = self._beliefs.get(worker_id)
        if belief is None or not belief.has_tiers:
            return
        if op is EventOp.REMOVED:
            self._reach.removed(worker_id, hashes)
        else:
            self._reach.stored(worker_id, hashes)

    def _drop(self, worker_id: WorkerId) -> None:
        self._index.drop_worker(worker_id)
        self._reach.drop_worker(worker_id)


def prompt_hashes(token_ids: Sequence[int], scope: HashScope) -> list[BlockHash]:
    """The names under which a prompt's full blocks are cached."""
    return hash_blocks(np.asarray(token_ids, dtype=np.int32), scope)


def _split(joined: bytes) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(joined[start : start + HASH_BYTES]) for start in range(0, len(joined), HASH_BYTES))
