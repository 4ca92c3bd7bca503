"""A decode worker and its prefill workers as the two pure machines see them: pool, landing, wires, crashes; no I/O.

Every block has content, cell by cell; a freed block is poisoned. Each step is one move: deliver, drop, repeat or
reorder a message or a frame, spoil a frame, let time pass, compute, crash, restart, cancel. After each step the pool is
counted, no block that a writer can reach is free, and every block that an engine may read holds what it must.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.errors import KvLinkBroken, KvTransferFailed, ServerOverloaded, TandemError, WorkerUnavailable
from cluster.identity import BlockId, BlockRef, Incarnation, TransferId, WorkerId
from kv_transfer import decode_events as d
from kv_transfer import decode_transfer, prefill_transfer
from kv_transfer import prefill_events as p
from kv_transfer.coverage import CellRange
from kv_transfer.decode_state import DecodePhase, DecodeTransfer, TransferRequest
from kv_transfer.prefill_transfer import PrefillPhase, PrefillTransfer
from kv_transfer.protocol_limits import ProtocolLimits
from kv_transfer.transfer_ref import TransferRef
from kv_transfer.transport import CancelGuarantee

NUM_LAYERS = 2
NUM_SPARE = 1
CREDIT_BYTES = 3  # cells of one byte: less than most prompts need
DEADLINE_S = 60.0
LIMITS = ProtocolLimits()

Cell = tuple[int, int]  # (layer, block of the prompt)
Content = tuple[TransferId, int, int] | str  # (prompt, block of the prompt, layer), or why it holds nothing


@dataclass
class Frame:
    """One posted operation. Its sender's memory is read until it retires."""

    ref: TransferRef
    peer: d.PeerRef
    seq: int
    cell: Cell
    block: BlockRef
    is_repeat: bool = False  # made by the wire, on nobody's credit
    is_landing: bool = False
    is_spoilt: bool = False


@dataclass
class Landing:
    destination: tuple[BlockRef, ...]
    first_block: int
    verified: dict[int, Cell] = field(default_factory=dict)
    num_bad: int = 0
    num_bytes: int = 0
    is_fenced: bool = False
    pins: int = 0


@dataclass
class Decode:
    """One request on the decode worker."""

    machine: DecodeTransfer
    num_blocks: int
    wants_blocks: bool = False
    connecting: d.PeerRef | None = None
    engine_blocks: tuple[BlockRef, ...] = ()
    outcomes: list[str] = field(default_factory=list)
    committed: dict[TransferRef, frozenset[tuple[int, Cell]]] = field(default_factory=dict)


@dataclass
class Prefill:
    """One attempt on one prefill worker, with its pusher."""

    machine: PrefillTransfer
    ask: d.SendPrefill
    num_blocks: int
    prompt: TransferId
    is_started: bool = False
    written_layers: int = 0
    is_computed: bool = False
    pending: list[Cell] = field(default_factory=list)
    live: dict[int, Cell] = field(default_factory=dict)
    next_seq: int = 0
    posted_bytes: int = 0
    credit_bytes: int = 0
    outstanding: int = 0
    is_sealed: bool = False
    is_stopped: bool = False
    is_drained: bool = False
    has_let_go: bool = False
    holds_blocks: bool = True


@dataclass
class Peer:
    ref: d.PeerRef
    attempts: dict[TransferRef, Prefill] = field(default_factory=dict)
    is_alive: bool = True


@dataclass(frozen=True)
class ToPrefill:
    peer: d.PeerRef
    ref: TransferRef
    action: d.DecodeAction


@dataclass(frozen=True)
class ToDecode:
    transfer_id: TransferId | None  # None: every transfer
    event: d.DecodeEvent
    committed: frozenset[tuple[int, Cell]] | None = None


class World:
    """`step(choice)` makes one move; `settle` ends all faults and lets time pass until nothing is left to do."""

    def __init__(self, guarantee: CancelGuarantee, num_blocks: int = 10, num_peers: int = 2) -> None:
        self.guarantee = guarantee
        self.now = 0.0
        self.state = ["free"] * num_blocks
        self.generation = [0] * num_blocks
        self.content: list[list[Content]] = [["poison"] * NUM_LAYERS for _ in range(num_blocks)]
        self.cached: dict[TransferId, list[BlockRef]] = {}
        self.published: set[BlockRef] = set()
        self.decodes: dict[TransferId, Decode] = {}
        self.peers = [self._new_peer(index, 0) for index in range(num_peers)]
        self.num_restarts = 0
        self.landings: dict[TransferRef, Landing] = {}
        self.wire: list[ToPrefill | ToDecode] = []
        self.frames: list[Frame] = []
        self.paid_twice: set[TransferRef] = set()
        self.counts: Counter[str] = Counter()
        self._events: list[tuple[TransferId, d.DecodeEvent]] = []
        self.num_submitted = 0
        self.outcomes: Counter[str] = Counter()
        self._moves: list[Callable[[int], None]] = [
            move
            for weight, moves in (
                (16, [self.deliver_message, self.deliver_frame, self.compute, self.post]),
                (8, [self.grant, self.connect]),
                (4, [self.submit, self.finish_engine, self.pass_time]),
                (1, [self.drop_message, self.repeat_message, self.cancel, self.list_attempts]),
                (1, [self.drop_frame, self.repeat_frame, self.spoil_frame, self.crash_or_restart]),
            )
            for move in moves * weight
        ]

    # --- moves --------------------------------------------------------------------------------------------------------

    def step(self, choice: int) -> None:
        move, rest = self._moves[choice % len(self._moves)], choice // len(self._moves)
        move(rest)
        self.check()

    def submit(self, choice: int) -> None:
        for transfer_id, side in list(self.decodes.items()):
            if side.machine.is_over and not side.engine_blocks:
                self.outcomes.update(side.outcomes)
                del self.decodes[transfer_id]
        if len(self.decodes) >= 4:
            return
        self.num_submitted += 1
        transfer_id = TransferId(self.num_submitted.to_bytes(16, "big"))
        peers = [peer.ref for peer in self.peers]
        candidates = tuple(peers[choice % len(peers) :] + peers[: choice % len(peers)])
        request = TransferRequest(transfer_id, candidates, choice % 3 != 0, self.now + DEADLINE_S, CREDIT_BYTES, LIMITS)
        self.decodes[transfer_id] = Decode(DecodeTransfer(request), 1 + choice % 4)
        self.tell_decode(transfer_id, d.TransferWanted())

    def grant(self, choice: int) -> None:
        waiting = [side for side in self.decodes.values() if side.wants_blocks]
        if not waiting:
            return
        side = waiting[choice % len(waiting)]
        if choice % 23 == 0:
            side.wants_blocks = False
            self.tell(side, d.ReservationRefused(ServerOverloaded("the queue is full")))
            return
        prompt = side.machine.request.transfer_id
        matched = tuple(self.cached.get(prompt, ())[: side.num_blocks - 1])
        needed = side.num_blocks - len(matched) + NUM_SPARE
        if self.state.count("free") < needed:
            self._evict(prompt)
        free = [block for block, state in enumerate(self.state) if state == "free"]
        if len(free) < needed:
            return
        for ref in matched:
            self.state[ref.block] = "owned"
        if matched:
            self._forget(prompt, len(matched))
        fresh = tuple(BlockRef(BlockId(block), self.generation[block]) for block in free[:needed])
        for ref in fresh:
            self.state[ref.block] = "owned"
        side.wants_blocks = False
        self.tell(side, d.BlocksReserved(matched, fresh[:-NUM_SPARE], fresh[-NUM_SPARE:]))

    def connect(self, choice: int) -> None:
        waiting = [side for side in self.decodes.values() if side.connecting is not None]
        if not waiting:
            return
        side = waiting[choice % len(waiting)]
        asked, side.connecting = side.connecting, None
        assert asked is not None
        is_there = any(peer.ref == asked and peer.is_alive for peer in self.peers)
        if is_there:
            self.tell(side, d.PeerReady(asked, self.guarantee))
        else:
            self.tell(side, d.PeerUnavailable(asked, WorkerUnavailable("not there")))

    def deliver_message(self, choice: int) -> None:
        if self.wire:
            self._deliver(self.wire.pop(choice % len(self.wire) if choice % 4 == 0 else 0))

    def drop_message(self, choice: int) -> None:
        if self.wire:
            self.wire.pop(choice % len(self.wire))
            self.counts["dropped messages"] += 1

    def repeat_message(self, choice: int) -> None:
        if self.wire:
            message = self.wire[choice % len(self.wire)]
            self.wire.append(message)
            self.counts["repeated messages"] += 1
            if isinstance(message, ToPrefill) and isinstance(message.action, d.SendCredit):
                self.paid_twice.add(message.ref)

    def deliver_frame(self, choice: int) -> None:
        """Its bytes begin to land, or the landing ends."""
        if not self.frames:
            return
        frame = self.frames[choice % len(self.frames)]
        if frame.is_landing:
            self._end_landing(frame)
        else:
            self._begin_landing(frame)

    def drop_frame(self, choice: int) -> None:
        """The transport says done, but nothing ever arrives."""
        if self.frames and not (frame := self.frames[choice % len(self.frames)]).is_landing:
            self._retire(frame)
            self.counts["lost frames"] += 1

    def repeat_frame(self, choice: int) -> None:
        if self.frames and self.guarantee is CancelGuarantee.FENCED:
            frame = self.frames[choice % len(self.frames)]
            again = Frame(frame.ref, frame.peer, frame.seq, frame.cell, frame.block, is_repeat=True)
            self.frames.append(again)
            self.counts["repeated frames"] += 1

    def spoil_frame(self, choice: int) -> None:
        if self.frames:
            self.frames[choice % len(self.frames)].is_spoilt = True
            self.counts["spoilt frames"] += 1

    def compute(self, choice: int) -> None:
        attempts = self._computing()
        if not attempts:
            return
        peer, attempt = attempts[choice % len(attempts)]
        if choice % 31 == 7:
            attempt.has_let_go = True
            self.tell_prefill(peer, attempt, p.ComputeFailed(KvTransferFailed("the engine failed")))
            self.tell_prefill(peer, attempt, p.EngineLetGo())
        elif not attempt.is_started:
            attempt.is_started = True
            self.tell_prefill(peer, attempt, p.ComputeStarted())
        elif attempt.written_layers < NUM_LAYERS:
            first = attempt.ask.num_have_blocks
            layer = attempt.written_layers
            attempt.pending += [(layer, block) for block in range(first, attempt.num_blocks)]
            attempt.written_layers += 1
        else:
            attempt.is_computed = attempt.has_let_go = True
            self.tell_prefill(peer, attempt, p.EngineLetGo())
            self.tell_prefill(peer, attempt, p.ComputeEnded())
            self._seal_when_done(peer, attempt)

    def post(self, choice: int) -> None:
        ready = [
            (peer, attempt)
            for peer in self.peers
            if peer.is_alive
            for attempt in peer.attempts.values()
            if attempt.pending and not attempt.is_stopped and attempt.posted_bytes < attempt.credit_bytes
        ]
        if not ready:
            return
        peer, attempt = ready[choice % len(ready)]
        cell = attempt.pending.pop(0)
        block = attempt.ask.destination[cell[1] - attempt.ask.num_have_blocks]
        self.frames.append(Frame(attempt.ask.ref, peer.ref, attempt.next_seq, cell, block))
        attempt.live[attempt.next_seq] = cell
        attempt.next_seq += 1
        attempt.posted_bytes += 1
        attempt.outstanding += self.guarantee is CancelGuarantee.MUST_DRAIN
        self._seal_when_done(peer, attempt)

    def finish_engine(self, choice: int) -> None:
        running = [side for side in self.decodes.values() if side.engine_blocks]
        if running:
            side = running[choice % len(running)]
            blocks, side.engine_blocks = side.engine_blocks, ()
            self._release(blocks)

    def cancel(self, choice: int) -> None:
        live = [side for side in self.decodes.values() if not side.machine.is_over]
        if live:
            self.tell(live[choice % len(live)], d.RequestCancelled())

    def list_attempts(self, choice: int) -> None:
        peer = self.peers[choice % len(self.peers)]
        if not peer.is_alive:
            return
        for side in list(self.decodes.values()):
            attempt = side.machine.attempt
            if attempt is not None and attempt.peer == peer.ref:
                is_listed = attempt.ref in peer.attempts and not peer.attempts[attempt.ref].machine.is_over
                self.wire.append(ToDecode(attempt.ref.transfer_id, d.PeerListed(attempt.ref, is_listed)))

    def pass_time(self, choice: int) -> None:
        self.now += (0.01, 0.05, 0.1, 0.3, 0.6, 1.1, 5.1)[choice % 7]
        self._tick()

    def crash_or_restart(self, choice: int) -> None:
        if choice % 11 == 0:
            self._crash_decode()
            return
        index = choice % len(self.peers)
        peer = self.peers[index]
        if peer.is_alive:
            peer.is_alive = False
            self.counts["crashes"] += 1
            self.wire.append(ToDecode(None, d.PeerGone(peer.ref, WorkerUnavailable("connection reset"))))
        else:
            self.num_restarts += 1
            self.peers[index] = self._new_peer(index, self.num_restarts)

    # --- settle -------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """No more faults: within the deadline and the time to drain everything must be over on both sides."""
        for _ in range(400):
            for _ in range(60):
                for move in (self.deliver_message, self.deliver_frame, self.compute, self.post, self.connect):
                    move(1)
                self.grant(1)
                self.finish_engine(1)
            self.check()
            self.now += 0.5
            self._tick()
            if self._is_quiet():
                break
        self.check()
        for side in self.decodes.values():
            self.outcomes.update(side.outcomes)
            assert side.machine.is_over, side.machine
            assert side.outcomes, f"{side.machine.phase} told nobody"
        for peer in self.peers:
            for attempt in peer.attempts.values():
                assert not peer.is_alive or (attempt.machine.is_over and not attempt.holds_blocks), attempt.machine
        self._evict(None)
        assert self.state.count("free") == len(self.state), Counter(self.state)

    def _is_quiet(self) -> bool:
        return (
            all(side.machine.is_over and not side.engine_blocks for side in self.decodes.values())
            and all(
                attempt.machine.is_over for peer in self.peers if peer.is_alive for attempt in peer.attempts.values()
            )
            and not self.wire
            and not self.frames
        )

    # --- what must always hold ----------------------------------------------------------------------------------------

    def check(self) -> None:
        owned: Counter[int] = Counter()
        for side in self.decodes.values():
            for ref in (*side.machine.blocks, *side.engine_blocks):
                owned[ref.block] += 1
                assert self.state[ref.block] == "owned", (ref, self.state[ref.block])
                assert self.generation[ref.block] == ref.generation
            for held in side.machine.quarantined:
                for ref in held.blocks:
                    owned[ref.block] += 1
                    assert self.state[ref.block] == "quarantined"
            prompt = side.machine.request.transfer_id
            self._check_content(prompt, side.engine_blocks[: side.num_blocks])
        for prompt, refs in self.cached.items():
            for ref in refs:
                assert self.state[ref.block] == "cached"
            self._check_content(prompt, tuple(refs))
        assert not owned or max(owned.values()) == 1
        in_use = sum(state in ("owned", "quarantined") for state in self.state)
        assert in_use == len(owned), (self.state, owned)
        self._check_writers()
        for peer in self.peers:
            for attempt in peer.attempts.values():
                assert attempt.posted_bytes <= attempt.credit_bytes
                self._check_credit(peer, attempt)
                assert attempt.holds_blocks or attempt.outstanding == 0, "freed under a posted operation"

    def _check_credit(self, peer: Peer, attempt: Prefill) -> None:
        """No more is on its way than the decode worker's limit. What was lost and asked for again may still come."""
        ref = attempt.ask.ref
        limit = CREDIT_BYTES + attempt.machine.asked_again_bytes
        assert attempt.credit_bytes - attempt.posted_bytes <= limit, ref
        if ref not in self.paid_twice:
            on_its_way = sum(not frame.is_repeat for frame in self.frames if (frame.ref, frame.peer) == (ref, peer.ref))
            assert on_its_way <= limit, (ref, on_its_way)

    def _check_writers(self) -> None:
        """A block that somebody can still write into is owned or in quarantine, at that writer's generation."""
        reachable = [ref for landing in self.landings.values() for ref in landing.destination]
        if self.guarantee is CancelGuarantee.MUST_DRAIN:
            reachable = [frame.block for frame in self.frames]
        for ref in reachable:
            assert self.state[ref.block] in ("owned", "quarantined"), (ref, self.state[ref.block])
            assert self.generation[ref.block] == ref.generation, (ref, self.generation[ref.block])

    def _check_content(self, prompt: TransferId, blocks: tuple[BlockRef, ...]) -> None:
        for index, ref in enumerate(blocks):
            expected = [(prompt, index, layer) for layer in range(NUM_LAYERS)]
            assert self.content[ref.block] == expected, (index, ref, self.content[ref.block])

    # --- the decode worker --------------------------------------------------------------------------------------------

    def tell(self, side: Decode, event: d.DecodeEvent) -> None:
        self.tell_decode(side.machine.request.transfer_id, event)

    def tell_decode(self, transfer_id: TransferId, event: d.DecodeEvent) -> None:
        self._events.append((transfer_id, event))
        if len(self._events) > 1:
            return  # an action of an event in progress: after it
        while self._events:
            transfer_id, event = self._events[0]
            side = self.decodes[transfer_id]
            side.machine, actions = decode_transfer.apply(side.machine, event, self.now)
            for action in actions:
                self._do(side, action)
            self._events.pop(0)

    def _do(self, side: Decode, action: d.DecodeAction) -> None:
        match action:
            case d.MatchAndReserve():
                side.wants_blocks = True
            case d.CancelReservation():
                side.wants_blocks = False
            case d.ConnectPeer(peer):
                side.connecting = peer
            case d.OpenLanding(ref, destination, first_block):
                self.landings[ref] = Landing(destination, first_block)
            case d.CheckArrival(ref):
                self._check_arrival(side, ref)
            case d.Fence(ref):
                self.landings[ref].is_fenced = True
                self._close_fence(ref)
            case d.DestroyEndpoint(ref, peer):
                self._destroy(peer)
                self.tell(side, d.EndpointDestroyed(ref))
            case d.PublishPrefix(blocks):
                self.published.update(blocks)
                self.counts["salvages"] += 1
            case d.ReleaseBlocks(blocks):
                self._release(blocks, side.machine.request.transfer_id)
            case d.QuarantineBlocks(_, blocks):
                for block in blocks:
                    self.state[block.block] = "quarantined"
                self.counts["quarantines"] += 1
            case d.FreeQuarantined(_, blocks):
                for block in blocks:
                    self._free(block)
            case d.AdmitToEngine(_, blocks):
                self._admit(side, blocks)
            case d.PrefillLocally() | d.ReportFailure():
                side.outcomes.append(type(action).__name__)
            case _:
                self._send_to_prefill(side, action)
        if side.machine.phase is DecodePhase.CANCELLED and not side.outcomes:
            side.outcomes.append("Cancelled")

    def _send_to_prefill(self, side: Decode, action: d.DecodeAction) -> None:
        attempt = side.machine.attempt
        ref: TransferRef = action.ref  # type: ignore[union-attr]
        if isinstance(action, d.SendPrefill):
            self.wire.append(ToPrefill(action.peer, ref, action))
            return
        held = [held.peer for held in side.machine.quarantined if held.ref == ref]
        if attempt is not None and attempt.ref == ref:
            held.append(attempt.peer)
        for peer in held[:1]:
            self.wire.append(ToPrefill(peer, ref, action))

    def _check_arrival(self, side: Decode, ref: TransferRef) -> None:
        landing = self.landings[ref]
        wanted = {
            (layer, landing.first_block + index)
            for layer in range(NUM_LAYERS)
            for index in range(len(landing.destination))
        }
        missing = sorted(wanted - set(landing.verified.values()))
        ranges = tuple(CellRange(layer, 1, block, 1) for layer, block in missing)
        is_equal = frozenset(landing.verified.items()) == side.committed.get(ref)
        self.tell(side, d.ArrivalChecked(ref, ranges, len(missing), is_equal, True))

    def _admit(self, side: Decode, blocks: tuple[BlockRef, ...]) -> None:
        self._check_content(side.machine.request.transfer_id, blocks[: side.num_blocks])
        self.counts["admissions"] += 1
        if self.counts["admissions"] % 7 == 0:
            self.tell(side, d.EngineRefused(ServerOverloaded("the engine is full")))
            return
        side.engine_blocks = blocks
        side.outcomes.append("Runnable")
        self.tell(side, d.EngineAdmitted())

    # --- the pool -----------------------------------------------------------------------------------------------------

    def _release(self, blocks: tuple[BlockRef, ...], prompt: TransferId | None = None) -> None:
        for ref in blocks:
            assert self.state[ref.block] == "owned", (ref, self.state[ref.block])
            if ref in self.published and prompt is not None:
                self.state[ref.block] = "cached"
                self.cached.setdefault(prompt, []).append(ref)
            else:
                self._free(ref)

    def _free(self, ref: BlockRef) -> None:
        assert self.state[ref.block] in ("owned", "quarantined", "cached")
        assert self.generation[ref.block] == ref.generation
        self.published.discard(ref)
        self.generation[ref.block] += 1
        self.state[ref.block] = "free"
        self.content[ref.block] = ["poison"] * NUM_LAYERS

    def _forget(self, prompt: TransferId, num_blocks: int) -> None:
        del self.cached[prompt][:num_blocks]
        self._evict(None, only=prompt)

    def _evict(self, keep: TransferId | None, only: TransferId | None = None) -> None:
        for prompt in list(self.cached):
            if prompt != keep and only in (None, prompt):
                for ref in self.cached.pop(prompt):
                    self._free(ref)

    # --- frames -------------------------------------------------------------------------------------------------------

    def _begin_landing(self, frame: Frame) -> None:
        landing = self.landings.get(frame.ref)
        is_open = (
            landing is not None
            and not landing.is_fenced
            and frame.seq not in landing.verified
            and frame.cell not in landing.verified.values()
        )
        if self.guarantee is CancelGuarantee.FENCED and not is_open:
            self.frames.remove(frame)  # drained and dropped
            self.counts["stale frames"] += 1
            return
        if self.guarantee is CancelGuarantee.FENCED:
            others = [other for other in self.frames if other.ref == frame.ref and other.cell == frame.cell]
            if any(other.is_landing for other in others):
                self.frames.remove(frame)
                return
            assert landing is not None
            landing.pins += 1
        frame.is_landing = True
        self.content[frame.block.block][frame.cell[0]] = "torn"

    def _end_landing(self, frame: Frame) -> None:
        layer, index = frame.cell
        value: Content = "spoilt" if frame.is_spoilt else (frame.ref.transfer_id, index, layer)
        self.content[frame.block.block][layer] = value
        landing = self.landings.get(frame.ref)
        if landing is not None and not landing.is_fenced:
            if frame.is_spoilt:
                landing.num_bad += 1
            else:
                landing.verified[frame.seq] = frame.cell
            landing.num_bytes += 1
            totals = d.FramesLanded(frame.ref, len(landing.verified), landing.num_bad, landing.num_bytes)
            self._retire(frame, landing)
            self.wire.append(ToDecode(frame.ref.transfer_id, totals))
        else:
            self._retire(frame, landing)

    def _retire(self, frame: Frame, landing: Landing | None = None) -> None:
        self.frames.remove(frame)
        if frame.is_landing and landing is not None and self.guarantee is CancelGuarantee.FENCED:
            landing.pins -= 1
            self._close_fence(frame.ref)
        if self.guarantee is CancelGuarantee.MUST_DRAIN:
            for peer in self.peers:
                if peer.ref == frame.peer and frame.ref in peer.attempts:
                    attempt = peer.attempts[frame.ref]
                    attempt.outstanding -= 1
                    if peer.is_alive:
                        self._seal_when_done(peer, attempt)
                        self._drain_when_done(peer, attempt)

    def _close_fence(self, ref: TransferRef) -> None:
        landing = self.landings.get(ref)
        if landing is None or not landing.is_fenced or landing.pins:
            return
        complete = 0
        cells = set(landing.verified.values())
        while complete < len(landing.destination) and all(
            (layer, landing.first_block + complete) in cells for layer in range(NUM_LAYERS)
        ):
            complete += 1
        del self.landings[ref]
        if ref.transfer_id in self.decodes:
            self.tell_decode(ref.transfer_id, d.FenceClosed(ref, complete))

    def _destroy(self, gone: d.PeerRef) -> None:
        """The session is no more: its stream, its link and all that was posted on it, for the whole pair."""
        self.counts["destroyed endpoints"] += 1
        self.wire = [message for message in self.wire if not (isinstance(message, ToPrefill) and message.peer == gone)]
        for frame in [frame for frame in self.frames if frame.peer == gone]:
            self._retire(frame, self.landings.get(frame.ref))
        for side in list(self.decodes.values()):
            attempt = side.machine.attempt
            if attempt is not None and attempt.peer == gone:
                self.tell(side, d.LinkFailed(attempt.ref, KvLinkBroken("the endpoint was destroyed")))
                self.counts["relinked"] += bool(side.machine.relinked)
        for peer in self.peers:
            if peer.ref == gone and peer.is_alive:
                for prefill in list(peer.attempts.values()):
                    self.tell_prefill(peer, prefill, p.DecodeWorkerGone())

    # --- prefill workers ----------------------------------------------------------------------------------------------

    def _new_peer(self, index: int, restart: int) -> Peer:
        return Peer(d.PeerRef(WorkerId(f"p{index}"), Incarnation(f"{restart}")))

    def _computing(self) -> list[tuple[Peer, Prefill]]:
        phases = (PrefillPhase.QUEUED, PrefillPhase.COMPUTING)
        return [
            (peer, attempt)
            for peer in self.peers
            if peer.is_alive
            for attempt in peer.attempts.values()
            if attempt.machine.phase in phases
        ]

    def _deliver(self, message: ToPrefill | ToDecode) -> None:
        if isinstance(message, ToDecode):
            self._deliver_to_decode(message)
            return
        peer = next((peer for peer in self.peers if peer.ref == message.peer and peer.is_alive), None)
        if peer is None:
            return
        attempt = peer.attempts.get(message.ref)
        match message.action:
            case d.SendPrefill() as ask:
                if attempt is None:
                    self._ask(peer, ask)
                return
            case _ if attempt is None:
                return
            case d.SendCredit(_, num_bytes):
                event: p.PrefillEvent = p.CreditGranted(num_bytes, attempt.posted_bytes)
            case d.SendResend(_, ranges, tries_left):
                event = p.ResendAsked(ranges, tries_left, sum(cells.num_cells for cells in ranges))
            case d.SendCommitAck(_, is_ok, _):
                event = p.Acknowledged(is_ok)
            case d.SendCancel(_, reason):
                event = p.CancelAsked(reason)
            case other:
                raise AssertionError(f"not a message: {other}")
        self.tell_prefill(peer, attempt, event)

    def _ask(self, peer: Peer, ask: d.SendPrefill) -> None:
        side = self.decodes.get(ask.ref.transfer_id)
        if side is None:
            return
        machine = PrefillTransfer(ask.ref, self.now + ask.deadline_s, ask.credit_bytes, CREDIT_BYTES, limits=LIMITS)
        attempt = Prefill(machine, ask, side.num_blocks, ask.ref.transfer_id, credit_bytes=ask.credit_bytes)
        peer.attempts[ask.ref] = attempt
        self.tell_prefill(peer, attempt, p.PrefillAsked())

    def _deliver_to_decode(self, message: ToDecode) -> None:
        targets = list(self.decodes) if message.transfer_id is None else [message.transfer_id]
        for transfer_id in targets:
            side = self.decodes.get(transfer_id)
            if side is None:
                continue
            if message.committed is not None and isinstance(message.event, d.RankCommitted):
                side.committed[message.event.ref] = message.committed
            self.tell(side, message.event)

    def tell_prefill(self, peer: Peer, attempt: Prefill, event: p.PrefillEvent) -> None:
        attempt.machine, actions = prefill_transfer.apply(attempt.machine, event, self.now)
        for action in actions:
            self._do_prefill(peer, attempt, action)

    def _do_prefill(self, peer: Peer, attempt: Prefill, action: p.PrefillAction) -> None:
        ref = attempt.ask.ref
        reply: d.DecodeEvent
        committed = None
        match action:
            case p.SubmitToEngine():
                is_full = sum(not other.machine.is_over for other in peer.attempts.values()) > 3
                error: TandemError = ServerOverloaded("the queue is full")
                self.tell_prefill(peer, attempt, p.EngineRefused(error) if is_full else p.EngineQueued())
                attempt.holds_blocks = not is_full
                return
            case p.AddPushCredit(num_bytes):
                attempt.credit_bytes += num_bytes
                return
            case p.ResendCells(ranges):
                cells = [(cells.first_layer, cells.first_block) for cells in ranges]
                attempt.live = {seq: cell for seq, cell in attempt.live.items() if cell not in cells}
                attempt.pending += cells
                attempt.is_sealed = False
                return
            case p.CancelPush():
                attempt.is_stopped = True
                attempt.pending.clear()
                self._drain_when_done(peer, attempt)
                return
            case p.CancelCompute():
                if not attempt.has_let_go:
                    attempt.has_let_go = True
                    self.tell_prefill(peer, attempt, p.EngineLetGo())
                return
            case p.DestroyEndpoint():
                self._destroy(peer.ref)
                return
            case p.ReleaseBlocks():
                attempt.holds_blocks = False
                return
            case p.SendAccept():
                reply = d.Accepted(ref)
            case p.SendReject(error):
                reply = d.Rejected(ref, error)
            case p.SendProgress():
                reply = d.ProgressMade(ref)
            case p.SendCommit(num_frames, num_bytes, num_resends):
                reply = d.RankCommitted(ref, 0, num_frames, num_resends, num_bytes=num_bytes)
                committed = frozenset(attempt.live.items())
            case p.SendFailedCommit(error):
                self.counts["refused credits"] += "own limit" in error.message
                reply = d.RankCommitted(ref, 0, 0, failure=error)
            case p.SendDrained():
                reply = d.RankDrained(ref, 0)
        self.wire.append(ToDecode(ref.transfer_id, reply, committed))

    def _seal_when_done(self, peer: Peer, attempt: Prefill) -> None:
        is_all_posted = attempt.written_layers == NUM_LAYERS and not attempt.pending
        if is_all_posted and not attempt.outstanding and not attempt.is_sealed and not attempt.is_stopped:
            attempt.is_sealed = True
            self.tell_prefill(peer, attempt, p.PushSealed(len(attempt.live), len(attempt.live)))

    def _drain_when_done(self, peer: Peer, attempt: Prefill) -> None:
        if attempt.is_stopped and not attempt.outstanding and not attempt.is_drained:
            attempt.is_drained = True
            self.tell_prefill(peer, attempt, p.PushDrained(attempt.next_seq))

    # --- time and crashes ---------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        for transfer_id in list(self.decodes):
            self.tell_decode(transfer_id, d.Tick())
        for peer in self.peers:
            if peer.is_alive:
                for attempt in list(peer.attempts.values()):
                    self.tell_prefill(peer, attempt, p.Tick())

    def _crash_decode(self) -> None:
        """The decode worker starts anew: an empty pool, and every prefill worker's stream breaks."""
        self.counts["decode crashes"] += 1
        num_blocks = len(self.state)
        self.state = ["free"] * num_blocks
        self.content = [["poison"] * NUM_LAYERS for _ in range(num_blocks)]
        self.cached.clear()
        self.published.clear()
        self.decodes.clear()
        self.landings.clear()
        for frame in list(self.frames):
            self._retire(frame)
        self.wire = [message for message in self.wire if isinstance(message, ToPrefill)]
        for peer in self.peers:
            if peer.is_alive:
                for attempt in list(peer.attempts.values()):
                    self.tell_prefill(peer, attempt, p.DecodeWorkerGone())
