"""The engine: one thread that turns requests into tokens, step by step.

    submit, cancel, release ──> Inbox ──> [ take, expire, schedule, execute, finish ] ──outputs of the step──> sink

The worker's event loop and the engine thread meet in the inbox, in the sink and in the block pool, nowhere else. The
engine knows no sockets and no transfers: a prefill worker hears of written KV through its listener, a decode worker
submits prompts that landed.

Failure: an exception in a step ends that step's requests with ERROR and the engine goes on; after
`MAX_FAILED_STEPS` failed steps in a row it ends everything and refuses what comes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Chunks
from typing import TYPE_CHECKING

from cluster.errors import TandemError
from cluster.identity import RequestId
from engine.block_pool import BlockPool
from engine.compiling_sequences import CompilingSequences, compile_error
from engine.deadlines import Deadlines
from engine.drafting import Speculator
from engine.executor import StepExecutor, StepResults
from engine.inbox import Inbox, InboxItems
from engine.kv_progress import KvProgress
from engine.kv_tiering import KvTiering
from engine.request import EngineLimits, EngineLoad, EngineRequest, FinishReason, OutputSink, SequenceOutput
from engine.request_check import check_request
from engine.result_taker import ResultTaker, Taken, decide_stop
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceState
from engine.step_budget import StepBudget
from engine.step_figures import StepFigures
from engine.step_plan import StepPlan
from engine.stop_rules import StopDecision
from engine.swap_space import SwapSpace
from engine.waiting_queue import SchedulingPolicy

if TYPE_CHECKING:  # the mock engine runs without it
    from engine.grammar_compiler import GrammarCompiler

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
STOPPED = "it was stopped"


class Engine:
    """Implements `engine.request.ServingEngine` on any executor."""

    def __init__(
        self,
        executor: StepExecutor,
        pool: BlockPool,
        limits: EngineLimits,
        *,
        policy: SchedulingPolicy = SchedulingPolicy.PRIORITY,
        speculator: Speculator | None = None,
        grammars: GrammarCompiler | None = None,
        swap: SwapSpace | None = None,
        step_budget: StepBudget | None = None,
        tiering: KvTiering | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._pool = pool
        self._limits = limits
        self._clock = clock
        self._speculator = speculator
        self._grammars = grammars
        self._swap = swap
        self._step_budget = step_budget
        self._tiering = tiering
        self._scheduler = Scheduler(pool, limits, policy, speculator, swap, step_budget, tiering)
        self._taker = ResultTaker(executor, pool, speculator)
        self._inbox = Inbox(limits.max_waiting)
        self._compiling = CompilingSequences(self._inbox.wake)
        self._sink: OutputSink = _drop
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._outputs: list[SequenceOutput] = []
        self._deadlines = Deadlines()
        self._is_blocked = False  # nothing can run until something changes outside
        self._num_failed_steps = 0
        self._figures = StepFigures()  # the engine thread's last step, for `load`
        self._has_ended = False
        self._tell_ended: Callable[[], None] = _nobody_waits
        pool.add_freed_listener(self._blocks_freed)

    # --- any thread -------------------------------------------------------------------------------------------------

    def start(self, sink: OutputSink) -> None:
        self._sink = sink
        if self._tiering is not None:
            self._tiering.start(self._inbox.wake)
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        num_kv_tokens = check_request(
            request,
            self._executor.vocab_size,
            self._limits,
            has_grammars=self._grammars is not None,
            speculator=self._speculator,
        )
        self._scheduler.check_fits(num_kv_tokens)
        grammar = self._grammars.compile(request.sampling) if self._grammars is not None else None
        self._inbox.put(
            lambda arrival_index: Sequence(
                request,
                self._pool.new_chain(request.scope_key),
                self._limits.max_model_len,
                arrival_index,
                self._clock(),
                grammar,
            ),
            request.request_id,
            len(self._scheduler.waiting),
        )

    def cancel(self, request_id: RequestId) -> None:
        self._inbox.cancel(request_id)

    def release(self, request_id: RequestId) -> None:
        self._inbox.release(request_id)

    def load(self) -> EngineLoad:
        figures = self._figures
        running = len(self._scheduler.running)
        return EngineLoad(
            running=running,
            waiting=len(self._scheduler.waiting) + self._inbox.num_arrivals,
            waiting_tokens=self._scheduler.waiting.num_tokens,
            context_tokens=figures.context_tokens if running else 0,
            step_ms=figures.step_s * 1000,
            tokens_per_s=figures.tokens_per_s if running else 0.0,
            batch_size=figures.batch_size if running else 0,
            prefill_share=0.0 if self._step_budget is None else self._step_budget.prefill_share,
            restore_ms_per_block=0.0 if self._tiering is None else self._tiering.restore_ms_per_block,
            census=self._pool.census(),
        )

    def counters(self) -> dict[str, float]:
        """Sums since the start, and what the swap space holds now."""
        counters = self._figures.counters() | {"preemptions": self._scheduler.num_preemptions}
        for part in (self._swap, self._tiering, self._speculator):
            if part is not None:
                counters.update(part.counters())
        return counters

    def tell_when_ended(self, callback: Callable[[], None]) -> None:
        """Called once the engine's thread takes nothing any more, from that thread; here and now if it does so already.
        It may be called twice."""
        self._tell_ended = callback
        if self._has_ended:
            callback()

    @property
    def is_running(self) -> bool:
        """Whether the engine's thread takes requests; False before `start`, after `stop`, and once it has given up."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        self._inbox.stop()
        if self._thread.ident is None:  # never started: nobody else will tell those who wait
            self._end_everything(STOPPED)
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("engine thread did not stop", extra={"timeout_s": timeout_s})
        if self._tiering is not None:
            self._tiering.stop(timeout_s)

    def _blocks_freed(self) -> None:
        if threading.current_thread() is not self._thread:  # what the engine itself frees, it knows
            self._inbox.wake()

    # --- the engine thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "its thread crashed"
        try:
            while self._num_failed_steps < MAX_FAILED_STEPS:
                items = self._inbox.take(self._idle_timeout_s())
                if items.is_stopping:
                    reason = STOPPED
                    return
                self._take_in(items)
                self._expire()
                self._step()
                self._emit()
            reason = f"{MAX_FAILED_STEPS} steps in a row failed"
        finally:
            self._end_everything(reason)
            self._has_ended = True
            self._tell_ended()

    def _idle_timeout_s(self) -> float | None:
        """How long the thread may sleep when nobody calls: not at all with work, until a deadline, for ever."""
        has_work = bool(self._scheduler.running) or len(self._scheduler.waiting) > 0
        if has_work and not self._is_blocked:
            return 0.0
        fetched_s = self._tiering.next_deadline_s if self._tiering is not None else None
        deadlines_s = [at_s for at_s in (self._deadlines.next_s, fetched_s) if at_s is not None]
        return max(0.0, min(deadlines_s) - self._clock()) if deadlines_s else None

    def _take_in(self, items: InboxItems) -> None:
        self._is_blocked = False
        for sequence in items.arrivals:
            self._deadlines.watch(sequence, self._inbox.num_live)
            if sequence.grammar is not None:
                self._compiling.add(sequence)
            else:
                self._admit(sequence)
        for sequence in items.cancelled:
            if sequence.state in (SequenceState.WAITING, SequenceState.RUNNING):
                self._end(sequence, FinishReason.CANCELLED)
        for sequence in items.released:
            if sequence.state is SequenceState.HELD:
                self._forget(sequence)
        for sequence in self._compiling.take_compiled():
            if (error := compile_error(sequence)) is not None:
                self._end(sequence, FinishReason.ERROR, error=error)
            else:
                self._admit(sequence)

    def _admit(self, sequence: Sequence) -> None:
        if sequence.request.landed is None or self._take_in_landed(sequence):
            self._scheduler.add(sequence)

    def _take_in_landed(self, sequence: Sequence) -> bool:
        """Publishes the verified prompt and applies the stop rules to the first token, which the worker has sent."""
        try:
            self._pool.publish(sequence.chain, sequence.token_ids, sequence.blocks, sequence.num_computed)
        except TandemError as error:  # stale blocks: whoever handed them over released them
            logger.exception("landed prompt refused", extra={"request_id": sequence.request.request_id})
            sequence.blocks = []
            self._end(sequence, FinishReason.ERROR, error=f"{error.error_code}: {error.message}")
            return False
        decision = decide_stop(sequence, [sequence.last_token_id], sequence.num_generated - 1)
        if decision.finish_reason is None:
            return True
        self._end(sequence, decision.finish_reason, stop_token_id=decision.stop_token_id)
        return False

    def _expire(self) -> None:
        for sequence in self._deadlines.take_expired(self._clock()):
            self._end(sequence, FinishReason.ERROR, error="deadline_exceeded")

    def _step(self) -> None:
        """schedule, execute, finish; whatever is raised ends this step's requests alone."""
        if not self._scheduler.running and not len(self._scheduler.waiting):
            return
        plan: StepPlan | None = None
        started_s = self._clock()
        try:
            plan = self._scheduler.schedule()
            for sequence in plan.preempted:
                self._executor.forget(sequence)
            if not plan.chunks:
                self._is_blocked = not plan.preempted
                return
            results, progress = self._execute(plan, started_s)
            num_generated = self._finish(plan, results, progress)
            self._num_failed_steps = 0
        except Exception as error:
            logger.exception("engine step failed")
            self._num_failed_steps += 1
            for sequence in self._inbox.live():  # the executor may know half a step of anyone: it learns them anew
                self._executor.forget(sequence)
            victims = [chunk.sequence for chunk in plan.chunks] if plan else list(self._scheduler.running)
            for sequence in victims:
                if sequence.state is SequenceState.RUNNING:
                    self._end(sequence, FinishReason.ERROR, error=f"engine step failed: {type(error).__name__}")
            return
        self._measure(plan, num_generated, self._clock() - started_s)

    def _execute(self, plan: StepPlan, now_s: float) -> tuple[StepResults, KvProgress]:
        for sequence in plan.admitted:
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now_s
        for tail in plan.tails:
            self._executor.copy_block(tail.source, tail.destination)
        progress = KvProgress(plan.admitted, plan.chunks)
        progress.started()
        results = self._executor.execute(plan.chunks, progress.layer_written if progress else None)
        progress.finished()
        return results, progress

    def _finish(self, plan: StepPlan, results: StepResults, progress: KvProgress) -> int:
        """Tells what the step gave, ends who is done. Gives how many tokens were generated."""
        num_generated = 0
        for taken in self._taker.take(plan.chunks, results, progress.failed):
            if taken.decision is None:
                self._end(taken.sequence, FinishReason.ERROR, error=taken.error)
                continue
            num_generated += len(taken.token_ids)
            self._give(taken, taken.decision)
        return num_generated

    def _give(self, taken: Taken, decision: StopDecision) -> None:
        """The step's output of one sequence; ends it when the decision says so."""
        sequence, token_ids, logprobs = taken.sequence, taken.token_ids, taken.logprobs
        if sequence.has_output and decision.finish_reason is None:
            self._outputs.append(SequenceOutput(sequence.request.request_id, token_ids, logprobs))
            return
        first_scheduled_s = sequence.arrival_s if sequence.first_scheduled_s is None else sequence.first_scheduled_s
        is_first = not sequence.has_output
        output = SequenceOutput(
            sequence.request.request_id,
            token_ids,
            logprobs,
            tuple(sequence.prompt_logprobs) if is_first else (),
            decision.finish_reason,
            decision.stop_token_id,
            cached_tokens=sequence.cached_tokens if is_first else 0,
            queued_s=first_scheduled_s - sequence.arrival_s if is_first else 0.0,
            compute_s=self._clock() - first_scheduled_s if is_first else 0.0,
        )
        sequence.has_output = True
        self._outputs.append(output)
        if decision.finish_reason is None:
            return
        if sequence.request.hold_blocks:
            self._scheduler.hold(sequence)
            self._executor.forget(sequence)
        else:
            self._forget(sequence)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _end(
        self, sequence: Sequence, reason: FinishReason, *, stop_token_id: int | None = None, error: str = ""
    ) -> None:
        """Ends a sequence without a new token."""
        self._forget(sequence)
        self._outputs.append(
            SequenceOutput(
                sequence.request.request_id,
                (),
                finish_reason=reason,
                stop_token_id=stop_token_id,
                error=error,
                cached_tokens=0 if sequence.has_output else sequence.cached_tokens,
            )
        )

    def _forget(self, sequence: Sequence) -> None:
        self._executor.forget(sequence)
        if self._speculator is not None:
            self._speculator.forget(sequence.request.request_id)
        self._inbox.forget(sequence)
        self._scheduler.finish(sequence)

    def _emit(self) -> None:
        if not self._outputs:
            return
        outputs, self._outputs = self._outputs, []
        try:
            self._sink(outputs)
        except Exception:
            logger.exception("output sink failed")

    def _end_everything(self, reason: str) -> None:
        """Every request hears of its end; held blocks come back, too: nobody will release them any more."""
        if reason != STOPPED:
            logger.error("engine gives up", extra={"reason": reason})
        for sequence in self._inbox.close(reason):
            if sequence.state is SequenceState.HELD:
                self._forget(sequence)
            elif reason == STOPPED:
                self._end(sequence, FinishReason.CANCELLED)
            else:
                self._end(sequence, FinishReason.ERROR, error=f"the engine gave up: {reason}")
        self._emit()

    def _measure(self, plan: StepPlan, num_generated: int, step_s: float) -> None:
        num_rows = sum(chunk.num_rows for chunk in plan.chunks)
        if self._swap is not None:
            self._swap.saw_step(num_rows, step_s)
        if self._tiering is not None:
            self._tiering.saw_step(num_rows, step_s)
        if self._step_budget is not None:
            self._step_budget.saw_step(plan.chunks, step_s * 1000)
        context_tokens = sum(sequence.num_computed for sequence in self._scheduler.running)
        self._figures = self._figures.after_step(context_tokens, len(plan.chunks), num_generated, step_s, num_rows)


def _drop(outputs: Chunks[SequenceOutput]) -> None:
    """The sink before `start`: nothing runs yet."""


def _nobody_waits() -> None:
    """Who is told of the end of a thread that nobody watches."""
