"""A light streaming client of any OpenAI-compatible server: it stamps bytes as they come and parses nothing meanwhile.

On a machine that the server shares with its load, a heavy client is part of the measurement. So a connection is one
asyncio protocol with httptools' parser, a piece of a body is kept as (time, bytes), and `stream_record` reads the
pieces after the run. Times are the event loop's clock.

    planned request ──request_body──> bytes ──OpenAiClient.send──> StreamCapture ──stream_record──> RequestRecord
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import httptools

from benchmarks.workload import PlannedRequest

# How a server is told to count tokens in a stream, and to go on to the wanted length.
#   tandem: usage in every chunk; ignore_eos and min_tokens; the request's timeline in the last chunk
#   vllm: the same without the timeline
#   llamacpp: timings in every chunk; ignore_eos
#   openai: usage in the last chunk only; the answer may end early
Dialect = Literal["tandem", "vllm", "llamacpp", "openai"]
DIALECTS: tuple[Dialect, ...] = ("tandem", "vllm", "llamacpp", "openai")

TIMELINE_HEADER = "X-Tandem-Timeline"
CONNECT_TIMEOUT_S = 10.0
# An idle connection that is older is not used again: servers close theirs after about five seconds (uvicorn's default).
IDLE_REUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and how it is spoken to."""

    base_url: str  # with or without /v1
    model: str
    dialect: Dialect = "tandem"
    api_key: str = ""
    temperature: float = 0.0

    @property
    def root(self) -> str:
        """The URL without its /v1."""
        return self.base_url.rstrip("/").removesuffix("/v1")


@dataclass(slots=True)
class StreamCapture:
    """What one request's connection saw, unparsed. Made by the caller, who keeps what there is when it cancels."""

    sent_s: float = 0.0
    ended_s: float = 0.0
    http_status: int = 0  # 0: no answer
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    failure: Literal["", "connection", "timeout", "cancelled"] = ""
    detail: str = ""


def request_body(request: PlannedRequest, endpoint: Endpoint) -> bytes:
    """The JSON body of a planned request in the server's dialect."""
    body: dict[str, Any] = {
        "model": endpoint.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": request.output_tokens,
        "temperature": endpoint.temperature,
    }
    if request.messages:
        body["messages"] = [{"role": message.role, "content": message.content} for message in request.messages]
    else:
        body["prompt"] = request.token_ids
    if endpoint.dialect in ("tandem", "vllm"):
        body["stream_options"]["continuous_usage_stats"] = True
        body |= {"ignore_eos": True, "min_tokens": request.output_tokens}
    elif endpoint.dialect == "llamacpp":
        body |= {"ignore_eos": True, "timings_per_token": True, "cache_prompt": True}
    return json.dumps(body, separators=(",", ":")).encode()


class OpenAiClient:
    """Keep-alive connections to one server. Close it when done: `async with OpenAiClient(endpoint) as client`."""

    def __init__(self, endpoint: Endpoint, timeout_s: float = 600.0) -> None:
        parts = urlsplit(endpoint.root)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base URL {endpoint.base_url!r} is not http(s)://host[:port]")
        self.endpoint = endpoint
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._timeout_s = timeout_s
        self._idle: deque[_Connection] = deque()
        self._busy: set[_Connection] = set()

    async def __aenter__(self) -> OpenAiClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def send(self, request: PlannedRequest, capture: StreamCapture) -> None:
        """One request and its whole streamed answer, into the capture. A failure stands there too; a cancel is raised.

        Side effects: `capture.sent_s` is the moment at which the bytes went to the socket.
        """
        route = "/v1/chat/completions" if request.messages else "/v1/completions"
        await self._exchange(self._message("POST", route, request_body(request, self.endpoint)), capture)

    async def get_json(self, path: str) -> Any:
        """A small GET, such as /v1/models. Raises `ConnectionError` with the reason."""
        capture = StreamCapture()
        await self._exchange(self._message("GET", path, b""), capture)
        body = b"".join(piece for _, piece in capture.pieces)
        if capture.failure or capture.http_status != 200:
            reason = capture.failure or f"status {capture.http_status}"
            raise ConnectionError(f"GET {self.endpoint.root}{path}: {reason} {capture.detail} {body[:200]!r}")
        return json.loads(body)

    def close(self) -> None:
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()
        self._busy.clear()

    async def _exchange(self, message: bytes, capture: StreamCapture) -> None:
        loop = asyncio.get_running_loop()
        capture.sent_s = loop.time()
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._reusable()
                if connection is None or not await self._answered_when_reused(connection, message, capture):
                    connection = await self._connect()
                    self._busy.add(connection)
                    await connection.exchange(message, capture)
        except TimeoutError:
            capture.failure = "timeout"
            capture.detail = f"no end of the answer within {self._timeout_s:g} s"
        except (OSError, httptools.HttpParserError) as error:
            capture.failure, capture.detail = "connection", repr(error)
        finally:
            capture.ended_s = loop.time()
            if connection is not None:
                self._busy.discard(connection)
                self._put_back(connection)

    async def _answered_when_reused(self, connection: _Connection, message: bytes, capture: StreamCapture) -> bool:
        """False where a kept connection closes without a byte: the server had given it up while it lay idle, and has
        not seen the request. Every other failure is raised."""
        self._busy.add(connection)
        try:
            await connection.exchange(message, capture)
        except ConnectionError:
            if capture.http_status or capture.pieces:
                raise
            self._busy.discard(connection)
            return False
        return True

    def _reusable(self) -> _Connection | None:
        """The connection that was used last, unless the server has closed it or soon may."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since_s < IDLE_REUSE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        return connection

    def _put_back(self, connection: _Connection) -> None:
        if connection.is_reusable:
            connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    def _message(self, method: str, path: str, body: bytes) -> bytes:
        lines = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Accept: text/event-stream, application/json",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self.endpoint.dialect == "tandem":
            lines.append(f"{TIMELINE_HEADER}: 1")
        if self.endpoint.api_key:
            lines.append(f"Authorization: Bearer {self.endpoint.api_key}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time. httptools calls the `on_` methods from `data_received`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._capture = StreamCapture()
        self._done: asyncio.Future[None] | None = None
        self._now_s = 0.0
        self._is_reusable = False
        self.idle_since_s = 0.0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """Open, and its last answer came to its end with keep-alive."""
        return self.is_open and self._is_reusable

    async def exchange(self, message: bytes, capture: StreamCapture) -> None:
        if self._transport is None:
            raise ConnectionError("the connection is closed")
        self._capture, self._is_reusable = capture, False
        self._parser = httptools.HttpResponseParser(self)
        self._done = self._loop.create_future()
        capture.sent_s = self._loop.time()
        self._transport.write(message)
        await self._done

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now_s = self._loop.time()
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(exc or ConnectionResetError("the server closed the connection before the end of its answer"))

    # httptools
    def on_body(self, body: bytes) -> None:
        self._capture.pieces.append((self._now_s, body))

    def on_headers_complete(self) -> None:
        self._capture.http_status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        self._is_reusable = self._parser.should_keep_alive()
        self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)
