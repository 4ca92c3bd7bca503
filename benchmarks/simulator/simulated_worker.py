"""One worker as the router sees it: its engine, its KV events and load reports with their delays, its reservations."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Hashes
from dataclasses import dataclass
from typing import Protocol

from tandem.v1 import membership_pb2

from benchmarks.simulator.event_queue import EventQueue
from benchmarks.simulator.shared_links import LinkPort
from benchmarks.simulator.simulated_engine import SimulatedEngine, StepTokens
from cluster.identity import BlockHash, BlockRef, Incarnation, WorkerId
from engine.block_pool import BlockPool
from engine.mock_engine import StepTiming
from engine.prefix_cache import TokenIds
from engine.request import EngineLimits, EngineRequest
from engine.sequence import Sequence
from engine.worker_engine import load_report, step_budget
from router.worker_state import Role, WorkerState

FINGERPRINT = "simulated"
SCOPE_KEY = b"simulated"
# As in the real publisher and reader: a note is sent after 50 ms and read after 100 more.
EVENT_DELAY_S = 0.15
SNAPSHOT_DELAY_S = 0.3
MAX_KEPT_EVENTS = 4096
REPORT_INTERVAL_S = 0.2

EventReader = Callable[[membership_pb2.KvEvent], None]


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """What all workers of a simulation have in common."""

    timing: StepTiming
    limits: EngineLimits
    num_blocks: int
    block_tokens: int
    kv_bytes_per_token: int
    num_layers: int
    max_leap: int
    link_bytes_per_ms: float
    itl_slo_ms: float  # of workers that decode: what prompts may take of a step


class KvEventStream:
    """Implements `engine.block_states.KvEvents`: numbers what the pool says, delivers it later, loses some of it."""

    def __init__(
        self, events: EventQueue, worker: WorkerState, read: EventReader, loss_share: float, chance: random.Random
    ) -> None:
        self._events = events
        self._worker = worker
        self._read = read
        self._loss_share = loss_share
        self._chance = chance
        self._seq = 0
        self._held: dict[BlockHash, None] = {}
        self._kept: deque[membership_pb2.KvEvent] = deque(maxlen=MAX_KEPT_EVENTS)

    def stored(self, parent: BlockHash | None, hashes: Hashes[BlockHash]) -> None:
        self._held.update(dict.fromkeys(hashes))
        self._send(membership_pb2.KV_EVENT_OP_STORED, hashes)

    def removed(self, hashes: Hashes[BlockHash]) -> None:
        if hashes:
            for block_hash in hashes:
                self._held.pop(block_hash, None)
            self._send(membership_pb2.KV_EVENT_OP_REMOVED, hashes)

    def demoted(self, hashes: Hashes[BlockHash]) -> None:
        """A simulated pool has no lower tiers: there is nothing to tell."""

    def cleared(self) -> None:
        self._held.clear()
        self._send(membership_pb2.KV_EVENT_OP_CLEARED, ())

    def send_again(self) -> None:
        """A reader found a gap: what is kept comes once more."""
        for event in tuple(self._kept):
            self._deliver(event, EVENT_DELAY_S)

    def send_snapshot(self) -> None:
        snapshot = self._event(membership_pb2.KV_EVENT_OP_SNAPSHOT, tuple(self._held), self._seq)
        self._deliver(snapshot, SNAPSHOT_DELAY_S)

    def _send(self, op: membership_pb2.KvEventOp.ValueType, hashes: Hashes[BlockHash]) -> None:
        self._seq += 1
        event = self._event(op, hashes, self._seq)
        if self._loss_share:
            self._kept.append(event)
        self._deliver(event, EVENT_DELAY_S)

    def _deliver(self, event: membership_pb2.KvEvent, delay_s: float) -> None:
        if self._loss_share and self._chance.random() < self._loss_share:
            return
        self._events.after(delay_s, lambda: self._read(event))

    def _event(
        self, op: membership_pb2.KvEventOp.ValueType, hashes: Hashes[BlockHash], seq: int
    ) -> membership_pb2.KvEvent:
        worker = self._worker
        return membership_pb2.KvEvent(
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            seq=seq,
            op=op,
            block_hashes=b"".join(hashes),
        )


class PlacedRequest(Protocol):
    """What a worker needs of a request: `simulator.request_life` has it."""

    @property
    def fence(self) -> int:
        """Of its placement now: what belongs to an older one is void."""
        ...

    def compute_started(self, sequence: Sequence) -> None: ...

    def tokens(self, tokens: StepTokens) -> None: ...

    def granted(self, blocks: list[BlockRef], cached_tokens: int) -> None: ...

    def worker_failed(self, worker: SimulatedWorker) -> None: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that waits for KV blocks."""

    request: PlacedRequest
    fence: int
    token_ids: TokenIds
    longest: int


class SimulatedWorker:
    """One incarnation. The fleet owns it; the front reads `state`."""

    _numbers = itertools.count()

    def __init__(
        self,
        events: EventQueue,
        worker_id: WorkerId,
        role: Role,
        shape: WorkerShape,
        read_events: EventReader,
        loss_share: float,
        chance: random.Random,
    ) -> None:
        self.state = WorkerState(
            worker_id=worker_id,
            incarnation=Incarnation(f"{worker_id}-{next(self._numbers)}"),
            role=role,
            control_address="",
            block_tokens=shape.block_tokens,
            kv_bytes_per_token=shape.kv_bytes_per_token,
            num_layers=shape.num_layers,
            is_ready=True,
            is_connected=True,
        )
        self.live: set[PlacedRequest] = set()  # placed here and not ended
        self._events = events
        self.stream = KvEventStream(events, self.state, read_events, loss_share, chance)
        pool = BlockPool(shape.num_blocks, shape.block_tokens, FINGERPRINT, events=self.stream)
        self.engine = SimulatedEngine(
            events,
            pool,
            shape.limits,
            shape.timing,
            self._began,
            self._take,
            self.changed,
            shape.max_leap,
            step_budget(role.value, shape.itl_slo_ms, shape.block_tokens),
        )
        self.port = LinkPort(shape.link_bytes_per_ms)
        self._waiting: deque[_Waiting] = deque()
        self._owners: dict[Sequence, tuple[PlacedRequest, int]] = {}
        self._is_retry_due = False
        self._is_report_due = False
        pool.add_freed_listener(self._blocks_freed)
        self._report()

    def reserve(self, request: PlacedRequest, token_ids: TokenIds, longest: int) -> None:
        """Blocks for a prompt that will land here: `request.granted` now or when its turn comes."""
        self._waiting.append(_Waiting(request, request.fence, token_ids, longest))
        self._grant()
        self.changed()

    def submit(self, request: PlacedRequest, engine_request: EngineRequest) -> None:
        """Into the engine's queue; its tokens come to `request.tokens`. Raises `ServerOverloaded`."""
        sequence = self.engine.accept(engine_request)
        self._owners[sequence] = (request, request.fence)
        self.engine.wake()
        self.changed()

    def changed(self) -> None:
        """Its load is another one: the next report says so."""
        if not self._is_report_due:
            self._is_report_due = True
            self._events.at(self.state.load_at_s + REPORT_INTERVAL_S, self._report)

    def fail(self) -> None:
        """It is gone with everything that it held; its requests go on elsewhere."""
        self.state.is_ready = self.state.is_connected = False
        self.engine.stop()
        self._waiting.clear()
        self._owners.clear()
        for request in list(self.live):
            request.worker_failed(self)

    def _began(self, sequence: Sequence) -> None:
        request, fence = self._owners[sequence]
        if request.fence == fence:
            request.compute_started(sequence)

    def _take(self, tokens: StepTokens) -> None:
        """Tokens go to their request; those of an older placement are dropped, and so is their sequence."""
        sequence = tokens.sequence
        request, fence = self._owners.pop(sequence) if tokens.is_last else self._owners[sequence]
        if request.fence == fence:
            request.tokens(tokens)
        else:
            self.engine.release(sequence)

    def _grant(self) -> None:
        pool = self.engine.pool
        while self._waiting:
            waiting = self._waiting[0]
            if waiting.request.fence != waiting.fence:
                self._waiting.popleft()
                continue
            wanted = math.ceil(len(waiting.token_ids) / pool.block_tokens) + 1
            num_blocks = min(wanted, math.ceil(waiting.longest / pool.block_tokens), pool.num_blocks)
            chain = pool.new_chain(SCOPE_KEY)
            blocks = pool.reserve(chain, waiting.token_ids, num_blocks)
            if blocks is None:
                return
            self._waiting.popleft()
            waiting.request.granted(blocks, chain.num_blocks * pool.block_tokens)

    def _blocks_freed(self) -> None:
        if (self._waiting or self.engine.is_blocked) and not self._is_retry_due:
            self._is_retry_due = True
            self._events.after(0.0, self._retry)

    def _retry(self) -> None:
        self._is_retry_due = False
        self._grant()
        if self.engine.is_blocked:
            self.engine.wake()

    def _report(self) -> None:
        self._is_report_due = False
        report = load_report(self.engine.load())
        report.waiting_requests += len(self._waiting)
        report.draining = self.state.load.draining
        self.state.take_report(report, self._events.now_s)
