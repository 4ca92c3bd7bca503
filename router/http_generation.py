"""`POST` of a path that generates text: from bytes to bytes. What the four of them differ in is an `ApiShape`.

    read body -> strict JSON -> checked request -> answer -> one JSON object, or server-sent events

Headers go out with the first token, so most failures still get a status. Later ones are one error event, and the
stream closes without what ends a whole answer (OpenAI's chats: `[DONE]`). A client that leaves is noticed while it
waits as well as while it reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.errors import InvalidRequest, RequestCancelled, TandemError, shown
from cluster.identity import Tenant
from router.answer import Answer, ChoiceUpdate
from router.api_types import GenerationRequest
from router.asgi_types import ClientLink, Receive, Scope, Send, client_link, header, send_response
from router.field_rules import Integer
from router.generation_service import GenerationService
from router.http_body import read_json_bytes
from router.http_errors import as_tandem_error, error_body, error_headers
from router.limits import MAX_TIMEOUT_MS, MIN_TIMEOUT_MS
from router.request_parser import AroundBody, client_request_id

JSON_TYPE = b"application/json"
_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class AnswerWriter(Protocol):
    """One answer in one API's shape: `events` for each batch and `last_events`, or `whole` with all updates."""

    def events(self, updates: Sequence[ChoiceUpdate]) -> bytes: ...

    def last_events(self) -> bytes: ...

    def whole(self, updates: Sequence[ChoiceUpdate]) -> bytes: ...

    def error_event(self, error: TandemError) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ApiShape:
    """How one path's bodies are read and its answers written."""

    parse: Callable[[dict[str, Any], AroundBody], GenerationRequest]
    writer: Callable[[Mapping[str, Any], GenerationRequest, Answer], AnswerWriter]  # with the body as it came
    error_body: Callable[[TandemError], bytes] = error_body


class GenerationEndpoint:
    """One such path, as an ASGI application: no framework stands between a token and the socket."""

    def __init__(self, service: GenerationService, shape: ApiShape, max_body_bytes: int) -> None:
        self._service = service
        self._shape = shape
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = _Response(send, _client_request_id(scope), self._shape.error_body)
        try:
            body = await self._service.encoder.parse(await read_json_bytes(scope, receive, self._max_body_bytes))
            request = self._shape.parse(body, _around(scope))
            tenant: Tenant = scope["state"]["tenant"]
            async with self._service.answering(request, tenant) as answer:
                with _watching(answer, client_link(scope)):
                    response.request_id = answer.request_id
                    response.writer = writer = self._shape.writer(body, request, answer)
                    await _write(request, answer, writer, response)
        except RequestCancelled:
            return
        except Exception as error:
            await response.fail(error)


async def _write(request: GenerationRequest, answer: Answer, writer: AnswerWriter, response: _Response) -> None:
    if request.is_streamed:
        async for updates in answer.updates():
            events = writer.events(updates)
            if answer.is_complete:  # the last token and what ends the stream are one write
                await response.send_events(events + writer.last_events(), are_last=True)
            elif events:
                await response.send_events(events)
        return
    collected: list[ChoiceUpdate] = []
    async for updates in answer.updates():
        collected.extend(updates)
    await response.send_whole(writer.whole(collected))


class _Response:
    """What was sent to one client, and so what still can be."""

    def __init__(self, send: Send, client_request_id: str, error_body: Callable[[TandemError], bytes]) -> None:
        self._send = send
        self._client_request_id = client_request_id
        self._error_body = error_body
        self._is_started = False
        self.writer: AnswerWriter | None = None  # from when there is an answer
        self.request_id = ""

    async def send_events(self, events: bytes, *, are_last: bool = False) -> None:
        if not self._is_started:
            self._is_started = True
            headers = [*_EVENT_STREAM_HEADERS, *self._id_headers()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": events, "more_body": not are_last})

    async def send_whole(self, body: bytes) -> None:
        await send_response(self._send, 200, JSON_TYPE, body, self._id_headers())

    async def fail(self, raised: Exception) -> None:
        error = as_tandem_error(raised)
        if self._is_started and self.writer is not None:
            await self.send_events(self.writer.error_event(error), are_last=True)
            return
        self.request_id = self.request_id or error.request_id  # refused before there was an answer
        headers = [*error_headers(error), *self._id_headers()]
        await send_response(self._send, error.http_status, JSON_TYPE, self._error_body(error), headers)

    def _id_headers(self) -> list[tuple[bytes, bytes]]:
        """The id is made by the server; a client's own is sent back beside it, and steers nothing."""
        headers = [(b"x-request-id", self.request_id.encode())] if self.request_id else []
        if self._client_request_id:
            headers.append((b"x-client-request-id", self._client_request_id.encode()))
        return headers


@contextlib.contextmanager
def _watching(answer: Answer, link: ClientLink) -> Iterator[None]:
    """While inside, a client that hangs up ends the answer, and its workers hear of it at once.

    The connection tells by a call: a task that waits for it would be made and ended for each request.
    """
    if link.is_lost:
        answer.client_left()
    link.on_lost = answer.client_left
    try:
        yield
    finally:
        link.on_lost = None


def _client_request_id(scope: Scope) -> str:
    return client_request_id(header(scope, b"x-request-id").decode("latin-1"))


def _around(scope: Scope) -> AroundBody:
    return AroundBody(
        _timeout_s(scope),
        _wants_timeline(scope),
        header(scope, b"traceparent").decode("latin-1"),
        _client_request_id(scope),
    )


def _timeout_s(scope: Scope) -> float | None:
    value = header(scope, b"x-request-timeout-ms").decode("latin-1")
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 9):
        raise InvalidRequest(
            f"X-Request-Timeout-Ms is {shown(value)}, must be an integer in [{MIN_TIMEOUT_MS}, {MAX_TIMEOUT_MS}]",
            param="X-Request-Timeout-Ms",
        )
    return Integer(MIN_TIMEOUT_MS, MAX_TIMEOUT_MS).check(int(value), "X-Request-Timeout-Ms") / 1000


def _wants_timeline(scope: Scope) -> bool:
    return header(scope, b"x-tandem-timeline") == b"1"
