"""Sends a plan and brings back a record for every request of it, whatever became of it.

- open loop: a request is due at its own time, however slow the server is; what the client is late stands in the record.
- closed loop: a fixed number in flight, for batch curves; warm-up runs under the same cap.
- sessions: the first turn is open loop, each next turn follows the answer after a pause and carries the whole dialogue.

The event loop's clock is the only clock, so a loop with a virtual clock runs the same code. Streams are read into
records after the run (`stream_record`): nothing is parsed while it lasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from benchmarks.openai_client import StreamCapture
from benchmarks.request_record import Outcome, RequestRecord
from benchmarks.stream_record import read_stream, read_turn
from benchmarks.workload import ChatMessage, PlannedRequest
from cluster.ended_tasks import end_tasks

# Open loop without a cap still has one: sockets are finite. A request that finds it reached waits, and is counted late.
DEFAULT_MAX_IN_FLIGHT = 2_048
DEFAULT_DRAIN_TIMEOUT_S = 120.0


class Sender(Protocol):
    """What a run needs of a client. `OpenAiClient` is one; a simulator's front is another."""

    async def send(self, request: PlannedRequest, capture: StreamCapture) -> None: ...


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Bounds of one run."""

    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    # After the last arrival: requests that have not ended by then are UNFINISHED.
    drain_timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class LoadRun:
    """A run's records in order of their index. Offered and measured window: [window_start_s, window_end_s)."""

    records: list[RequestRecord]
    window_start_s: float
    window_end_s: float
    # Most requests in flight at one time, as the client saw it.
    peak_in_flight: int
    # The client was at `max_in_flight` at some time: what it offered was not what was planned.
    hit_in_flight_limit: bool


@dataclass(frozen=True, slots=True)
class Session:
    """A dialogue: what the user says, turn after turn; the server's own answers stand between."""

    index: int
    intended_s: float
    system: str
    user_turns: tuple[str, ...]
    output_tokens: int
    pause_s: float = 0.0
    traffic_class: str = "session"


async def run_open_loop(
    plan: Sequence[PlannedRequest], sender: Sender, duration_s: float, limits: RunLimits = RunLimits()
) -> LoadRun:
    """Sends each request when it is due. `duration_s` is the window that the arrivals were drawn for."""
    async with _flying(sender, limits.max_in_flight) as flight:
        for planned in sorted(plan, key=lambda request: request.intended_s):
            await flight.sleep_until(planned.intended_s)
            await flight.wait_for_place()
            flight.launch(planned, planned.intended_s)
        await flight.sleep_until(duration_s)
        await flight.drain(limits.drain_timeout_s)
    return flight.result(plan, 0.0, duration_s)


async def run_closed_loop(
    plan: Sequence[PlannedRequest], sender: Sender, concurrency: int, num_warmup: int, timeout_s: float
) -> LoadRun:
    """Keeps `concurrency` requests in flight until the plan is used up; the first `num_warmup` are not measured.

    The window runs from the end of the last warm-up request to the moment at which the plan is used up, so neither the
    burst at the start nor the thinning at the end is in it.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}, must be at least 1")
    waiting = enumerate(plan)
    window = _ClosedWindow(num_warmup)
    async with _flying(sender, concurrency) as flight:
        users = [_closed_loop_user(flight, waiting, window) for _ in range(min(concurrency, len(plan)))]
        await _all_within(users, timeout_s)
        await flight.drain(0.0)
        end_s = window.used_up_s if window.used_up_s is not None else flight.now_s()
    return flight.result(plan, window.warmup_end_s, max(end_s, window.warmup_end_s), num_warmup)


async def run_sessions(
    sessions: Sequence[Session], sender: Sender, duration_s: float, limits: RunLimits = RunLimits()
) -> LoadRun:
    """Starts each session when it is due and plays its turns; a failed turn ends its session."""
    async with _flying(sender, limits.max_in_flight) as flight:
        ordered = sorted(sessions, key=lambda one: one.intended_s)
        await _all_within([_play(flight, session) for session in ordered], duration_s + limits.drain_timeout_s)
        await flight.sleep_until(duration_s)
        await flight.drain(0.0)
    return flight.result(flight.planned, 0.0, duration_s)


@asynccontextmanager
async def _flying(sender: Sender, max_in_flight: int) -> AsyncIterator[_Flight]:
    """A flight of which nothing is left afterwards, also where the run is cancelled: what it had sent would go on
    loading the server, and the next run would measure it."""
    flight = _Flight(sender, max_in_flight)
    try:
        yield flight
    finally:
        await flight.drain(0.0)


async def _all_within(parts: Sequence[Coroutine[object, object, None]], timeout_s: float) -> None:
    """Runs them at once; none runs on afterwards. Raises what one of them raised; being late is no error."""
    tasks = [asyncio.create_task(part) for part in parts]
    if not tasks:
        return
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s)
    finally:
        await end_tasks(*tasks)
    for task in done:
        task.result()


@dataclass(slots=True)
class _ClosedWindow:
    num_warmup: int
    warmup_end_s: float = 0.0
    used_up_s: float | None = None


async def _closed_loop_user(
    flight: _Flight, waiting: Iterator[tuple[int, PlannedRequest]], window: _ClosedWindow
) -> None:
    """One of the `concurrency` users: sends, waits for the end, sends the next."""
    for place, planned in waiting:
        await flight.launch(planned, flight.now_s())
        if place < window.num_warmup:
            window.warmup_end_s = flight.now_s()
    if window.used_up_s is None:
        window.used_up_s = flight.now_s()


async def _play(flight: _Flight, session: Session) -> None:
    messages: tuple[ChatMessage, ...] = (ChatMessage("system", session.system),) if session.system else ()
    due_s = session.intended_s
    await flight.sleep_until(due_s)
    dialogue_tokens: int | None = None
    for turn, text in enumerate(session.user_turns):
        messages = (*messages, ChatMessage("user", text))
        planned = PlannedRequest(
            index=len(flight.planned),
            intended_s=due_s,
            output_tokens=session.output_tokens,
            messages=messages,
            shareable_tokens=dialogue_tokens,
            traffic_class=session.traffic_class,
            session=session.index,
            turn=turn,
        )
        await flight.wait_for_place()
        await flight.launch(planned, due_s)
        capture = flight.captures[planned.index]
        done = read_turn(capture)
        if capture.failure or not done.answer:
            return
        messages = (*messages, ChatMessage("assistant", done.answer))
        dialogue_tokens = done.num_tokens
        due_s = flight.now_s() + session.pause_s
        await flight.sleep_until(due_s)


@dataclass(slots=True)
class _Flight:
    """The requests that are out: starts them, bounds them, ends them. Lives for one run."""

    sender: Sender
    max_in_flight: int
    start_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    planned: list[PlannedRequest] = field(default_factory=list)
    captures: dict[int, StreamCapture] = field(default_factory=dict)
    intended_s: dict[int, float] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    peak: int = 0
    hit_limit: bool = False
    error: BaseException | None = None  # a fault of the sender itself, not of a request
    _place_free: asyncio.Event = field(default_factory=asyncio.Event)

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self.start_s

    async def sleep_until(self, time_s: float) -> None:
        delay_s = time_s - self.now_s()
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    async def wait_for_place(self) -> None:
        while len(self.tasks) >= self.max_in_flight:
            self.hit_limit = True
            self._place_free.clear()
            await self._place_free.wait()

    def launch(self, planned: PlannedRequest, intended_s: float) -> asyncio.Task[None]:
        self.planned.append(planned)
        self.captures[planned.index] = StreamCapture()
        self.intended_s[planned.index] = intended_s
        task = asyncio.create_task(self._send(planned))
        self.tasks.add(task)
        task.add_done_callback(self._landed)
        self.peak = max(self.peak, len(self.tasks))
        return task

    async def drain(self, timeout_s: float) -> None:
        """Waits for what is out, then cancels it; returns when no task is left."""
        if not self.tasks:
            return
        _, late = await asyncio.wait(self.tasks, timeout=timeout_s)
        await end_tasks(*late)

    def result(
        self, plan: Sequence[PlannedRequest], window_start_s: float, window_end_s: float, num_warmup: int = 0
    ) -> LoadRun:
        if self.error is not None:
            raise self.error
        records = [self._record(planned, is_warmup=place < num_warmup) for place, planned in enumerate(plan)]
        return LoadRun(records, window_start_s, window_end_s, self.peak, self.hit_limit)

    async def _send(self, planned: PlannedRequest) -> None:
        capture = self.captures[planned.index]
        try:
            await self.sender.send(planned, capture)
        except asyncio.CancelledError:
            capture.failure, capture.detail = "cancelled", "the run was over before the answer was"
            raise
        finally:
            capture.ended_s = asyncio.get_running_loop().time()

    def _landed(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and self.error is None:
            self.error = task.exception()
        self._place_free.set()

    def _record(self, planned: PlannedRequest, *, is_warmup: bool) -> RequestRecord:
        capture = self.captures.get(planned.index)
        if capture is None:
            return _not_sent(planned, self.now_s(), is_warmup=is_warmup)
        return read_stream(
            planned, capture, self.start_s, intended_s=self.intended_s[planned.index], is_warmup=is_warmup
        )


def _not_sent(planned: PlannedRequest, now_s: float, *, is_warmup: bool) -> RequestRecord:
    unsent = RequestRecord(
        index=planned.index,
        traffic_class=planned.traffic_class,
        session=planned.session,
        turn=planned.turn,
        is_warmup=is_warmup,
        intended_s=planned.intended_s,
        sent_s=now_s,
        ended_s=now_s,
        outcome=Outcome.NOT_SENT,
        detail="the run was over before this request was due",
    )
    return replace(unsent, prompt_tokens=len(planned.token_ids), shareable_tokens=planned.shareable_tokens)
