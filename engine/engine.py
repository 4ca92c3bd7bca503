"""The engine: one thread that turns requests into tokens, step by step.

    submit, cancel, release ──> Inbox ──> [ take, expire, schedule, execute, finish ] ──outputs of the step──> sink

The worker's event loop and the engine thread meet in the inbox, in the sink and in the block pool, nowhere else. The
engine knows no sockets and no transfers: a prefill worker hears of written KV through its listener, a decode worker
submits prompts that landed.

Failure: an exception in a step ends that step's requests with ERROR and the engine goes on; after
`MAX_FAILED_STEPS` failed steps in a row it ends everything and refuses what comes.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Chunks
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.errors import ContextLengthExceeded, InvalidRequest, TandemError
from cluster.identity import RequestId
from cluster.sampling_params import SamplingParams
from engine.block_pool import BlockPool
from engine.drafting import Accepted, Speculator, verify_match
from engine.executor import StepExecutor, StepResults
from engine.inbox import Inbox, InboxItems
from engine.kv_progress import KvProgress
from engine.request import (
    EngineLimits,
    EngineLoad,
    EngineRequest,
    FinishReason,
    OutputSink,
    PositionLogprobs,
    SequenceOutput,
)
from engine.scheduler import ScheduledChunk, Scheduler, StepPlan
from engine.sequence import Sequence, SequenceState
from engine.step_budget import StepBudget
from engine.stop_rules import StopDecision, apply_stop_rules
from engine.swap_space import SwapSpace
from engine.waiting_queue import SchedulingPolicy

if TYPE_CHECKING:  # the mock engine runs without it
    from engine.grammar_compiler import GrammarCompiler

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
AVERAGE_WEIGHT = 0.1  # of the newest step in the moving averages
STOPPED = "it was stopped"
SPECULATION_OFF = ("", "auto", "off")


@dataclass(frozen=True, slots=True)
class _StepFigures:
    """The engine thread's last step, for `load`."""

    context_tokens: int = 0
    batch_size: int = 0
    step_s: float = 0.0  # moving average
    tokens_per_s: float = 0.0  # moving average


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._pool = pool
        self._limits = limits
        self._clock = clock
        self._speculator = speculator
        self._grammars = grammars
        self._uncompiled: list[Sequence] = []  # arrived, and their constraint is still being compiled
        self._swap = swap
        self._step_budget = step_budget
        self._scheduler = Scheduler(pool, limits, policy, speculator, swap, step_budget)
        self._inbox = Inbox(limits.max_waiting)
        self._sink: OutputSink = _drop
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._outputs: list[SequenceOutput] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._is_blocked = False  # nothing can run until something changes outside
        self._num_failed_steps = 0
        self._figures = _StepFigures()
        pool.add_freed_listener(self._blocks_freed)

    # --- any thread -------------------------------------------------------------------------------------------------

    def start(self, sink: OutputSink) -> None:
        self._sink = sink
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        self._check(request)
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
            prefill_tokens_beside_decodes=0 if self._step_budget is None else self._step_budget.prefill_tokens,
            census=self._pool.census(),
        )

    def counters(self) -> dict[str, float]:
        """Sums since the start, and what the swap space holds now."""
        counters: dict[str, float] = {"preemptions": self._scheduler.num_preemptions}
        if self._swap is not None:
            counters["preemptions_swapped"] = self._swap.num_saved
            counters["swapped_in"] = self._swap.num_restored
            counters["swapped_bytes"] = self._swap.used_bytes
        if self._speculator is not None:
            counters.update(self._speculator.counters())
        return counters

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

    def _check(self, request: EngineRequest) -> None:
        """Raises what `ServingEngine.submit` lists: no path into the engine skips the limits."""
        params, token_ids = request.sampling.checked(self._executor.vocab_size), request.token_ids
        num_tokens = len(token_ids)
        if num_tokens == 0:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= self._executor.vocab_size:
            raise InvalidRequest(
                f"the prompt has a token id outside [0, {self._executor.vocab_size})",
                param="prompt",
                code="invalid_token_id",
            )
        if not 0 <= request.num_generated < min(num_tokens, params.max_tokens):
            raise InvalidRequest(
                f"num_generated is {request.num_generated}: must leave a prompt and stay below max_tokens",
                param="num_generated",
            )
        if params.guide is not None and self._grammars is None:
            raise InvalidRequest("this engine has no constrained decoding", param="response_format")
        if not request.hold_blocks:  # drafts are the decode side's
            self._check_speculation(params)
        if num_tokens >= self._limits.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {num_tokens} tokens and the context {self._limits.max_model_len}: no room for a token",
                param="prompt",
            )
        max_tokens = 1 if request.hold_blocks else params.max_tokens - request.num_generated
        self._scheduler.check_fits(min(num_tokens + max_tokens, self._limits.max_model_len) - 1)

    def _check_speculation(self, params: SamplingParams) -> None:
        if self._speculator is not None:
            self._speculator.check(params)
        elif params.speculation not in SPECULATION_OFF:
            raise InvalidRequest(f"this engine has no drafter {params.speculation!r}", param="speculation")

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

    def _idle_timeout_s(self) -> float | None:
        """How long the thread may sleep when nobody calls: not at all with work, until a deadline, for ever."""
        has_work = bool(self._scheduler.running) or len(self._scheduler.waiting) > 0
        if has_work and not self._is_blocked:
            return 0.0
        return max(0.0, self._deadlines[0][0] - self._clock()) if self._deadlines else None

    def _take_in(self, items: InboxItems) -> None:
        self._is_blocked = False
        for sequence in items.arrivals:
            if sequence.request.deadline_s:
                self._watch_deadline(sequence)
            if sequence.grammar is not None:
                self._uncompiled.append(sequence)
                sequence.grammar.add_done_callback(lambda _: self._inbox.wake())
            else:
                self._admit(sequence)
        for sequence in items.cancelled:
            if sequence.state in (SequenceState.WAITING, SequenceState.RUNNING):
                self._end(sequence, FinishReason.CANCELLED)
        for sequence in items.released:
            if sequence.state is SequenceState.HELD:
                self._forget(sequence)
        if self._uncompiled:
            self._take_in_compiled()

    def _admit(self, sequence: Sequence) -> None:
        if sequence.request.landed is None or self._take_in_landed(sequence):
            self._scheduler.add(sequence)

    def _take_in_compiled(self) -> None:
        """Those whose constraint is compiled by now. Who was cancelled meanwhile is done with."""
        waiting = [sequence for sequence in self._uncompiled if sequence.state is SequenceState.WAITING]
        self._uncompiled = [sequence for sequence in waiting if not is_compiled(sequence)]
        for sequence in waiting:
            if not is_compiled(sequence):
                continue
            if (error := compile_error(sequence)) is not None:
                self._end(sequence, FinishReason.ERROR, error=error)
            else:
                self._admit(sequence)

    def _take_in_landed(self, sequence: Sequence) -> bool:
        """Publishes the verified prompt and applies the stop rules to the first token, which the worker has sent."""
        try:
            self._pool.publish(sequence.chain, sequence.token_ids, sequence.blocks, sequence.num_computed)
        except TandemError as error:  # stale blocks: whoever handed them over released them
            logger.exception("landed prompt refused", extra={"request_id": sequence.request.request_id})
            sequence.blocks = []
            self._end(sequence, FinishReason.ERROR, error=f"{error.error_code}: {error.message}")
            return False
        decision = self._stop_rules(sequence, [sequence.last_token_id], sequence.num_generated - 1)
        if decision.finish_reason is None:
            return True
        self._end(sequence, decision.finish_reason, stop_token_id=decision.stop_token_id)
        return False

    def _watch_deadline(self, sequence: Sequence) -> None:
        if len(self._deadlines) > 2 * self._inbox.num_live + 16:  # most of it has ended before its deadline
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not SequenceState.FINISHED]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (sequence.request.deadline_s, sequence.arrival_index, sequence))

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.state in (SequenceState.WAITING, SequenceState.RUNNING):
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
        """Books what the step computed, appends the tokens, ends who is done. Gives how many tokens were generated."""
        num_generated = 0
        sample = 0
        for index, chunk in enumerate(plan.chunks):
            sequence = chunk.sequence
            is_sampled, sample_index = chunk.is_sampled, sample
            if is_sampled:
                sample += 1 + chunk.num_drafts
            if is_sampled and sample_index in results.failed:
                self._end(sequence, FinishReason.ERROR, error=results.failed[sample_index])
                continue
            if sequence in progress.failed:
                self._end(sequence, FinishReason.ERROR, error="the listener of its KV failed")
                continue
            if index in results.prompt_logprobs:
                sequence.prompt_logprobs.extend(results.prompt_logprobs[index])
            if is_sampled:
                num_generated += self._take_tokens(chunk, results, sample_index)
            else:
                self._book_computed(sequence, sequence.num_computed + chunk.num_tokens)
        return num_generated

    def _book_computed(self, sequence: Sequence, num_computed: int) -> None:
        sequence.num_computed = num_computed
        if num_computed // self._pool.block_tokens > sequence.chain.num_blocks:
            self._pool.publish(sequence.chain, sequence.token_ids, sequence.blocks, num_computed)

    def _take_tokens(self, chunk: ScheduledChunk, results: StepResults, first_row: int) -> int:
        """Appends what the chunk's rows say as far as its drafts hold and no rule ends it. Gives how many tokens."""
        sequence = chunk.sequence
        accepted = Accepted((results.token_ids[first_row],), (0,))
        if chunk.num_drafts:
            accepted = self._verify(sequence, results, first_row)
        decision = self._stop_rules(sequence, accepted.token_ids, sequence.num_generated)
        token_ids, rows = accepted.token_ids[: decision.num_kept], accepted.rows[: decision.num_kept]
        if rows != tuple(range(len(rows))):
            self._move_kv(sequence, rows)
        if self._speculator is not None and results.taps is not None and decision.finish_reason is None:
            taps = results.taps[[first_row + row for row in rows]]
            self._speculator.sampled(sequence.request, sequence.num_tokens, token_ids, taps)
        for token_id in token_ids:
            sequence.append(token_id)
        self._book_computed(sequence, sequence.num_tokens - 1)  # KV behind that is of rejected drafts
        logprobs: tuple[PositionLogprobs, ...] = ()
        if first_row in results.logprobs:
            logprobs = tuple(results.logprobs[first_row + row] for row in rows)
        self._give(sequence, token_ids, logprobs, decision)
        return len(token_ids)

    def _verify(self, sequence: Sequence, results: StepResults, first_row: int) -> Accepted:
        draft = sequence.draft
        failed_rows = {row - first_row for row in results.failed}
        accepted = verify_match(draft, results.token_ids[first_row : first_row + 1 + len(draft)], failed_rows)
        if self._speculator is not None:
            self._speculator.verified(sequence.request.request_id, draft, accepted.num_accepted)
        return accepted

    def _move_kv(self, sequence: Sequence, rows: Chunks[int]) -> None:
        """The accepted branch of a tree stands between others: its KV moves to where that of a chain is."""
        first = sequence.num_tokens - 1  # where row 0 is
        block_tokens = self._pool.block_tokens

        def slot(index: int) -> int:
            return sequence.blocks[index // block_tokens].block * block_tokens + index % block_tokens

        moves = [(slot(first + row), slot(first + place)) for place, row in enumerate(rows) if row != place]
        self._executor.move_tokens([source for source, _ in moves], [destination for _, destination in moves])

    def _give(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[PositionLogprobs, ...],
        decision: StopDecision,
    ) -> None:
        """The step's output of one sequence; ends it when the decision says so."""
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

    def _stop_rules(self, sequence: Sequence, new_tokens: Chunks[int], num_generated: int) -> StopDecision:
        max_generated = sequence.max_length - sequence.num_prompt_tokens
        return apply_stop_rules(new_tokens, sequence.request.sampling, num_generated, max_generated)

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
        if self._swap is not None:
            self._swap.saw_step(sum(chunk.num_rows for chunk in plan.chunks), step_s)
        if self._step_budget is not None:
            num_decodes = sum(chunk.num_tokens == 1 for chunk in plan.chunks)
            num_prefill_tokens = sum(chunk.num_tokens for chunk in plan.chunks) - num_decodes
            self._step_budget.saw_step(num_decodes, num_prefill_tokens, step_s * 1000)
        last, rate = self._figures, num_generated / max(step_s, 1e-9)
        weight = AVERAGE_WEIGHT if last.step_s else 1.0
        self._figures = _StepFigures(
            context_tokens=sum(sequence.num_computed for sequence in self._scheduler.running),
            batch_size=len(plan.chunks),
            step_s=last.step_s + weight * (step_s - last.step_s),
            tokens_per_s=last.tokens_per_s + weight * (rate - last.tokens_per_s),
        )


def is_compiled(sequence: Sequence) -> bool:
    return sequence.grammar is None or sequence.grammar.done()


def compile_error(sequence: Sequence) -> str | None:
    """Why a request's constraint could not be compiled."""
    if sequence.grammar is None or (error := sequence.grammar.exception(0)) is None:
        return None
    if isinstance(error, TandemError):
        return f"{error.error_code}: {error.message}"
    return f"the constraint could not be compiled: {type(error).__name__}"


def _drop(outputs: Chunks[SequenceOutput]) -> None:
    """The sink before `start`: nothing runs yet."""
