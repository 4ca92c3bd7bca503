"""One attempt of one transfer on its prefill worker: what the pure machine decides, carried out.

    messages of D, engine outputs, the sending thread, time ──events──> prefill_transfer ──actions──> engine, pusher, D

The source blocks are pinned by this flow beside the engine's own reference: they come back when the engine is done with
them and no push can read them any more, in whatever order those two happen.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from tandem.v1 import handoff_pb2

from cluster.errors import EngineFailure, KvTransferFailed, TandemError, WorkerUnavailable, to_failure
from cluster.identity import BlockRef, RequestId
from engine import logprob_messages
from engine.block_pool import BlockPool
from engine.request import EngineRequest, FinishReason, SequenceOutput, ServingEngine
from kv_transfer import prefill_events as on
from kv_transfer.coverage import CellRange
from kv_transfer.layer_pusher import LayerPusher, PushCallbacks, PushRequest, PushSession, PushSummary
from kv_transfer.prefill_transfer import PrefillPhase, PrefillTransfer, apply, next_tick_s
from kv_transfer.protocol_limits import ProtocolLimits, ProtocolViolation
from kv_transfer.transfer_ref import TransferRef
from prefill_worker.prefill_check import CheckedPrefill

logger = logging.getLogger(__name__)


class ControlLink(Protocol):
    """The way back to the decode worker."""

    pusher: LayerPusher

    def send(self, message: handoff_pb2.PrefillToDecode) -> None: ...

    def hang_up(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class FlowResources:
    """What every flow of a worker shares."""

    engine: ServingEngine
    pool: BlockPool
    num_layers: int


class SourceBlocks:
    """Implements `KvListener`: pins the prompt's blocks for the transfer, and passes on what the engine writes."""

    def __init__(self, pool: BlockPool, session: PushSession, on_started: Callable[[], None]) -> None:
        self.tokens_done = 0
        self.layers_done = 0  # of the chunk that is being computed
        self._on_started = on_started
        self._pool = pool
        self._session = session
        self._pinned: list[BlockRef] = []
        self._chunk_end = 0

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def blocks_allocated(self, blocks: Sequence[BlockRef], cached_tokens: int) -> None:
        self._pool.share(blocks)
        self._pinned.extend(blocks)
        self.tokens_done = cached_tokens
        self._on_started()
        self._session.blocks_allocated(blocks, cached_tokens)

    def chunk_started(self, first_token: int, num_tokens: int) -> None:
        self._chunk_end, self.layers_done = first_token + num_tokens, 0
        self._session.chunk_started(first_token, num_tokens)

    def layer_written(self, layer: int) -> None:
        self.layers_done = layer + 1
        self._session.layer_written(layer)

    def chunk_finished(self) -> None:
        self.tokens_done, self.layers_done = self._chunk_end, 0
        self._session.chunk_finished()

    def unpin(self) -> None:
        """The engine is done with the request and nothing of it is being sent."""
        pinned, self._pinned = self._pinned, []
        self._pool.release(pinned)


class PrefillFlow:
    """Carries out what `kv_transfer.prefill_transfer` decides for one attempt.

    Used on the event loop; the engine's and the sending thread call in through `call_soon_threadsafe`.
    """

    def __init__(self, ref: TransferRef, request: CheckedPrefill, link: ControlLink, resources: FlowResources) -> None:
        self.ref = ref
        self.engine_id = RequestId(f"{ref.transfer_id.hex()}/{ref.epoch}")
        self.num_tokens = len(request.token_ids)
        self.num_bytes_sent = 0  # of a transfer that was sent whole
        self._request = request
        self._link = link
        self._resources = resources
        self._loop = asyncio.get_running_loop()
        self._transfer = PrefillTransfer(
            ref,
            self._loop.time() + request.deadline_s,
            request.credit_bytes,
            request.max_credit_bytes,
            limits=ProtocolLimits().for_peer_idle(request.idle_s),
        )
        callbacks = PushCallbacks(
            on_sealed=lambda summary: self._from_thread(self._sealed, summary),
            on_failed=lambda error: self._from_thread(self._apply, on.PushFailed(error)),
        )
        self._session = link.pusher.open(
            PushRequest(
                ref.transfer_id, ref.epoch, self.num_tokens, request.have_tokens, callbacks, request.credit_bytes
            )
        )
        self.source = SourceBlocks(
            resources.pool, self._session, lambda: self._from_thread(self._apply, on.ComputeStarted())
        )
        self._events: deque[on.PrefillEvent] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._output: SequenceOutput | None = None
        self.output_at_s = 0.0
        self._is_engine_done = False
        self._summary: PushSummary | None = None
        self._refusal: TandemError | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()

    @property
    def phase(self) -> PrefillPhase:
        return self._transfer.phase

    @property
    def is_acknowledged(self) -> bool:
        return self._transfer.is_acknowledged

    @property
    def is_computed(self) -> bool:
        """Whether the engine is done with the prompt: its blocks wait for the link or for the decode worker."""
        return self._output is not None

    @property
    def computed(self) -> SequenceOutput | None:
        """What the engine gave; None before."""
        return self._output

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that this worker's prefix cache had."""
        return self._output.cached_tokens if self._output is not None else 0

    def start(self, on_ended: Callable[[], None]) -> None:
        """Queues the prompt and accepts it. Raises what the engine's `submit` raises; then nothing has begun."""
        self._apply(on.PrefillAsked())
        if self._refusal is not None:
            raise self._refusal
        self._ended.add_done_callback(lambda _: on_ended())

    async def wait_until_ended(self) -> None:
        await asyncio.shield(self._ended)

    # --- what is heard ------------------------------------------------------------------------------------------------

    def on_message(self, message: handoff_pb2.DecodeToPrefill) -> None:
        match message.WhichOneof("message"):
            case "credit":
                self._apply(on.CreditGranted(message.credit.bytes, self._session.posted_bytes))
            case "commit_ack":
                self._apply(on.Acknowledged(message.commit_ack.outcome == handoff_pb2.COMMIT_OUTCOME_OK))
            case "resend":
                self._apply(self._resend_asked(message.resend))
            case "cancel":
                self._apply(on.CancelAsked(message.cancel.reason))

    def peer_gone(self) -> None:
        self._apply(on.DecodeWorkerGone())

    def listed(self, is_listed: bool) -> None:
        """Whether the decode worker's own list of live attempts has this one."""
        self._apply(on.DecodeWorkerListed(is_listed))

    def on_output(self, output: SequenceOutput) -> None:
        """From the engine, by way of the event loop."""
        self._is_engine_done = output.finish_reason is not None
        if output.finish_reason is FinishReason.ERROR:
            error = EngineFailure(output.error or "the engine failed on this prompt", stage="prefill")
            self._apply(on.ComputeFailed(error))
        elif output.finish_reason is FinishReason.CANCELLED:
            stopped = WorkerUnavailable("the engine stopped before the prompt was computed", stage="prefill")
            self._apply(on.ComputeFailed(stopped))
        else:
            self._output, self.output_at_s = output, self._loop.time()
            self._apply(on.ComputeEnded())
        self._apply(on.EngineLetGo())

    def _sealed(self, summary: PushSummary) -> None:
        self._summary = summary
        self.num_bytes_sent = summary.num_bytes
        self._apply(on.PushSealed(summary.num_frames, summary.num_bytes))

    def _from_thread(self, call: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has ended: so has everything here
            self._loop.call_soon_threadsafe(call, *arguments)

    # --- the machine --------------------------------------------------------------------------------------------------

    def _apply(self, event: on.PrefillEvent) -> None:
        """One event after the other: an action may be answered before its neighbours are carried out."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            try:
                self._transfer, actions = apply(self._transfer, self._events[0], self._loop.time())
                for action in actions:
                    self._carry_out(action)
            except Exception:  # our own bug: the attempt's deadline still ends it
                logger.exception("prefill %s: %s", self.ref, type(self._events[0]).__name__)
            self._events.popleft()
        self._set_timer()
        if self._transfer.is_over and not self._ended.done():
            self._ended.set_result(None)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tick_s = next_tick_s(self._transfer)
        self._timer = self._loop.call_at(tick_s, self._apply, on.Tick()) if tick_s is not None else None

    def _carry_out(self, action: on.PrefillAction) -> None:
        match action:
            case on.SubmitToEngine():
                self._submit()
            case on.SendReject(error):
                self._refusal = error
            case on.SendAccept():
                accept = handoff_pb2.Accept(key=self.ref.to_message(), plan=[self._coverage()])
                self._link.send(handoff_pb2.PrefillToDecode(accept=accept))
            case on.SendProgress():
                self._send_progress()
            case on.SendCommit():
                self._send_commit(action)
            case on.SendFailedCommit(error):
                logger.warning("prefill %s failed: %s", self.ref, error.message)
                commit = handoff_pb2.Commit(key=self.ref.to_message(), failure=to_failure(error))
                self._link.send(handoff_pb2.PrefillToDecode(commit=commit))
            case on.SendDrained(num_frames):
                self._send_drained(num_frames)
            case on.AddPushCredit(num_bytes):
                self._session.add_credit(num_bytes)
            case on.ResendCells(ranges):
                self._session.resend(ranges)
            case on.CancelPush():
                self._session.cancel(lambda num: self._from_thread(self._apply, on.PushDrained(num)))
            case on.CancelCompute():
                self._cancel_compute()
            case on.DestroyEndpoint():
                self._link.hang_up(f"a push of {self.ref} does not end")
            case on.ReleaseBlocks():
                self.source.unpin()
                self._resources.engine.release(self.engine_id)

    def _submit(self) -> None:
        request = self._request
        engine_request = EngineRequest(
            request_id=self.engine_id,
            token_ids=request.token_ids,
            sampling=request.sampling,
            scope_key=request.scope_key,
            num_generated=request.num_generated,
            priority=request.priority,
            hold_blocks=True,
            kv_listener=self.source,
        )
        try:
            self._resources.engine.submit(engine_request)
        except TandemError as error:
            self._apply(on.EngineRefused(error))
        else:
            self._apply(on.EngineQueued())

    def _cancel_compute(self) -> None:
        if self._is_engine_done:
            self._apply(on.EngineLetGo())
        else:
            self._resources.engine.cancel(self.engine_id)  # its last output says that it has let go

    # --- messages -----------------------------------------------------------------------------------------------------

    def _send_progress(self) -> None:
        source = self.source
        progress = handoff_pb2.Progress(
            key=self.ref.to_message(), layers_done=source.layers_done, tokens_done=source.tokens_done
        )
        self._link.send(handoff_pb2.PrefillToDecode(progress=progress))

    def _send_commit(self, action: on.SendCommit) -> None:
        output, summary = self._output, self._summary
        if output is None or summary is None:
            raise ProtocolViolation("commit before the prompt was computed and sent")
        commit = handoff_pb2.Commit(
            key=self.ref.to_message(),
            num_frames=action.num_frames,
            num_bytes=action.num_bytes,
            num_resends=action.num_resends,
            coverage=[self._coverage()],
            root_digest=summary.root_digest,
            has_first_token=True,
            first_token_id=output.token_ids[0],
            prompt_logprobs=[logprob_messages.to_message(logprobs) for logprobs in output.prompt_logprobs],
            queued_us=round(output.queued_s * 1e6),
            compute_us=round(output.compute_s * 1e6),
            sealed_to_commit_us=round((self._loop.time() - self.output_at_s) * 1e6),
            cached_tokens=output.cached_tokens,
        )
        if output.logprobs:
            commit.first_logprobs.CopyFrom(logprob_messages.to_message(output.logprobs[0]))
        self._link.send(handoff_pb2.PrefillToDecode(commit=commit))

    def _send_drained(self, num_frames: int) -> None:
        outcome = handoff_pb2.DRAIN_OUTCOME_ALL_RETIRED if num_frames else handoff_pb2.DRAIN_OUTCOME_NEVER_POSTED
        drained = handoff_pb2.Drained(key=self.ref.to_message(), last_seq=max(0, num_frames - 1), outcome=outcome)
        self._link.send(handoff_pb2.PrefillToDecode(drained=drained))

    def _coverage(self) -> handoff_pb2.Range:
        first_token = self._request.have_tokens
        return handoff_pb2.Range(
            first_layer=0,
            num_layers=self._resources.num_layers,
            first_token=first_token,
            num_tokens=self.num_tokens - first_token,
        )

    def _resend_asked(self, resend: handoff_pb2.Resend) -> on.PrefillEvent:
        for wanted in resend.ranges:
            is_ours = self._request.have_tokens <= wanted.first_token
            is_inside = wanted.first_token + wanted.num_tokens <= self.num_tokens
            is_in_model = wanted.first_layer + wanted.num_layers <= self._resources.num_layers
            if not (is_ours and is_inside and is_in_model and wanted.num_layers and wanted.num_tokens):
                return on.PushFailed(KvTransferFailed("asked to resend what is not of this attempt", stage="transfer"))
        cells = tuple(self._to_cells(wanted) for wanted in resend.ranges)
        num_bytes = sum(part.num_cells for part in cells) * self._link.pusher.cell_bytes
        return on.ResendAsked(cells, resend.tries_left, num_bytes)

    def _to_cells(self, wanted: handoff_pb2.Range) -> CellRange:
        block_tokens = self._link.pusher.target.block_tokens
        first_block = wanted.first_token // block_tokens
        end_block = -(-(wanted.first_token + wanted.num_tokens) // block_tokens)
        return CellRange(wanted.first_layer, wanted.num_layers, first_block, end_block - first_block)
