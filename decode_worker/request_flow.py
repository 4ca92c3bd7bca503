"""The life of one request on its decode worker, from the router's submit to its last token.

    submit ─> PromptLanding: reserve, ask P, verify ─> engine.submit(landed) ─> first token, tokens ─> end
         │          └─ no P can: the engine prefills by itself, where that is allowed ─┐
         └─ no placement (aggregated, or the router chose so) ─> engine.submit <───────┘

One task runs it, one place ends it: whatever happens, `run` gives every block back and tells the router exactly once.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from tandem.v1 import common_pb2, worker_pb2

from cluster.errors import (
    HANDED_OVER,
    DeadlineExceeded,
    EngineFailure,
    TandemError,
    WorkerUnavailable,
)
from cluster.tracing import RequestSpan, Tracing
from decode_worker.decode_metrics import DecodeMetrics
from decode_worker.landing_messages import Landed
from decode_worker.prompt_landing import PromptLanding
from decode_worker.request_check import AcceptedRequest
from decode_worker.request_timeline import RequestMoment, RequestTimeline
from decode_worker.request_trace import end_span
from decode_worker.step_tokens import FINISH_REASONS, StepEntry
from engine import logprob_messages
from engine.request import EngineRequest, FinishReason, LandedPrompt, SequenceOutput, ServingEngine

if TYPE_CHECKING:
    from decode_worker.router_session import RouterSession

logger = logging.getLogger(__name__)


class Landings(Protocol):
    """Gets prompts' KV from prefill workers (`kv_landings.KvLandings`)."""

    def open(self, request: AcceptedRequest, timeline: RequestTimeline) -> PromptLanding: ...


@dataclass(frozen=True, slots=True)
class FlowResources:
    """What every flow of a worker shares."""

    engine: ServingEngine
    landings: Landings
    metrics: DecodeMetrics
    tracing: Tracing | None = None


class RequestFlow:
    """One request. Used on the event loop only."""

    def __init__(
        self, request: AcceptedRequest, session: RouterSession, resources: FlowResources, timeline: RequestTimeline
    ) -> None:
        self.request = request
        self.session = session
        self.timeline = timeline
        self._resources = resources
        self._ended = asyncio.Event()
        self._error: TandemError | None = None
        self._task: asyncio.Task[None] | None = None
        self._cancel_reason = ""
        self._failure = ""
        self._is_handed_over = False
        self._is_in_engine = False
        self._landing: PromptLanding | None = None
        self._num_generated = request.num_generated
        timeline.mark(RequestMoment.RECEIVED)

    # --- the story ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serves the request; every way out tells the router exactly once. Never raises."""
        self._task = asyncio.current_task()
        span = self._begin_span()
        try:
            if not self._cancel_reason:
                async with asyncio.timeout(self.request.deadline_s or None):
                    landed = await self._land()
                    self._submit(landed.prompt if landed else None)
                    if landed is not None:
                        self._send_first_token(landed)
                    await self._ended.wait()
                if self._error is not None:
                    raise self._error
        except TimeoutError:
            self._fail(DeadlineExceeded(f"the deadline of {self.request.deadline_s:.1f} s passed"))
        except asyncio.CancelledError:
            if self._is_handed_over:
                self._fail(WorkerUnavailable("the worker stops", code=HANDED_OVER, stage="decode"))
                return
            self._cancel_reason = self._cancel_reason or "the worker stops"
        except TandemError as error:
            self._fail(error)
        except Exception:
            logger.exception("request %s failed", self.request.engine_id)
            self._fail(EngineFailure("internal error in the decode worker"))
        finally:
            if self._is_in_engine:
                self._resources.engine.cancel(self.request.engine_id)
            if self._landing is not None:
                self._landing.cancel()
            if span is not None:
                end_span(span, self.timeline, self._num_generated, self._failure or self._cancel_reason)
        if self._cancel_reason:
            self._tell_cancelled()

    def cancel(self, reason: str) -> None:
        """Ends the request from outside: client gone, router gone, superseded. Ending twice changes nothing."""
        if self._cancel_reason or self._ended.is_set():
            return
        self._cancel_reason = reason
        if self._task is not None:
            self._task.cancel()

    def hand_over(self) -> None:
        """The worker stops: the router shall place the request elsewhere, where it goes on at the next token."""
        if self._task is None or self._cancel_reason or self._ended.is_set():
            return
        self._is_handed_over = True
        self._task.cancel()

    def _begin_span(self) -> RequestSpan | None:
        """This worker's part of the trace; what it asks of others continues from there."""
        tracing = self._resources.tracing
        if tracing is None or not self.request.traceparent:
            return None
        span = tracing.begin("decode", self.request.traceparent)
        self.request = replace(self.request, traceparent=span.traceparent)
        return span

    async def _land(self) -> Landed | None:
        """The prompt with its KV here; None when the engine shall prefill it."""
        if not self.request.placements:
            return None
        self._landing = self._resources.landings.open(self.request, self.timeline)
        landed = await self._landing.land()
        if self._landing.local_reason is not None:
            self._resources.metrics.prefilled_locally(self._landing.local_reason)
        return landed

    def _submit(self, landed: LandedPrompt | None) -> None:
        request = self.request
        engine_request = EngineRequest(
            request_id=request.engine_id,
            token_ids=request.token_ids,
            sampling=request.sampling,
            scope_key=request.scope_key,
            num_generated=request.num_generated,
            priority=request.priority,
            landed=landed,
        )
        self._resources.engine.submit(engine_request)
        self._is_in_engine = True
        if landed is not None and self._landing is not None:
            self._landing.admitted()

    def _send_first_token(self, landed: Landed) -> None:
        """The token that came with the KV goes out at once; the engine knows it and gives the ones after it."""
        prompt = landed.prompt
        output = SequenceOutput(
            self.request.engine_id,
            (prompt.first_token_id,),
            () if prompt.first_logprobs is None else (prompt.first_logprobs,),
            landed.prompt_logprobs,
            cached_tokens=prompt.cached_tokens,
        )
        entry = self.on_output(output)
        if entry is not None:
            self.session.send_step([entry])

    # --- outputs ------------------------------------------------------------------------------------------------------

    def on_output(self, output: SequenceOutput) -> StepEntry | None:
        """This request's share of a step as the router shall see it; None when there is nothing (more) to say."""
        if self._cancel_reason or self._is_handed_over or self._ended.is_set():
            return None
        if output.finish_reason is FinishReason.ERROR:
            self._end(EngineFailure(output.error or "the engine failed on this request", stage="decode"))
            return None
        if output.finish_reason is FinishReason.CANCELLED:  # not by us: the engine stops
            self._end(WorkerUnavailable("the engine stopped before the request ended", stage="decode"))
            return None
        event = self._event(output)
        self._num_generated += len(output.token_ids)
        if output.finish_reason is not None:
            self._end(None)
        return StepEntry(self.request.request_id, output.token_ids, event)

    def _event(self, output: SequenceOutput) -> worker_pb2.RequestEvent | None:
        """Everything of this step that is not just a token: first tokens, ends, logprobs. Mostly None."""
        is_first = RequestMoment.FIRST_TOKEN not in self.timeline.moments
        is_end = output.finish_reason is not None
        self._mark(output, is_first)
        if not (is_first or is_end or output.logprobs):
            return None
        event = worker_pb2.RequestEvent(
            request_id=self.request.request_id,
            fence=self.request.fence,
            logprobs=[logprob_messages.to_message(logprobs) for logprobs in output.logprobs],
            prompt_tokens=self.request.num_tokens - self.request.num_generated,
        )
        if is_first:
            event.prompt_logprobs.extend(logprob_messages.to_message(logprobs) for logprobs in output.prompt_logprobs)
            event.cached_tokens = output.cached_tokens
        if output.finish_reason is not None:
            event.finish_reason = FINISH_REASONS[output.finish_reason]
            event.completion_tokens = self._num_generated + len(output.token_ids)
            if output.stop_token_id is not None:
                event.has_stop_token, event.stop_token_id = True, output.stop_token_id
        if is_first or is_end:
            event.timeline.CopyFrom(self.timeline.to_message())
        return event

    def _mark(self, output: SequenceOutput, is_first: bool) -> None:
        if is_first:
            self.timeline.mark(RequestMoment.FIRST_TOKEN)
            if not self.timeline.prefill_worker_id:  # prefilled here: the engine knows how long it took
                self.timeline.prefill_queued_s = output.queued_s
                self.timeline.prefill_compute_s = output.compute_s
                self._resources.metrics.prefilled_here(self.request.num_tokens, output.cached_tokens)
        else:
            self.timeline.mark_once(RequestMoment.FIRST_DECODE_STEP)
        if output.finish_reason is not None:
            self.timeline.mark(RequestMoment.ENDED)
            self._resources.metrics.ended(output.finish_reason)

    def _end(self, error: TandemError | None) -> None:
        self._is_in_engine = False
        self._error = error
        self._ended.set()

    def _fail(self, error: TandemError) -> None:
        self._failure = error.error_code
        self._resources.metrics.failed(error)
        self.session.send_failure(self.request.request_id, self.request.fence, error)

    def _tell_cancelled(self) -> None:
        self._resources.metrics.ended(FinishReason.CANCELLED)
        event = worker_pb2.RequestEvent(
            request_id=self.request.request_id,
            fence=self.request.fence,
            finish_reason=common_pb2.FINISH_REASON_CANCELLED,
            completion_tokens=self._num_generated,
            timeline=self.timeline.to_message(),
        )
        self.session.send_step([StepEntry(self.request.request_id, (), event)])
