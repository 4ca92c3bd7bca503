"""One request's answer while it is made: its choices' sequences, their text, the usage, the deadline.

    open     the deadline runs; nothing is placed yet
    place    every choice is placed at once
    updates  what each engine step made visible, as `ChoiceUpdate`s; ends when every choice has ended
    close    in every case: what still runs is cancelled, and its workers hear it at once

HTTP and gRPC both write from here. It knows nothing of either.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from tandem.v1 import common_pb2, worker_pb2

from cluster.errors import DeadlineExceeded, EngineFailure, RequestCancelled, ServerOverloaded, TandemError
from router.answer_inbox import AnswerInbox
from router.choice_text import NOTHING, ChoiceText, TextDelta
from router.sequence import Sequence as RunningSequence
from router.sequence import SequenceSpec, SequenceUpdate

STOP, LENGTH = "stop", "length"


@dataclass(slots=True)
class Usage:
    """Tokens of a whole answer. A prompt counts once, however many choices it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ChoiceUpdate:
    """What one engine step made visible of one choice."""

    index: int
    delta: TextDelta
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it; None: end-of-sequence, or length
    prompt_logprobs: Sequence[common_pb2.PositionLogprobs] = ()  # with the first token, when asked for
    generated_ids: Sequence[int] = ()  # all that usage counts, shown or not, when asked for


@dataclass(slots=True)
class RequestTimes:
    """Moments of a request on the router's clock, in seconds."""

    admitted_s: float
    encoded_s: float = 0.0
    placed_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    ended_s: float = 0.0


@dataclass(slots=True)
class _Choice:
    sequence: RunningSequence
    text: ChoiceText
    end_ids: frozenset[int]  # the model's own: no stop reason
    shows_stop: bool  # what ends the text is part of it
    lists_ids: bool  # of its tokens, as they were generated
    has_ended: bool = False


@dataclass(slots=True)
class Answer:
    """Owned by one request's handler: `open`, iterate `updates`, and `close` in any case. Admission calls `place`."""

    request_id: str
    times: RequestTimes
    deadline_s: float  # on the router's clock
    clock: Callable[[], float]
    submit: Callable[[RunningSequence], None]
    prompt_lengths: Sequence[int]  # tokens of each prompt
    num_choices: int  # of each prompt
    on_step: Callable[[float, int], None]  # (seconds since the last one, tokens) for the latency histograms
    usage: Usage = field(default_factory=Usage)
    timeline: common_pb2.Timeline | None = None
    error: TandemError | None = None
    finish_reasons: list[str] = field(default_factory=list)
    inbox: AnswerInbox = field(init=False)
    _choices: list[_Choice] = field(default_factory=list)
    _expiry: asyncio.TimerHandle | None = None
    _num_open: int = 0
    _is_cancelled: bool = False
    _cached: dict[int, int] = field(default_factory=dict)  # choice -> tokens that needed no compute

    def __post_init__(self) -> None:
        self.inbox = AnswerInbox(self._overflow)
        self.usage.prompt_tokens = sum(self.prompt_lengths)

    def add_choice(
        self,
        sequence: RunningSequence,
        text: ChoiceText,
        end_ids: frozenset[int],
        *,
        shows_stop: bool = False,
        lists_ids: bool = False,
    ) -> None:
        self._choices.append(_Choice(sequence, text, end_ids, shows_stop, lists_ids))

    @property
    def num_added(self) -> int:
        return len(self._choices)

    @property
    def specs(self) -> list[SequenceSpec]:
        """Of each choice, in order."""
        return [choice.sequence.spec for choice in self._choices]

    def open(self) -> None:
        """From here on `updates` waits, until the deadline at most."""
        self._num_open = len(self._choices)
        wait_s = max(0.0, self.deadline_s - self.clock())
        self._expiry = asyncio.get_running_loop().call_later(wait_s, self._expire)

    def place(self) -> None:
        """Places every choice. Raises `NoWorkersAvailable`; then nothing runs. Cancelled meanwhile: nothing happens."""
        if self._is_cancelled:
            return
        waited_s = self.clock() - self.times.encoded_s
        try:
            for choice in self._choices:
                choice.sequence.waited_s = waited_s
                self.submit(choice.sequence)
        except TandemError:
            self.close("the request could not be placed")
            raise
        self.times.placed_s = self.clock()

    async def updates(self) -> AsyncIterator[list[ChoiceUpdate]]:
        """Batches of what became visible. Raises the error of the first choice that failed."""
        while self._num_open:
            batch: dict[int, ChoiceUpdate] = {}
            num_tokens = 0
            for update in await self.inbox.take():
                self.error = update.error
                if self.error is not None:
                    break
                num_tokens += self._apply(update, batch)
            if num_tokens:
                self._note_tokens(num_tokens)
            if batch:
                yield list(batch.values())
            if self.error is not None:
                raise self.error

    def cancel(self, error: TandemError) -> None:
        """The reader of `updates` hears this error next; the workers hear of it at once."""
        self._is_cancelled = True
        for choice in self._choices:
            choice.sequence.cancel(error.message)
        self.inbox.put(SequenceUpdate(0, error=error))

    def close(self, reason: str) -> None:
        """Cancels what still runs. Changes nothing once everything has ended."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        for choice in self._choices:
            choice.sequence.cancel(reason)
        self.times.ended_s = self.clock()

    def merged_timeline(self) -> common_pb2.Timeline:
        """The worker's stages with the router's own."""
        merged = common_pb2.Timeline()
        if self.timeline is not None:
            merged.CopyFrom(self.timeline)
        merged.placed_us = max(0, round((self.times.placed_s - self.times.admitted_s) * 1e6))
        return merged

    @property
    def is_complete(self) -> bool:
        """Every choice has ended well: nothing more will come."""
        return not self._num_open and self.error is None

    def client_left(self) -> None:
        self.cancel(RequestCancelled("the client went away"))

    # --- one update ---------------------------------------------------------------------------------------------------

    def _apply(self, update: SequenceUpdate, batch: dict[int, ChoiceUpdate]) -> int:
        """Adds an update to its choice's part of the batch; the number of tokens that count."""
        choice = self._choices[update.index]
        if choice.has_ended:
            return 0
        event = update.event
        token_ids = update.token_ids
        shown_ids = token_ids
        is_stopped_by_token = event is not None and event.has_stop_token
        if event is not None and event.has_stop_token and token_ids and token_ids[-1] == event.stop_token_id:
            shown_ids = token_ids if choice.shows_stop else token_ids[:-1]  # counted, not shown
        num_before = choice.text.num_tokens
        choice.text.push(shown_ids, event.logprobs if event is not None else ())
        num_used = choice.text.num_tokens - num_before
        finish_reason: str | None = None
        stop_reason: str | int | None = None
        if choice.text.matched_stop is not None:
            finish_reason, stop_reason = STOP, choice.text.matched_stop
            choice.sequence.cancel("a stop string was found")
        else:
            num_used = len(token_ids)
            if event is not None and event.finish_reason:
                finish_reason = _finish_reason(event.finish_reason)
                if is_stopped_by_token and event.stop_token_id not in choice.end_ids:
                    stop_reason = event.stop_token_id
        if finish_reason is not None:
            self._end(choice, finish_reason)
        self.usage.completion_tokens += num_used
        prompt_logprobs = self._note_event(update.index, event) if event is not None else ()
        delta = choice.text.take()
        listed = token_ids[:num_used] if choice.lists_ids else ()
        if delta or finish_reason is not None or prompt_logprobs or listed:
            new = ChoiceUpdate(update.index, delta, finish_reason, stop_reason, prompt_logprobs, listed)
            batch[update.index] = _joined(batch.get(update.index), new)
        return num_used

    def _note_event(self, index: int, event: worker_pb2.RequestEvent) -> Sequence[common_pb2.PositionLogprobs]:
        """Usage and timeline from a first token or an end; the prompt's logprobs when they came with it."""
        # The other choices of a prompt may find in the cache what the first one computed: they say nothing of it.
        if index % self.num_choices == 0 and event.cached_tokens and index not in self._cached:
            self._cached[index] = event.cached_tokens
            self.usage.cached_tokens += event.cached_tokens
        if index == 0 and event.HasField("timeline"):
            self.timeline = event.timeline
        return event.prompt_logprobs

    def _end(self, choice: _Choice, finish_reason: str) -> None:
        choice.text.finish()
        choice.has_ended = True
        self._num_open -= 1
        self.finish_reasons.append(finish_reason)

    def _note_tokens(self, num_tokens: int) -> None:
        now_s = self.clock()
        times = self.times
        if not times.first_token_s:
            times.first_token_s = now_s
        else:
            self.on_step(now_s - times.last_token_s, num_tokens)
        times.last_token_s = now_s

    def _expire(self) -> None:
        self._expiry = None
        self.cancel(DeadlineExceeded("the request's deadline passed before its answer was complete", stage="route"))

    def _overflow(self) -> None:
        self.cancel(ServerOverloaded("the client reads too slowly: its answer was given up"))


def _joined(earlier: ChoiceUpdate | None, new: ChoiceUpdate) -> ChoiceUpdate:
    """Two steps of one choice that the client had no time to read apart."""
    if earlier is None:
        return new
    if earlier.delta is NOTHING:
        delta = new.delta
    else:
        delta = TextDelta(earlier.delta.text + new.delta.text, (*earlier.delta.tokens, *new.delta.tokens))
    return ChoiceUpdate(
        new.index,
        delta,
        new.finish_reason,
        new.stop_reason,
        earlier.prompt_logprobs or new.prompt_logprobs,
        (*earlier.generated_ids, *new.generated_ids),
    )


def _finish_reason(reason: int) -> str:
    if reason == common_pb2.FINISH_REASON_STOP:
        return STOP
    if reason == common_pb2.FINISH_REASON_LENGTH:
        return LENGTH
    raise EngineFailure(f"the worker ended the request with reason {reason}", stage="decode")
