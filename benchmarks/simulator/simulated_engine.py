"""One engine on a virtual clock: the real scheduler, pool and prefix cache; a step lasts as the timing model says.

A step of decodes alone is followed by equal ones until somebody arrives or ends, so up to `max_leap` of them are taken
as one event; an arrival cuts a leap short at the step in progress. Blocks for the tokens of a leap are taken by the
next step: a pool looks emptier by at most `max_leap` tokens a sequence than it would be.

Steps are logged once for all sequences that decode in them; a sequence's tokens are told when it ends, or sits out a
step, or its engine stops: a token costs a few additions, not a call to everybody who counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Chunks
from dataclasses import dataclass

from benchmarks.simulator.event_queue import EventQueue, Timer
from cluster.errors import ServerOverloaded
from engine.block_pool import BlockPool
from engine.mock_engine import StepTiming
from engine.request import EngineLimits, EngineLoad, EngineRequest
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceState
from engine.step_budget import StepBudget
from engine.step_plan import ScheduledChunk, StepPlan

DEFAULT_MAX_LEAP = 16
# Generated tokens are never read: only their number costs time.
GENERATED_TOKEN = 0
RETRY_AFTER_S = 1.0


Chunk = tuple[float, int]  # when a step or a leap ended, and the tokens that each of its sequences got


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What one sequence got since it was last told of."""

    sequence: Sequence
    chunks: Chunks[Chunk]
    is_first: bool
    is_last: bool


OutputSink = Callable[[StepTokens], None]
StartSink = Callable[[Sequence], None]


class SimulatedEngine:
    """Owned by its worker. `started` hears of a sequence at its first step, `sink` of its first token at once and of
    the others no later than the last, `stepped` of every step's end."""

    def __init__(
        self,
        events: EventQueue,
        pool: BlockPool,
        limits: EngineLimits,
        timing: StepTiming,
        started: StartSink,
        sink: OutputSink,
        stepped: Callable[[], None],
        max_leap: int = DEFAULT_MAX_LEAP,
        step_budget: StepBudget | None = None,
    ) -> None:
        self.pool = pool
        self.busy_s = 0.0
        self._events = events
        self._limits = limits
        self._timing = timing
        self._started = started
        self._sink = sink
        self._stepped = stepped
        self._max_leap = max_leap
        self._step_budget = step_budget
        self._scheduler = Scheduler(pool, limits, step_budget=step_budget)
        self._num_arrivals = 0
        self._plan: StepPlan | None = None
        self._step: _Step | None = None
        self._is_stopped = False
        self._log: list[Chunk] = []
        self._decoding: dict[Sequence, int] = {}  # and the log's length when their first untold step ended

    def accept(self, request: EngineRequest) -> Sequence:
        """Queues a request until `wake`; a landed prompt is published at once, as the engine does when it takes it in.

        Raises `ServerOverloaded` when its queue is full."""
        if len(self._scheduler.waiting) >= self._limits.max_waiting:
            raise ServerOverloaded(f"{self._limits.max_waiting} requests are waiting", retry_after_s=RETRY_AFTER_S)
        chain = self.pool.new_chain(request.scope_key)
        sequence = Sequence(request, chain, self._limits.max_model_len, self._num_arrivals, self._events.now_s)
        self._num_arrivals += 1
        if request.landed is not None:
            self.pool.publish(chain, sequence.token_ids, sequence.blocks, sequence.num_computed)
        self._scheduler.add(sequence)
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Gives back the blocks of a prompt that was held for its transfer."""
        if sequence.state is SequenceState.HELD:
            self._scheduler.finish(sequence)
            self.wake()

    def wake(self) -> None:
        """Something changed: begins a step, or ends a leap at the step in progress."""
        if self._is_stopped:
            return
        if self._step is None:
            self._begin()
        else:
            self._step.cut_short(self._events, self._end)

    @property
    def is_blocked(self) -> bool:
        """Somebody waits and nothing runs: blocks must come back first."""
        return self._step is None and len(self._scheduler.waiting) > 0

    def stop(self) -> None:
        """Nothing comes out of it any more but what was generated and not told of."""
        self.tell()
        self._is_stopped = True
        if self._step is not None:
            self._step.timer.cancel()

    def tell(self) -> None:
        """Everybody who decodes is told of what there is."""
        for sequence in list(self._decoding):
            self._tell(sequence, is_last=False)

    def load(self) -> EngineLoad:
        scheduler, step = self._scheduler, self._step
        return EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting.num_tokens,
            context_tokens=sum(sequence.num_computed for sequence in scheduler.running),
            step_ms=step.first_s * 1e3 if step else 0.0,
            tokens_per_s=0.0,
            batch_size=len(self._plan.chunks) if self._plan else 0,
            prefill_share=0.0 if self._step_budget is None else self._step_budget.prefill_share,
            census=self.pool.census(),
        )

    def _begin(self) -> None:
        plan = self._scheduler.schedule()
        if not plan.chunks:
            self._plan = self._step = None
            return
        now_s = self._events.now_s
        for sequence in plan.admitted:
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now_s
                self._started(sequence)
        chunks = plan.chunks
        num_steps = self._num_equal_steps(chunks)
        first_s = self._timing.step_s(chunks)
        if self._step_budget is not None:
            self._step_budget.saw_step(chunks, first_s * 1e3)
        longer_s = self._timing.decode[2] * len(chunks) / 1e3  # each step of a leap has a token more to attend to
        self._plan = plan
        self._step = _Step(now_s, first_s, longer_s, num_steps)
        self._step.timer = self._events.at(self._step.end_s, self._end)

    def _num_equal_steps(self, chunks: Chunks[ScheduledChunk]) -> int:
        """Until the first of them ends; 1 where somebody does more than decode."""
        num_steps = self._max_leap
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.num_tokens != 1 or not sequence.has_output or not chunk.is_sampled:
                return 1
            num_steps = min(num_steps, sequence.max_length - sequence.num_tokens)
        return max(1, num_steps)

    def _end(self) -> None:
        plan, step = self._plan, self._step
        if plan is None or step is None:
            raise RuntimeError("a step ended that never began")
        self._plan = self._step = None
        now_s, num_steps = self._events.now_s, step.num_steps
        self.busy_s += now_s - step.started_s
        place, decoding = len(self._log), self._decoding
        self._log.append((now_s, num_steps))
        begun: list[Sequence] = []
        ended: list[Sequence] = []
        num_decoding = 0
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if not chunk.is_sampled:
                sequence.num_computed += chunk.num_tokens
                if not sequence.has_output:
                    self._publish(sequence)
                continue
            sequence.num_computed += chunk.num_tokens + num_steps - 1
            # Its tokens are made as zeros, which is what these are.
            sequence.num_tokens += num_steps
            sequence.last_token_id = GENERATED_TOKEN
            is_last = sequence.num_tokens >= sequence.max_length
            if sequence.has_output:
                num_decoding += 1
                decoding.setdefault(sequence, place)
            else:
                sequence.has_output = True
                begun.append(sequence)
                self._publish(sequence)
            if is_last:
                ended.append(sequence)
        if num_decoding < len(decoding):
            self._tell_those_who_sat_out(plan.chunks, place)
        for sequence in ended:
            self._publish(sequence)
            if sequence.request.hold_blocks:
                self._scheduler.hold(sequence)
            else:
                self._scheduler.finish(sequence)
        self._stepped()
        last = set(ended)
        for sequence in begun:
            self._sink(StepTokens(sequence, ((now_s, num_steps),), is_first=True, is_last=sequence in last))
        for sequence in ended:
            if sequence in decoding:
                self._tell(sequence, is_last=True)
        if self._step is None:  # nobody who heard of it has woken the engine
            self._begin()

    def _tell(self, sequence: Sequence, *, is_last: bool) -> None:
        chunks = self._log[self._decoding.pop(sequence) :]
        self._sink(StepTokens(sequence, chunks, is_first=False, is_last=is_last))

    def _tell_those_who_sat_out(self, chunks: Chunks[ScheduledChunk], place: int) -> None:
        """They got nothing in the step that was logged last."""
        present = {chunk.sequence for chunk in chunks}
        for sequence in [sequence for sequence in self._decoding if sequence not in present]:
            told = self._log[self._decoding.pop(sequence) : place]
            self._sink(StepTokens(sequence, told, is_first=False, is_last=False))

    def _publish(self, sequence: Sequence) -> None:
        held = len(sequence.blocks) * self.pool.block_tokens
        self.pool.publish(sequence.chain, sequence.token_ids, sequence.blocks, min(sequence.num_computed, held))


class _Step:
    """One step, or a leap of equal ones, in progress."""

    __slots__ = ("first_s", "longer_s", "num_steps", "started_s", "timer")

    def __init__(self, started_s: float, first_s: float, longer_s: float, num_steps: int) -> None:
        self.started_s = started_s
        self.first_s = first_s
        self.longer_s = longer_s
        self.num_steps = num_steps
        self.timer: Timer

    @property
    def end_s(self) -> float:
        return self.started_s + self._elapsed_s(self.num_steps)

    def cut_short(self, events: EventQueue, end: Callable[[], None]) -> None:
        """Ends the leap with the step that is in progress now."""
        if self.num_steps == 1:
            return
        gone_s = events.now_s - self.started_s
        # Later steps are longer, if anything: no more than these can have begun.
        num_steps = min(self.num_steps, int(gone_s / self.first_s) + 1)
        while num_steps > 1 and self._elapsed_s(num_steps - 1) >= gone_s:
            num_steps -= 1
        if num_steps < self.num_steps:
            self.num_steps = num_steps
            self.timer.cancel()
            self.timer = events.at(self.end_s, end)

    def _elapsed_s(self, num_steps: int) -> float:
        return num_steps * self.first_s + self.longer_s * num_steps * (num_steps - 1) / 2
