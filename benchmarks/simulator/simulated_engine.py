"""One engine on a virtual clock: the real scheduler, pool and prefix cache; a step lasts as the timing model says.

A step of decodes alone is followed by equal ones until somebody arrives or ends, so up to `max_leap` of them are taken
as one event; an arrival cuts a leap short at the step in progress. Blocks for the tokens of a leap are taken by the
next step: a pool looks emptier by at most `max_leap` tokens a sequence than it would be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulator.event_queue import EventQueue, Timer
from cluster.errors import ServerOverloaded
from engine.block_pool import BlockPool
from engine.mock_engine import StepTiming
from engine.request import EngineLimits, EngineLoad, EngineRequest
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceState
from engine.step_plan import StepPlan

DEFAULT_MAX_LEAP = 16
# Generated tokens are never read: only their number costs time.
GENERATED_TOKEN = 0
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step, or a leap of steps, gave one sequence."""

    sequence: Sequence
    num_tokens: int
    is_first: bool
    is_last: bool


OutputSink = Callable[[StepTokens], None]
StartSink = Callable[[Sequence], None]


class SimulatedEngine:
    """Owned by its worker. `started` hears of a sequence at its first step, `sink` of tokens at the end of theirs."""

    def __init__(
        self,
        events: EventQueue,
        pool: BlockPool,
        limits: EngineLimits,
        timing: StepTiming,
        started: StartSink,
        sink: OutputSink,
        max_leap: int = DEFAULT_MAX_LEAP,
    ) -> None:
        self.pool = pool
        self.busy_s = 0.0
        self._events = events
        self._limits = limits
        self._timing = timing
        self._started = started
        self._sink = sink
        self._max_leap = max_leap
        self._scheduler = Scheduler(pool, limits)
        self._num_arrivals = 0
        self._plan: StepPlan | None = None
        self._step: _Step | None = None
        self._is_stopped = False

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
        """Nothing comes out of it any more."""
        self._is_stopped = True
        if self._step is not None:
            self._step.timer.cancel()

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
        num_steps = 1
        if all(chunk.num_tokens == 1 and chunk.is_sampled and chunk.sequence.has_output for chunk in chunks):
            shortest = min(chunk.sequence.max_length - chunk.sequence.num_tokens for chunk in chunks)
            num_steps = max(1, min(self._max_leap, shortest))
        first_s = self._timing.step_s(chunks)
        longer_s = self._timing.decode[2] * len(chunks) / 1e3  # each step of a leap has a token more to attend to
        self._plan = plan
        self._step = _Step(now_s, first_s, longer_s, num_steps)
        self._step.timer = self._events.at(self._step.end_s, self._end)

    def _end(self) -> None:
        plan, step = self._plan, self._step
        if plan is None or step is None:
            raise RuntimeError("a step ended that never began")
        self._plan = self._step = None
        self.busy_s += self._events.now_s - step.started_s
        given = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            is_prompt = not sequence.has_output
            if not chunk.is_sampled:
                sequence.num_computed += chunk.num_tokens
            else:
                sequence.num_computed += chunk.num_tokens + step.num_steps - 1
                for _ in range(step.num_steps):
                    sequence.append(GENERATED_TOKEN)
                is_last = sequence.num_tokens >= sequence.max_length
                given.append(StepTokens(sequence, step.num_steps, is_prompt, is_last))
                sequence.has_output = True
            if is_prompt or sequence.num_tokens >= sequence.max_length:
                self._publish(sequence)
        for tokens in given:
            if tokens.is_last and tokens.sequence.request.hold_blocks:
                self._scheduler.hold(tokens.sequence)
            elif tokens.is_last:
                self._scheduler.finish(tokens.sequence)
        for tokens in given:
            self._sink(tokens)
        if self._step is None:  # nobody who heard of it has woken the engine
            self._begin()

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
        num_steps = self.num_steps
        gone_s = events.now_s - self.started_s
        while num_steps > 1 and self._elapsed_s(num_steps - 1) >= gone_s:
            num_steps -= 1
        if num_steps < self.num_steps:
            self.num_steps = num_steps
            self.timer.cancel()
            self.timer = events.at(self.end_s, end)

    def _elapsed_s(self, num_steps: int) -> float:
        return num_steps * self.first_s + self.longer_s * num_steps * (num_steps - 1) / 2
