"""`POST /v1/chat/completions` and `/v1/completions`: from bytes to bytes.

    read body -> strict JSON -> checked request -> answer -> one JSON object, or server-sent events

Headers go out with the first token, so most failures still get a status. Later ones are one `data: {"error": ...}`
event, and the stream closes without `[DONE]`. A client that leaves is noticed while it waits as well as while it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from cluster.ended_tasks import end_tasks
from cluster.errors import InvalidRequest, RequestCancelled, shown
from cluster.identity import Tenant
from router.answer import Answer, ChoiceUpdate
from router.api_types import GenerationRequest
from router.asgi_types import Receive, Scope, Send, header, send_response
from router.field_rules import Integer
from router.generation_service import GenerationService
from router.http_body import read_json_bytes
from router.http_errors import as_tandem_error, error_body, error_event, error_headers
from router.limits import MAX_TIMEOUT_MS, MIN_TIMEOUT_MS
from router.openai_format import OpenAiWriter
from router.request_parser import AroundBody

JSON_TYPE = b"application/json"
MAX_CLIENT_ID_CHARS = 128
_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationEndpoint:
    """One of the two paths, as an ASGI application: no framework stands between a token and the socket."""

    def __init__(
        self,
        service: GenerationService,
        parse: Callable[[dict[str, Any], AroundBody], GenerationRequest],
        max_body_bytes: int,
    ) -> None:
        self._service = service
        self._parse = parse
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = _Response(send, _client_request_id(scope))
        try:
            body = await self._service.encoder.parse(await read_json_bytes(scope, receive, self._max_body_bytes))
            request = self._parse(body, _around(scope))
            tenant: Tenant = scope["state"]["tenant"]
            async with self._service.answering(request, tenant) as answer, _watching(answer, receive):
                response.request_id = answer.request_id
                await self._write(request, answer, response)
        except RequestCancelled:
            return
        except Exception as error:
            await response.fail(error)

    async def _write(self, request: GenerationRequest, answer: Answer, response: _Response) -> None:
        service = self._service
        writer = OpenAiWriter(request, answer, service.tokenizer, service.limits.model_name, service.tool_format)
        if request.is_streamed:
            async for updates in answer.updates():
                if events := writer.events(updates):
                    await response.send_events(events)
            await response.send_events(writer.last_events(), are_last=True)
            return
        collected: list[ChoiceUpdate] = []
        async for updates in answer.updates():
            collected.extend(updates)
        await response.send_whole(writer.whole(collected))


class _Response:
    """What was sent to one client, and so what still can be."""

    def __init__(self, send: Send, client_request_id: bytes) -> None:
        self._send = send
        self._client_request_id = client_request_id
        self._is_started = False
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
        if self._is_started:
            await self.send_events(error_event(error), are_last=True)
            return
        headers = [*error_headers(error), *self._id_headers()]
        await send_response(self._send, error.http_status, JSON_TYPE, error_body(error), headers)

    def _id_headers(self) -> list[tuple[bytes, bytes]]:
        """The id is made by the server; a client's own is sent back beside it and used for nothing else."""
        headers = [(b"x-request-id", self.request_id.encode())] if self.request_id else []
        if self._client_request_id:
            headers.append((b"x-client-request-id", self._client_request_id))
        return headers


@contextlib.asynccontextmanager
async def _watching(answer: Answer, receive: Receive) -> AsyncIterator[None]:
    """While inside, a client that hangs up ends the answer, and its workers hear of it at once."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answer.client_left()

    watcher = asyncio.create_task(watch(), name=f"client of {answer.request_id}")
    try:
        yield
    finally:
        await end_tasks(watcher)


def _client_request_id(scope: Scope) -> bytes:
    """The client's own id, when it is harmless to send back."""
    value = header(scope, b"x-request-id")
    is_harmless = len(value) <= MAX_CLIENT_ID_CHARS and all(0x21 <= byte <= 0x7E for byte in value)
    return value if is_harmless else b""


def _around(scope: Scope) -> AroundBody:
    return AroundBody(_timeout_s(scope), _wants_timeline(scope), header(scope, b"traceparent").decode("latin-1"))


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
