"""A prompt's KV on its way to this worker: what the pure machine decides for one request, carried out.

    reservations, peers, landing table, time ──events──> decode_transfer ──actions──> blocks, messages, the flow

Frames land on a transport's thread; everything here runs on the event loop. A landing may outlive its request: blocks
that a peer can still write into stay in quarantine until the machine hears that they cannot be reached any more.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from tandem.v1 import handoff_pb2

from cluster.errors import KvLinkBroken, TandemError, WorkerUnavailable, from_failure
from cluster.identity import BlockRef, Incarnation, WorkerId, new_transfer_id
from decode_worker.landing_messages import Landed, LandingMessages, rejection
from decode_worker.landing_resources import LandingResources, TransferPeer
from decode_worker.peer_link import PeerLink
from decode_worker.request_check import AcceptedRequest
from decode_worker.request_timeline import RequestMoment, RequestTimeline
from decode_worker.reservations import Reservation
from kv_transfer import decode_events as on
from kv_transfer.decode_state import DecodePhase, DecodeTransfer, TransferRequest
from kv_transfer.decode_transfer import apply, next_tick_s
from kv_transfer.protocol_limits import ProtocolViolation
from kv_transfer.transfer_ref import TransferRef
from kv_transfer.transport import CancelGuarantee

# What a request without a deadline of its own gets.
DEFAULT_DEADLINE_S = 600.0

logger = logging.getLogger(__name__)


class PromptLanding:
    """Implements `TransferListener`. One for each request that names prefill workers."""

    def __init__(
        self,
        request: AcceptedRequest,
        resources: LandingResources,
        timeline: RequestTimeline,
        on_over: Callable[[PromptLanding], None],
    ) -> None:
        self.local_reason: TandemError | None = None  # why this worker must prefill by itself
        self._request = request
        self._resources = resources
        self._messages = LandingMessages(request, resources.layout.block_tokens, resources.limits.idle_s)
        self._timeline = timeline
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._addresses = {
            on.PeerRef(WorkerId(placement.worker_id), Incarnation(placement.incarnation)): placement.control_address
            for placement in request.placements
        }
        deadline_s = self._loop.time() + (request.deadline_s or DEFAULT_DEADLINE_S)
        self._transfer = DecodeTransfer(
            TransferRequest(
                transfer_id=new_transfer_id(),
                candidates=tuple(self._addresses),
                allow_local_prefill=request.allow_local_prefill,
                deadline_s=deadline_s,
                # Every destination block is reserved: P may send all of it ahead, within what our Hello says.
                credit_bytes=min(
                    -(-request.num_tokens // resources.layout.block_tokens) * resources.layout.block_bytes,
                    resources.max_credit_bytes,
                ),
                limits=resources.limits,
            )
        )
        self._events: deque[on.DecodeEvent] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._reserving: asyncio.Task[None] | None = None
        self._reservation: Reservation | None = None
        self._peer: TransferPeer | None = None
        self._links: dict[TransferRef, tuple[TransferPeer, PeerLink]] = {}  # that attempts were asked over
        self._peer_ref: on.PeerRef | None = None
        self._commit: handoff_pb2.Commit | None = None
        self._is_offered = False  # to the engine
        self._outcome: asyncio.Future[Landed | None] = self._loop.create_future()

    @property
    def num_reserved(self) -> int:
        """Blocks that wait for their KV."""
        return len(self._transfer.destination) + len(self._transfer.spare)

    async def land(self) -> Landed | None:
        """The prompt with its KV here; None when this worker shall prefill it. Raises what went wrong in the end."""
        self._apply(on.TransferWanted())
        return await self._outcome

    def admitted(self) -> None:
        """The engine owns the blocks now."""
        self._apply(on.EngineAdmitted())

    def refused(self, error: TandemError) -> None:
        """The engine did not take them."""
        self._apply(on.EngineRefused(error))

    def cancel(self) -> None:
        """The request has ended; changes nothing when the landing has, too. Offered blocks that nobody took go back."""
        self._apply(on.RequestCancelled())
        if self._is_offered:
            self._apply(on.EngineRefused(WorkerUnavailable("the request has ended")))

    # --- what is heard ------------------------------------------------------------------------------------------------

    def on_message(self, message: handoff_pb2.PrefillToDecode) -> None:
        match message.WhichOneof("message"):
            case "accept":
                self._apply(on.Accepted(TransferRef.of(message.accept.key)))
            case "reject":
                self._apply(on.Rejected(TransferRef.of(message.reject.key), rejection(message.reject)))
            case "progress":
                self._apply(on.ProgressMade(TransferRef.of(message.progress.key)))
            case "commit":
                self._committed(message.commit)
            case "drained":
                self._apply(on.RankDrained(TransferRef.of(message.drained.key), message.drained.src_rank))

    def listed(self, ref: TransferRef, is_listed: bool) -> None:
        self._apply(on.PeerListed(ref, is_listed))

    def peer_gone(self, error: TandemError) -> None:
        if self._peer_ref is not None:
            kind = KvLinkBroken if isinstance(error, KvLinkBroken) else WorkerUnavailable
            gone = kind(f"{self._peer_ref.worker_id} is gone: {error.message}", stage="transfer")
            self._apply(on.PeerGone(self._peer_ref, gone))

    def _committed(self, commit: handoff_pb2.Commit) -> None:
        self._commit = commit
        failure = from_failure(commit.failure) if commit.HasField("failure") else None
        ref = TransferRef.of(commit.key)
        if isinstance(failure, KvLinkBroken) and ref in self._links:
            peer, link = self._links[ref]
            peer.hang_up(link, failure.message)  # before anything is asked over it again
        self._apply(
            on.RankCommitted(ref, commit.src_rank, commit.num_frames, commit.num_resends, failure, commit.num_bytes)
        )

    def _frame_landed(self, ref: TransferRef) -> None:
        landed = self._resources.table.progress(ref.transfer_id, ref.epoch)
        if landed is not None:
            self._timeline.mark_once(RequestMoment.FIRST_FRAME)
            self._apply(on.FramesLanded(ref, landed.num_verified_frames, landed.num_bad_frames, landed.num_bytes))

    def _from_thread(self, call: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has ended: so has everything here
            self._loop.call_soon_threadsafe(call, *arguments)

    # --- the machine --------------------------------------------------------------------------------------------------

    def _apply(self, event: on.DecodeEvent) -> None:
        """One event after the other: an action may be answered before its neighbours are carried out."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            try:
                self._transfer, actions = apply(self._transfer, self._events[0], self._loop.time())
                for action in actions:
                    self._carry_out(action)
            except Exception as error:  # our own bug: the request must not hang on it
                logger.exception("landing of %s: %s", self._request.engine_id, type(self._events[0]).__name__)
                self._end(ProtocolViolation(f"internal error: {type(error).__name__}", stage="transfer"))
            self._events.popleft()
        self._set_timer()
        if self._transfer.is_over:
            self._outcome.cancel()  # unless it has been told: then this changes nothing
            self._on_over(self)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tick_s = next_tick_s(self._transfer)
        self._timer = self._loop.call_at(tick_s, self._apply, on.Tick()) if tick_s is not None else None

    def _carry_out(self, action: on.DecodeAction) -> None:
        pool = self._resources.reservations.pool
        match action:
            case on.MatchAndReserve():
                self._reserving = self._spawn(self._reserve())
            case on.CancelReservation():
                if self._reserving is not None:
                    self._reserving.cancel()
            case on.ConnectPeer(peer):
                self._spawn(self._connect(peer))
            case on.OpenLanding(ref, destination, first_block):
                self._open(ref, destination, first_block)
            case on.SendPrefill():
                self._ask(action)
            case on.SendCredit() | on.SendResend() | on.SendCommitAck() | on.SendCancel():
                self._tell(action)
            case on.CheckArrival(ref):
                self._check(ref)
            case on.Fence(ref):
                self._fence(ref)
            case on.DestroyEndpoint(ref):
                self._spawn(self._destroy_endpoint(ref))
            case on.PublishPrefix(blocks):
                self._publish(blocks)
            case on.ReleaseBlocks(blocks):
                pool.release(blocks)
            case on.QuarantineBlocks(_, blocks):
                pool.quarantine(blocks)
            case on.FreeQuarantined(_, blocks):
                pool.unquarantine(blocks)
            case on.AdmitToEngine(_, blocks):
                self._offer(blocks)
            case on.PrefillLocally(failure):
                self.local_reason = failure
                self._end(None)
            case on.ReportFailure(error):
                self._end(error)

    def _end(self, error: TandemError | None) -> None:
        if self._outcome.done():
            return
        if error is not None:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(None)

    def _spawn(self, step: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(step, name=f"landing {self._request.engine_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- reserve and ask ----------------------------------------------------------------------------------------------

    async def _reserve(self) -> None:
        try:
            reservation = await self._resources.reservations.take(self._request)
        except TandemError as error:
            self._apply(on.ReservationRefused(error))
            return
        self._reservation = reservation
        self._timeline.mark(RequestMoment.RESERVED)
        num_missing = len(reservation.destination)
        self._apply(
            on.BlocksReserved(
                matched=tuple(reservation.matched),
                destination=tuple(reservation.destination),
                spare=tuple(reservation.fresh[num_missing:]),
            )
        )

    async def _connect(self, peer_ref: on.PeerRef) -> None:
        try:
            address, ready = self._addresses[peer_ref], self._resources.peers.ready
            if (
                peer_ref in self._transfer.relinked
            ):  # it is there: its new link is worth as long as a handshake may take
                connect_s = self._resources.limits.connect_s
                peer = await ready(peer_ref.worker_id, peer_ref.incarnation, address, connect_s)
            else:
                peer = await ready(peer_ref.worker_id, peer_ref.incarnation, address)
        except WorkerUnavailable as error:
            self._resources.metrics.attempt_failed(error)
            self._apply(on.PeerUnavailable(peer_ref, error))
            return
        self._peer, self._peer_ref = peer, peer_ref
        # Every receiving end of ours copies, or pins what it granted until its sender is done or gone: a closed fence
        # means that nothing can land any more.
        self._apply(on.PeerReady(peer_ref, CancelGuarantee.FENCED))

    def _open(self, ref: TransferRef, destination: tuple[BlockRef, ...], first_block: int) -> None:
        self._resources.table.open(
            ref.transfer_id,
            ref.epoch,
            destination,
            first_block,
            lambda *_: self._from_thread(self._frame_landed, ref),
        )
        peer = self._known_peer()
        peer.register(ref, self)
        if peer.link is not None:
            self._links[ref] = (peer, peer.link)

    async def _destroy_endpoint(self, ref: TransferRef) -> None:
        """Breaks the session that the attempt was asked over and waits for its last writer: without a deadline, for
        these blocks cannot be used before."""
        if ref in self._links:
            peer, link = self._links[ref]
            peer.hang_up(link, f"the end of {ref} did not come")
            await link.silent.wait()
        self._apply(on.EndpointDestroyed(ref))

    def _ask(self, action: on.SendPrefill) -> None:
        self._timeline.begin_attempt()
        try:
            self._known_peer().send(self._messages.to_send(action))
        except WorkerUnavailable as error:
            self._apply(on.PeerGone(action.peer, error))

    # --- receive and verify -------------------------------------------------------------------------------------------

    def _check(self, ref: TransferRef) -> None:
        arrived = self._resources.table.arrived(ref.transfer_id, ref.epoch)
        if arrived is None or self._commit is None:
            raise ProtocolViolation("checked an attempt that is not open")
        cell_bytes = self._resources.layout.cell_bytes
        self._apply(
            on.ArrivalChecked(
                ref=ref,
                missing=arrived.missing,
                missing_bytes=sum(cells.num_layers * cells.num_blocks * cell_bytes for cells in arrived.missing),
                digests_match=hmac.compare_digest(arrived.root_digest, self._commit.root_digest),
                generations_match=self._resources.reservations.pool.holds(self._transfer.destination),
            )
        )

    def _fence(self, ref: TransferRef) -> None:
        """Success or not: the attempt is over for its peer, and nothing more of it is let in."""
        table = self._resources.table
        arrived = table.arrived(ref.transfer_id, ref.epoch)
        num_complete = arrived.num_complete_blocks if arrived is not None else 0
        self._known_peer().unregister(ref)
        if self._transfer.phase is DecodePhase.CANCELLING and self._transfer.last_error is not None:
            self._resources.metrics.attempt_failed(self._transfer.last_error)
            logger.warning("transfer %s ends: %s", ref, self._transfer.last_error.message)
        closed = on.FenceClosed(ref, num_complete)
        table.fence(ref.transfer_id, ref.epoch, lambda: self._from_thread(self._apply, closed))

    def _publish(self, blocks: tuple[BlockRef, ...]) -> None:
        reservation = self._reservation
        if reservation is not None:
            num_tokens = min(len(blocks) * self._resources.layout.block_tokens, self._request.num_tokens)
            reservation.pool.publish(reservation.chain, self._request.token_ids, blocks, num_tokens)

    def _offer(self, blocks: tuple[BlockRef, ...]) -> None:
        commit, peer = self._commit, self._known_peer()
        if commit is None:
            raise ProtocolViolation("verified without a commit")
        timeline = self._timeline
        timeline.mark(RequestMoment.VERIFIED)
        timeline.prefill_worker_id = peer.worker_id
        timeline.transport = peer.link.transport if peer.link else ""
        timeline.prefill_queued_s = commit.queued_us / 1e6
        timeline.prefill_compute_s = commit.compute_us / 1e6
        timeline.kv_bytes += commit.num_bytes
        timeline.kv_frames += commit.num_frames
        self._resources.metrics.landed(timeline)
        self._is_offered = True
        if self._outcome.done():  # nobody waits any more
            self.cancel()
        else:
            self._outcome.set_result(self._messages.landed(commit, blocks, len(self._transfer.matched)))

    # --- small steps --------------------------------------------------------------------------------------------------

    def _tell(self, action: on.SendCredit | on.SendResend | on.SendCommitAck | on.SendCancel) -> None:
        """A peer whose stream is broken hears nothing, and needs to hear nothing: it has given us up."""
        with suppress(WorkerUnavailable):
            self._known_peer().send(self._messages.to_send(action))

    def _known_peer(self) -> TransferPeer:
        if self._peer is None:
            raise ProtocolViolation("no peer was connected")
        return self._peer
