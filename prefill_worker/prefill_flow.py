"""One attempt of one transfer on its prefill worker, from Accept to the acknowledged Commit.

    ACCEPTED ─> QUEUED ─> COMPUTING and PUSHING together ─> SEALED ─> COMMITTED ──CommitAck──> FREE
        │          │                  │                        │           └──Resend──> SEALED
        └──────────┴──────────────────┴── Cancel, peer gone, deadline, failure ──> DRAINING ──> FREE

The source blocks are pinned by this flow beside the engine's own reference: they come back when the engine is done with
them and no push can read them any more, in whatever order those two happen.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from tandem.v1 import handoff_pb2

from cluster.errors import DeadlineExceeded, EngineFailure, KvTransferFailed, TandemError, WorkerUnavailable, to_failure
from cluster.identity import BlockRef, RequestId
from engine import logprob_messages
from engine.block_pool import BlockPool
from engine.request import EngineRequest, FinishReason, SequenceOutput, ServingEngine
from kv_transfer.coverage import CellRange
from kv_transfer.layer_pusher import LayerPusher, PushCallbacks, PushRequest, PushSession, PushSummary
from kv_transfer.protocol_limits import MAX_RESENDS, ProtocolLimits
from kv_transfer.transfer_ref import TransferRef
from prefill_worker.prefill_check import CheckedPrefill

# A decode worker acknowledges from its event loop as soon as the last frame has verified.
ACK_TIMEOUT_S = 10.0
LIMITS = ProtocolLimits()

logger = logging.getLogger(__name__)


class PrefillState(enum.Enum):
    QUEUED = "queued"
    COMPUTING = "computing"
    SEALED = "sealed"
    COMMITTED = "committed"
    DRAINING = "draining"
    FREE = "free"


class ControlLink(Protocol):
    """The way back to the decode worker."""

    pusher: LayerPusher

    def send(self, message: handoff_pb2.PrefillToDecode) -> None: ...


@dataclass(frozen=True, slots=True)
class FlowResources:
    """What every flow of a worker shares."""

    engine: ServingEngine
    pool: BlockPool
    block_tokens: int
    num_layers: int


class SourceBlocks:
    """Implements `KvListener`: pins the prompt's blocks for the transfer, and passes on what the engine writes."""

    def __init__(self, pool: BlockPool, session: PushSession) -> None:
        self.tokens_done = 0
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
        self._session.blocks_allocated(blocks, cached_tokens)

    def chunk_started(self, first_token: int, num_tokens: int) -> None:
        self._chunk_end = first_token + num_tokens
        self._session.chunk_started(first_token, num_tokens)

    def layer_written(self, layer: int) -> None:
        self._session.layer_written(layer)

    def chunk_finished(self) -> None:
        self.tokens_done = self._chunk_end
        self._session.chunk_finished()

    def unpin(self) -> None:
        """The engine is done with the request and nothing of it is being sent."""
        pinned, self._pinned = self._pinned, []
        self._pool.release(pinned)


class PrefillFlow:
    """Used on the event loop; the engine's and the sending thread call in through `call_soon_threadsafe`."""

    def __init__(self, ref: TransferRef, request: CheckedPrefill, link: ControlLink, resources: FlowResources) -> None:
        self.ref = ref
        self.engine_id = RequestId(f"{ref.transfer_id.hex()}/{ref.epoch}")
        self.state = PrefillState.QUEUED
        self._request = request
        self._link = link
        self._resources = resources
        self._loop = asyncio.get_running_loop()
        callbacks = PushCallbacks(
            on_sealed=lambda summary: self._from_thread(self._sealed, summary),
            on_failed=lambda error: self._from_thread(self._push_failed, error),
        )
        self._session = link.pusher.open(
            PushRequest(
                ref.transfer_id, ref.epoch, len(request.token_ids), request.have_tokens, callbacks, request.credit_bytes
            )
        )
        self.source = SourceBlocks(resources.pool, self._session)
        self._changed = asyncio.Event()
        self._output: SequenceOutput | None = None
        self._is_engine_done = False
        self._output_at = 0.0
        self._summary: PushSummary | None = None
        self._error: TandemError | None = None
        self._resend: tuple[CellRange, ...] = ()
        self.is_acknowledged = False
        self.num_bytes_sent = 0  # of a transfer that was sent whole
        self._is_cancel_asked = False
        self._num_drained: int | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_computed(self) -> bool:
        """Whether the engine is done with the prompt: its blocks wait for the link or for the decode worker."""
        return self._output is not None

    @property
    def num_tokens(self) -> int:
        return len(self._request.token_ids)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that this worker's prefix cache had."""
        return self._output.cached_tokens if self._output is not None else 0

    # --- the story ----------------------------------------------------------------------------------------------------

    def start(self, on_ended: Callable[[], None]) -> None:
        """Queues the prompt and accepts it. Raises what the engine's `submit` raises; then nothing has begun."""
        request = self._request
        self._resources.engine.submit(
            EngineRequest(
                request_id=self.engine_id,
                token_ids=request.token_ids,
                sampling=request.sampling,
                scope_key=request.scope_key,
                num_generated=request.num_generated,
                priority=request.priority,
                hold_blocks=True,
                kv_listener=self.source,
            )
        )
        accept = handoff_pb2.Accept(key=self.ref.to_message(), plan=[self._coverage()])
        self._link.send(handoff_pb2.PrefillToDecode(accept=accept))
        self._task = asyncio.create_task(self._run(), name=f"prefill {self.engine_id}")
        self._task.add_done_callback(lambda _: on_ended())

    async def wait_until_ended(self) -> None:
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """Ends with every block back, whatever happens."""
        try:
            async with asyncio.timeout(self._request.deadline_s):
                await self._until_acknowledged()
        except TimeoutError:
            self._tell_failure(DeadlineExceeded(f"the deadline of {self._request.deadline_s:.1f} s passed"))
        except TandemError as error:
            if not self._is_cancel_asked:
                logger.warning("prefill %s failed: %s", self.engine_id, error.message)
                self._tell_failure(error)
        except Exception:
            logger.exception("prefill %s failed", self.engine_id)
            self._tell_failure(EngineFailure("internal error in the prefill worker"))
        finally:
            await self._drain()

    async def _until_acknowledged(self) -> None:
        await self._until(lambda: self._output is not None)
        self.state = PrefillState.SEALED
        for _ in range(MAX_RESENDS + 1):
            await self._until(lambda: self._summary is not None)
            self._commit()
            async with asyncio.timeout(ACK_TIMEOUT_S):
                await self._until(lambda: self.is_acknowledged or bool(self._resend))
            if self.is_acknowledged:
                return
            ranges, self._resend, self._summary = self._resend, (), None
            self.state = PrefillState.SEALED
            self._session.resend(ranges)
        raise KvTransferFailed(f"not verified after {MAX_RESENDS} resends", stage="transfer")

    def _commit(self) -> None:
        output, summary = self._output, self._summary
        if output is None or summary is None:
            raise RuntimeError("commit before the prompt was computed and sent")
        commit = handoff_pb2.Commit(
            key=self.ref.to_message(),
            num_frames=summary.num_frames,
            num_bytes=summary.num_bytes,
            coverage=[self._coverage()],
            root_digest=summary.root_digest,
            has_first_token=True,
            first_token_id=output.token_ids[0],
            prompt_logprobs=[logprob_messages.to_message(logprobs) for logprobs in output.prompt_logprobs],
            queued_us=round(output.queued_s * 1e6),
            compute_us=round(output.compute_s * 1e6),
            sealed_to_commit_us=round((self._loop.time() - self._output_at) * 1e6),
            cached_tokens=output.cached_tokens,
        )
        if output.logprobs:
            commit.first_logprobs.CopyFrom(logprob_messages.to_message(output.logprobs[0]))
        self.state = PrefillState.COMMITTED
        self._link.send(handoff_pb2.PrefillToDecode(commit=commit))

    async def _drain(self) -> None:
        """Until the engine and the sending thread have both let go; then the blocks are back and D is told."""
        self.state = PrefillState.DRAINING
        self._resources.engine.cancel(self.engine_id)  # changes nothing for one that has ended
        self._session.cancel(lambda num_frames: self._from_thread(self._drained, num_frames))
        while not self._is_engine_done or self._num_drained is None:
            self._changed.clear()
            await self._changed.wait()
        self.source.unpin()
        self._resources.engine.release(self.engine_id)
        self.state = PrefillState.FREE
        if not self.is_acknowledged:
            self._tell_drained(self._num_drained)

    # --- what is heard ------------------------------------------------------------------------------------------------

    def on_message(self, message: handoff_pb2.DecodeToPrefill) -> None:
        match message.WhichOneof("message"):
            case "credit":
                self._session.add_credit(message.credit.bytes)
            case "commit_ack" if message.commit_ack.outcome == handoff_pb2.COMMIT_OUTCOME_OK:
                self.is_acknowledged = True
            case "commit_ack":
                self._fail(KvTransferFailed("the decode worker has given this attempt up", stage="transfer"))
            case "resend" if self.state is PrefillState.COMMITTED:
                self._take_resend(message.resend)
            case "cancel":
                self._is_cancel_asked = True
                self._fail(WorkerUnavailable(f"cancelled: {message.cancel.reason}"))
        self._changed.set()

    def peer_gone(self, reason: str) -> None:
        self._is_cancel_asked = True  # nobody is left to be told
        self._fail(WorkerUnavailable(f"the decode worker is gone: {reason}"))

    def on_output(self, output: SequenceOutput) -> None:
        """From the engine, by way of the event loop."""
        if output.finish_reason is not None:
            self._is_engine_done = True
        if output.finish_reason is FinishReason.ERROR:
            self._fail(EngineFailure(output.error or "the engine failed on this prompt", stage="prefill"))
        elif output.finish_reason is FinishReason.CANCELLED:
            self._fail(WorkerUnavailable("the engine stopped before the prompt was computed", stage="prefill"))
        else:
            self._output, self._output_at = output, self._loop.time()
        self._changed.set()

    def _sealed(self, summary: PushSummary) -> None:
        self._summary = summary
        self.num_bytes_sent = summary.num_bytes
        self._changed.set()

    def _push_failed(self, error: KvTransferFailed) -> None:
        self._fail(error)

    def _drained(self, num_frames: int) -> None:
        self._num_drained = num_frames
        self._changed.set()

    def _fail(self, error: TandemError) -> None:
        self._error = self._error or error
        self._changed.set()

    def _from_thread(self, call: Callable[..., None], argument: object) -> None:
        with suppress(RuntimeError):  # the loop has ended: so has everything here
            self._loop.call_soon_threadsafe(call, argument)

    # --- small steps --------------------------------------------------------------------------------------------------

    async def _until(self, is_reached: Callable[[], bool]) -> None:
        """Waits, telling D every second that this worker is at it. Raises what ended the attempt."""
        while True:
            if self._error is not None:
                raise self._error
            if is_reached():
                return
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), LIMITS.progress_s)
            except TimeoutError:
                self._tell_progress()

    def _tell_progress(self) -> None:
        progress = handoff_pb2.Progress(key=self.ref.to_message(), tokens_done=self.source.tokens_done)
        self._link.send(handoff_pb2.PrefillToDecode(progress=progress))

    def _tell_failure(self, error: TandemError) -> None:
        commit = handoff_pb2.Commit(key=self.ref.to_message(), failure=to_failure(error))
        self._link.send(handoff_pb2.PrefillToDecode(commit=commit))

    def _tell_drained(self, num_frames: int) -> None:
        outcome = handoff_pb2.DRAIN_OUTCOME_ALL_RETIRED if num_frames else handoff_pb2.DRAIN_OUTCOME_NEVER_POSTED
        drained = handoff_pb2.Drained(key=self.ref.to_message(), last_seq=max(0, num_frames - 1), outcome=outcome)
        self._link.send(handoff_pb2.PrefillToDecode(drained=drained))

    def _coverage(self) -> handoff_pb2.Range:
        first_token = self._request.have_tokens
        return handoff_pb2.Range(
            first_layer=0,
            num_layers=self._resources.num_layers,
            first_token=first_token,
            num_tokens=len(self._request.token_ids) - first_token,
        )

    def _take_resend(self, resend: handoff_pb2.Resend) -> None:
        first, end = self._request.have_tokens, len(self._request.token_ids)
        for wanted in resend.ranges:
            is_ours = first <= wanted.first_token and wanted.first_token + wanted.num_tokens <= end
            is_in_model = wanted.first_layer + wanted.num_layers <= self._resources.num_layers
            if not (is_ours and is_in_model and wanted.num_layers and wanted.num_tokens):
                self._fail(KvTransferFailed("asked to resend what is not of this attempt", stage="transfer"))
                return
        self._resend = tuple(self._to_cells(wanted) for wanted in resend.ranges)

    def _to_cells(self, wanted: handoff_pb2.Range) -> CellRange:
        block_tokens = self._resources.block_tokens
        first_block = wanted.first_token // block_tokens
        end_block = -(-(wanted.first_token + wanted.num_tokens) // block_tokens)
        return CellRange(wanted.first_layer, wanted.num_layers, first_block, end_block - first_block)
