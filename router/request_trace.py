"""A request's span at the router: begun when it is admitted, cut into stages from its times when it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from cluster.errors import TandemError
from cluster.tracing import RequestSpan, Tracing
from router.answer import Answer, RequestTimes


class RequestTrace:
    """What one request adds to its trace. `answer` is set once there is one."""

    def __init__(self, span: RequestSpan) -> None:
        self._span = span
        self.traceparent = span.traceparent
        self.answer: Answer | None = None

    def end(self, request_id: str, times: RequestTimes, now_s: float, error: str) -> None:
        span = self._span
        span.stage("encode", times.admitted_s, times.encoded_s)
        span.stage("wait", times.encoded_s, times.placed_s)
        span.stage("first token", times.placed_s, times.first_token_s)
        span.stage("stream", times.first_token_s, times.ended_s or now_s)
        attributes: dict[str, str | int | float] = {"tandem.request_id": request_id}
        if self.answer is not None:
            usage = self.answer.usage
            attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
            attributes["tandem.cached_tokens"] = usage.cached_tokens
        span.end(attributes, error)


@contextlib.contextmanager
def traced(
    tracing: Tracing | None, traceparent: str, request_id: str, times: RequestTimes, clock: Callable[[], float]
) -> Iterator[RequestTrace | None]:
    """The request's trace while inside; None when tracing is off."""
    if tracing is None:
        yield None
        return
    trace = RequestTrace(tracing.begin("request", traceparent))
    error = ""
    try:
        yield trace
    except TandemError as raised:
        error = raised.error_code
        raise
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        trace.end(request_id, times, clock(), error)
