"""One attempt to get a prompt's KV from one prefill worker.

    REQUESTED ──Accept──> RECEIVING ──Commit──> SEALED ──every cell verified, root equal──> VERIFIED
        │Reject               │ time-out, peer gone, Commit with a failure, digests wrong after two resends
        v                     v
    ArrivalRejected       CANCELLING: fence, keep what verified, quarantine the rest until no writer is left

Frames land on a transport's thread; everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import enum
import hmac
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from tandem.v1 import handoff_pb2

from cluster.errors import KvTransferFailed, RetryElsewhere, TandemError, WorkerUnavailable, from_failure
from cluster.identity import TransferId, WorkerId
from cluster.kv_layout import KvLayout
from decode_worker.prefill_peer import PeerLink, TransferListener
from decode_worker.request_check import AcceptedRequest
from decode_worker.request_timeline import RequestMoment, RequestTimeline
from decode_worker.reservations import Reservation
from engine import logprob_messages
from engine.request import LandedPrompt, PositionLogprobs
from kv_transfer.coverage import CellRange
from kv_transfer.landing_table import LandingTable
from kv_transfer.protocol_limits import MAX_RESENDS, ProtocolLimits
from kv_transfer.transfer_ref import TransferRef

LIMITS = ProtocolLimits()
# What P is told when the request has no deadline of its own.
DEFAULT_DEADLINE_S = 600.0


class ArrivalRejected(Exception):
    """P took nothing on: the reservation is untouched."""

    def __init__(self, error: TandemError) -> None:
        super().__init__(error.message)
        self.error = error


class ArrivalFailed(Exception):
    """The attempt is over and its reservation is given away: salvaged, freed or in quarantine."""

    def __init__(self, error: TandemError) -> None:
        super().__init__(error.message)
        self.error = error


class ArrivalState(enum.Enum):
    REQUESTED = "requested"
    RECEIVING = "receiving"
    SEALED = "sealed"
    VERIFIED = "verified"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Landed:
    """What a verified attempt gives."""

    prompt: LandedPrompt
    prompt_logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class LandingGate:
    """Where frames land, and the shape of what they carry."""

    table: LandingTable
    layout: KvLayout


class TransferPeer(Protocol):
    """The way to the prefill worker (`prefill_peer.PrefillPeer`)."""

    worker_id: WorkerId
    link: PeerLink | None

    def register(self, ref: TransferRef, listener: TransferListener) -> None: ...

    def unregister(self, ref: TransferRef) -> None: ...

    def send(self, message: handoff_pb2.DecodeToPrefill) -> None:
        """Raises `WorkerUnavailable`."""
        ...


class KvArrival:
    """Implements `TransferListener`. Owned by `KvArrivals.fetch`."""

    def __init__(
        self,
        ref: TransferRef,
        peer: TransferPeer,
        request: AcceptedRequest,
        reservation: Reservation,
        gate: LandingGate,
        timeline: RequestTimeline,
    ) -> None:
        self.state = ArrivalState.REQUESTED
        self.ref = ref
        self._peer = peer
        self._request = request
        self._reservation = reservation
        self._table = gate.table
        self._layout = gate.layout
        self._timeline = timeline
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._last_activity = self._loop.time()
        self._commit: handoff_pb2.Commit | None = None
        self._reject: handoff_pb2.Reject | None = None
        self._gone_reason = ""
        self._resends_left = MAX_RESENDS
        self._may_salvage = True

    # --- the story ----------------------------------------------------------------------------------------------------

    async def receive(self) -> Landed:
        """Asks, waits and verifies. Raises `ArrivalRejected`, or `KvTransferFailed`/`WorkerUnavailable` when the
        attempt must be cancelled; the caller then calls `abandon`."""
        self._open()
        self._ask()
        await self._until_accepted()
        while True:
            commit = await self._until_committed()
            missing = await self._until_arrived(commit)
            if not missing:
                return self._verified(commit)
            self._ask_again(missing)

    def _open(self) -> None:
        reservation = self._reservation
        first_block = len(reservation.matched)
        self._table.open(*self._key, reservation.destination, first_block, self._frame_landed)
        self._peer.register(self.ref, self)

    def _ask(self) -> None:
        request, reservation = self._request, self._reservation
        self._timeline.begin_attempt()
        message = handoff_pb2.PrefillRequest(
            key=self.ref.to_message(),
            token_ids=request.token_ids.tolist(),
            sampling=request.sampling.to_proto(),
            have_tokens=reservation.have_tokens,
            destination=[
                handoff_pb2.BlockRef(block=ref.block, generation=ref.generation) for ref in reservation.destination
            ],
            deadline_ms=int((request.deadline_s or DEFAULT_DEADLINE_S) * 1000),
            idle_ms=int(LIMITS.idle_s * 1000),
            credit_bytes=len(reservation.destination) * self._layout.block_bytes,
            priority=request.priority,
            traceparent=request.traceparent,
            request_id=request.request_id,
            num_generated_tokens=request.num_generated,
        )
        message.scope.scope_key = request.scope_key
        self._peer.send(handoff_pb2.DecodeToPrefill(prefill=message))

    async def _until_accepted(self) -> None:
        await self._until(lambda: self.state is not ArrivalState.REQUESTED or self._reject is not None,
                          LIMITS.accept_s, "no answer to the request")  # fmt: skip
        if self._reject is not None:
            self.state = ArrivalState.OVER
            raise ArrivalRejected(_rejection(self._peer, self._reject))

    async def _until_committed(self) -> handoff_pb2.Commit:
        await self._until(lambda: self._commit is not None, LIMITS.idle_s, "neither a frame nor progress")
        commit, self._commit = self._commit, None
        if commit is None:
            raise KvTransferFailed("no commit", stage="transfer")
        if commit.HasField("failure"):
            self._may_salvage = False  # P says that what it computed is not to be used
            raise from_failure(commit.failure)
        self.state = ArrivalState.SEALED
        return commit

    async def _until_arrived(self, commit: handoff_pb2.Commit) -> tuple[CellRange, ...]:
        """Waits for the frames that Commit speaks of (it may overtake them); gives what did not verify."""
        await self._until(lambda: self._num_frames() >= commit.num_frames, LIMITS.idle_s, "frames are missing")
        arrived = self._table.arrived(*self._key)
        if arrived is None:
            raise KvTransferFailed("the attempt was fenced while it ran", stage="transfer")
        if not self._reservation.pool.holds(self._reservation.destination):
            self._may_salvage = False
            raise KvTransferFailed("a destination block changed hands", stage="transfer")
        if arrived.is_complete and not hmac.compare_digest(arrived.root_digest, commit.root_digest):
            self._may_salvage = False
            raise KvTransferFailed("the frames that arrived are not those that were sent", stage="transfer")
        return arrived.missing

    def _ask_again(self, missing: tuple[CellRange, ...]) -> None:
        if self._resends_left == 0:
            raise KvTransferFailed(f"KV did not verify after {MAX_RESENDS} resends", stage="transfer")
        self._resends_left -= 1
        self.state = ArrivalState.RECEIVING
        num_bytes = sum(cells.num_layers * cells.num_blocks * self._layout.cell_bytes for cells in missing)
        key = self.ref.to_message()
        self._peer.send(handoff_pb2.DecodeToPrefill(credit=handoff_pb2.Credit(key=key, bytes=num_bytes)))
        ranges = [self._to_range(cells) for cells in missing]
        resend = handoff_pb2.Resend(key=key, ranges=ranges, tries_left=self._resends_left)
        self._peer.send(handoff_pb2.DecodeToPrefill(resend=resend))

    def _verified(self, commit: handoff_pb2.Commit) -> Landed:
        """No byte of the attempt was used until here; from here on nothing of it may be written any more."""
        self._table.fence(*self._key, _nothing)  # every frame has landed: there is no writer left to wait for
        self.state = ArrivalState.VERIFIED
        self._peer.unregister(self.ref)
        self._timeline.mark(RequestMoment.VERIFIED)
        self._timeline.prefill_worker_id = self._peer.worker_id
        self._timeline.transport = self._peer.link.transport if self._peer.link else ""
        self._timeline.prefill_queued_s = commit.queued_us / 1e6
        self._timeline.prefill_compute_s = commit.compute_us / 1e6
        self._timeline.kv_bytes += commit.num_bytes
        self._timeline.kv_frames += commit.num_frames
        ack = handoff_pb2.CommitAck(key=self.ref.to_message(), outcome=handoff_pb2.COMMIT_OUTCOME_OK)
        self._tell(handoff_pb2.DecodeToPrefill(commit_ack=ack))
        has_logprobs = commit.HasField("first_logprobs")
        prompt = LandedPrompt(
            blocks=self._reservation.blocks,
            first_token_id=commit.first_token_id,
            first_logprobs=logprob_messages.from_message(commit.first_logprobs) if has_logprobs else None,
            cached_tokens=max(commit.cached_tokens, self._reservation.have_tokens),
        )
        return Landed(prompt, tuple(logprob_messages.from_message(logprobs) for logprobs in commit.prompt_logprobs))

    def withdraw(self) -> None:
        """P rejected: nothing was written and nothing will be."""
        self.state = ArrivalState.OVER
        self._peer.unregister(self.ref)
        self._table.fence(*self._key, _nothing)

    def abandon(self, reason: str) -> None:
        """Ends the attempt in the middle: what verified enters the prefix cache, what may still be written waits in
        quarantine until the last writer is known to be gone. Returns at once."""
        self.state = ArrivalState.OVER
        self._peer.unregister(self.ref)
        cancel = handoff_pb2.CancelTransfer(key=self.ref.to_message(), reason=reason)
        self._tell(handoff_pb2.DecodeToPrefill(cancel=cancel))
        arrived = self._table.arrived(*self._key)
        reservation = self._reservation
        num_arrived = arrived.num_complete_blocks if arrived is not None and self._may_salvage else 0
        num_blocks = len(reservation.matched) + num_arrived
        num_tokens = min(num_blocks * reservation.pool.block_tokens, self._request.num_tokens)
        reservation.salvage(num_tokens)
        suspect = reservation.split_for_quarantine(num_tokens)
        # The receiver copies, and from here on drops what is late: once no frame is half way, nobody can write.
        self._table.fence(*self._key, lambda: reservation.pool.unquarantine(suspect))

    def _tell(self, message: handoff_pb2.DecodeToPrefill) -> None:
        """The last word of an attempt. A peer whose stream is broken has released everything of ours by itself."""
        with suppress(WorkerUnavailable):
            self._peer.send(message)

    # --- what is heard ------------------------------------------------------------------------------------------------

    def on_message(self, message: handoff_pb2.PrefillToDecode) -> None:
        match message.WhichOneof("message"):
            case "accept" if self.state is ArrivalState.REQUESTED:
                self.state = ArrivalState.RECEIVING
            case "reject" if self.state is ArrivalState.REQUESTED:
                self._reject = message.reject
            case "commit":
                self._commit = message.commit
        self._touch()

    def peer_gone(self, reason: str) -> None:
        self._gone_reason = reason or "its stream ended"
        self._touch()

    def _frame_landed(self, *_: object) -> None:
        """On a transport's thread."""
        self._loop.call_soon_threadsafe(self._on_frame)

    def _on_frame(self) -> None:
        self._timeline.mark_once(RequestMoment.FIRST_FRAME)
        self._touch()

    def _touch(self) -> None:
        self._last_activity = self._loop.time()
        self._changed.set()

    async def _until(self, is_reached: Callable[[], bool], idle_s: float, complaint: str) -> None:
        """Waits until then. Raises `KvTransferFailed` when nothing is heard for `idle_s`, `WorkerUnavailable` when
        the peer is gone."""
        while not is_reached():
            if self._gone_reason:
                raise WorkerUnavailable(f"{self._peer.worker_id} is gone: {self._gone_reason}", stage="transfer")
            remaining = self._last_activity + idle_s - self._loop.time()
            if remaining <= 0:
                raise KvTransferFailed(f"{self._peer.worker_id}: {complaint} for {idle_s:.0f} s", stage="transfer")
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), remaining)

    @property
    def _key(self) -> tuple[TransferId, int]:
        return self.ref.transfer_id, self.ref.epoch

    def _num_frames(self) -> int:
        arrived = self._table.arrived(*self._key)
        return arrived.num_frames if arrived is not None else 0

    def _to_range(self, cells: CellRange) -> handoff_pb2.Range:
        block_tokens = self._reservation.pool.block_tokens
        first_token = cells.first_block * block_tokens
        end_token = min((cells.first_block + cells.num_blocks) * block_tokens, self._request.num_tokens)
        return handoff_pb2.Range(
            first_layer=cells.first_layer,
            num_layers=cells.num_layers,
            first_token=first_token,
            num_tokens=end_token - first_token,
        )


def _rejection(peer: TransferPeer, reject: handoff_pb2.Reject) -> TandemError:
    """A deterministic refusal of the request itself is the client's; everything else is this peer's alone."""
    if reject.HasField("failure") and reject.reason == handoff_pb2.REJECT_REASON_INVALID:
        return from_failure(reject.failure)
    reason = handoff_pb2.RejectReason.Name(reject.reason).removeprefix("REJECT_REASON_").lower()
    return RetryElsewhere(
        f"{peer.worker_id} rejected ({reason}): {reject.detail}",
        code="server_is_overloaded" if reject.reason == handoff_pb2.REJECT_REASON_OVERLOADED else "",
        retry_after_s=reject.retry_after_ms / 1000,
        stage="prefill",
    )


def _nothing() -> None:
    """Nobody waits for this attempt's silence."""
