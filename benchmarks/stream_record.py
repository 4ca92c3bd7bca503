"""Reads a captured stream into a record: which chunk brought how many tokens, when, and how it ended.

Rules, each from a tool that got it wrong:
- The first token is the first chunk that shows something; a chunk with a role or an empty text is none.
- Tokens are counted by the server (usage in each chunk, token ids, or llama.cpp's timings), never by tokenising the
  text again. Where the server says nothing, a chunk is one token and the record says that it is a guess.
- Text that a server's parser held back arrives with the chunk that shows it: so do its tokens.
- Events that came in one read came at one time: they are one chunk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.openai_client import StreamCapture
from benchmarks.request_record import Outcome, RequestRecord
from benchmarks.ttft_stages import TtftStages, stages_from_json
from benchmarks.workload import PlannedRequest

MAX_DETAIL_CHARS = 300
END_OF_STREAM = "[DONE]"
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")


def read_stream(
    planned: PlannedRequest, capture: StreamCapture, run_start_s: float, *, intended_s: float, is_warmup: bool = False
) -> RequestRecord:
    """The record of one request; `intended_s` and the result are relative to the run's start."""
    reading = _read(capture)
    outcome, detail = _outcome(capture, reading)
    return RequestRecord(
        index=planned.index,
        traffic_class=planned.traffic_class,
        session=planned.session,
        turn=planned.turn,
        is_warmup=is_warmup,
        intended_s=intended_s,
        sent_s=capture.sent_s - run_start_s,
        ended_s=capture.ended_s - run_start_s,
        outcome=outcome,
        detail=detail[:MAX_DETAIL_CHARS],
        http_status=capture.http_status,
        request_id=reading.request_id,
        finish_reason=reading.finish_reason,
        chunk_times_s=tuple(time_s - run_start_s for time_s in reading.chunk_times_s),
        chunk_tokens=tuple(reading.chunk_tokens),
        are_counts_exact=reading.are_counts_exact,
        held_tokens=reading.held_tokens,
        prompt_tokens=reading.prompt_tokens or len(planned.token_ids),
        cached_tokens=reading.cached_tokens,
        shareable_tokens=planned.shareable_tokens,
        stages=reading.stages,
    )


@dataclass(frozen=True, slots=True)
class DialogueTurn:
    """What a session's next turn needs of this one. `num_tokens` of prompt and answer begin the next prompt."""

    answer: str
    num_tokens: int


def read_turn(capture: StreamCapture) -> DialogueTurn:
    """The visible answer of a captured stream, and the tokens of the dialogue so far by the server's count."""
    reading = _read(capture)
    return DialogueTurn(reading.text, reading.prompt_tokens + reading.counted_tokens)


def events(capture: StreamCapture) -> Iterator[tuple[float, str]]:
    """(time, data) of each server-sent event; the time is that of the bytes that completed it."""
    buffered = b""
    for time_s, piece in capture.pieces:
        buffered = (buffered + piece).replace(b"\r\n", b"\n")
        *complete, buffered = buffered.split(b"\n\n")
        for event in complete:
            data = "\n".join(
                line[5:].strip() for line in event.decode(errors="replace").split("\n") if line.startswith("data:")
            )
            if data:
                yield time_s, data


@dataclass(slots=True)
class _Reading:
    """What has been read of a stream so far."""

    chunk_times_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    counted_tokens: int = 0  # by the server, up to here
    shown_tokens: int = 0
    held_tokens: int = 0
    are_counts_exact: bool = True
    is_done: bool = False
    error: str = ""
    finish_reason: str = ""
    request_id: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    stages: TtftStages | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


def _read(capture: StreamCapture) -> _Reading:
    reading = _Reading()
    if capture.http_status != 200:
        return reading
    guessed = False
    for time_s, data in events(capture):
        if data == END_OF_STREAM:
            reading.is_done = True
            continue
        try:
            chunk = json.loads(data)
        except ValueError:
            reading.error = f"an event is not JSON: {data[:80]!r}"
            continue
        guessed |= _read_chunk(reading, chunk, time_s)
    if guessed:
        _reconcile(reading)
    elif reading.counted_tokens > reading.shown_tokens and reading.chunk_tokens:
        # The tail that never became visible (an end-of-sequence token): it came with the last chunk.
        reading.chunk_tokens[-1] += reading.counted_tokens - reading.shown_tokens
    return reading


def _read_chunk(reading: _Reading, chunk: dict[str, Any], time_s: float) -> bool:
    """Takes one chunk in; true when its token count had to be guessed."""
    if "error" in chunk:
        reading.error = json.dumps(chunk["error"])
        return False
    if timeline := (chunk.get("tandem") or {}).get("timeline"):
        reading.stages = stages_from_json(timeline)
    reading.request_id = reading.request_id or str(chunk.get("id") or "")
    choice = chunk["choices"][0] if chunk.get("choices") else {}
    reading.finish_reason = choice.get("finish_reason") or reading.finish_reason
    text, is_visible = _visible(choice)
    num_counted = _counted(reading, chunk, choice)
    if is_visible:
        reading.texts.append(text)
        num_tokens = 1 if num_counted is None else reading.counted_tokens - reading.shown_tokens
        _show(reading, time_s, num_tokens)
        return num_counted is None
    reading.held_tokens = max(reading.held_tokens, reading.counted_tokens - reading.shown_tokens)
    return False


def _show(reading: _Reading, time_s: float, num_tokens: int) -> None:
    if reading.chunk_times_s and reading.chunk_times_s[-1] == time_s:
        reading.chunk_tokens[-1] += num_tokens
    elif num_tokens > 0 or not reading.chunk_times_s:
        reading.chunk_times_s.append(time_s)
        reading.chunk_tokens.append(num_tokens)
    reading.shown_tokens += num_tokens


def _visible(choice: dict[str, Any]) -> tuple[str, bool]:
    """The text that a chunk shows, and whether it shows anything."""
    if choice.get("text"):
        return str(choice["text"]), True
    delta = choice.get("delta") or {}
    shown = [delta[name] for name in TEXT_FIELDS if delta.get(name)]
    return "".join(part for part in shown if isinstance(part, str)), bool(shown)


def _counted(reading: _Reading, chunk: dict[str, Any], choice: dict[str, Any]) -> int | None:
    """Output tokens so far as the server counts them, kept in the reading; None when this chunk does not say."""
    usage = chunk.get("usage")
    token_ids = choice.get("token_ids")
    timings = chunk.get("timings")
    if usage:
        reading.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        reading.cached_tokens = reading.cached_tokens if cached is None else int(cached)
        reading.counted_tokens = int(usage.get("completion_tokens") or 0)
    elif token_ids:
        reading.counted_tokens += len(token_ids)
    elif timings:
        reading.counted_tokens = int(timings["predicted_n"])
    else:
        return None
    return reading.counted_tokens


def _reconcile(reading: _Reading) -> None:
    """Guessed counts against the server's total: equal, and they were right; else the record says so."""
    reading.are_counts_exact = reading.counted_tokens == sum(reading.chunk_tokens)
    reading.held_tokens = 0


def _outcome(capture: StreamCapture, reading: _Reading) -> tuple[Outcome, str]:
    if capture.failure == "timeout":
        return Outcome.TIMEOUT, capture.detail
    if capture.failure == "cancelled":
        return Outcome.UNFINISHED, capture.detail
    if capture.failure == "connection":
        return (Outcome.STREAM_ERROR if capture.pieces else Outcome.CONNECTION), capture.detail
    if capture.http_status != 200:
        return Outcome.HTTP_ERROR, b"".join(piece for _, piece in capture.pieces).decode(errors="replace")
    if reading.error:
        return Outcome.STREAM_ERROR, reading.error
    if not reading.is_done:
        return Outcome.STREAM_ERROR, f"the stream ended without {END_OF_STREAM}"
    if not reading.chunk_times_s:
        return Outcome.STREAM_ERROR, "the stream brought no token"
    return Outcome.OK, ""
