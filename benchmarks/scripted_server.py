"""An OpenAI-shaped streaming server whose every answer is known beforehand: what the load tool is tested against.

A script says for each arrival when which events go out, in the event loop's time. `SingleServerQueue` is the one with a
theory: one server, first come first served, service times by a law, so that M/D/1 and M/M/1 are closed forms:

    mean wait M/D/1 = rho s / (2 (1 - rho))        mean wait M/M/1 = rho s / (1 - rho)

No model stands behind it. `python -m benchmarks.scripted_server` serves one token every few milliseconds to each
stream, to measure what the client itself costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import httptools
import numpy as np

MAX_BODY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """One response: server-sent events at their times, or a body at once."""

    events: tuple[tuple[float, str], ...] = ()  # (loop time, data)
    status: int = 200
    body: str = ""


# (number of the arrival, its JSON body, loop time of its arrival) -> what it gets.
Script = Callable[[int, dict[str, Any], float], Answer]


def chunk(text: str, num_tokens: int | None = None, prompt_tokens: int = 1, cached_tokens: int | None = None) -> str:
    """A completion chunk; `num_tokens` is the usage so far, None leaves usage out."""
    data: dict[str, Any] = {"id": "scripted", "choices": [{"index": 0, "text": text, "finish_reason": None}]}
    if num_tokens is not None:
        data["usage"] = {"prompt_tokens": prompt_tokens, "completion_tokens": num_tokens}
        if cached_tokens is not None:
            data["usage"]["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return json.dumps(data)


def token_stream(times_s: Iterable[float], prompt_tokens: int = 1, cached_tokens: int | None = None) -> Answer:
    """One token at each time, and the end with the last."""
    times = list(times_s)
    events = [(time_s, chunk(" a", count, prompt_tokens, cached_tokens)) for count, time_s in enumerate(times, 1)]
    return Answer((*events, (times[-1], "[DONE]")))


@dataclass(slots=True)
class SingleServerQueue:
    """A script: one server, first come first served; an answer is one token at the end of its service."""

    law: Literal["deterministic", "exponential"]
    mean_s: float
    seed: int
    _free_s: float = 0.0
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def __call__(self, number: int, body: dict[str, Any], now_s: float) -> Answer:
        service_s = self.mean_s if self.law == "deterministic" else float(self._rng.exponential(self.mean_s))
        # On the schedule, not on the moment a timer fired: lateness does not add up.
        self._free_s = max(self._free_s, now_s) + service_s
        return token_stream([self._free_s])

    def mean_response_s(self, rate_per_s: float) -> float:
        """Waiting and service by the closed form, at Poisson arrivals."""
        load = rate_per_s * self.mean_s
        if load >= 1:
            raise ValueError(f"a load of {load:.2f} has no steady state")
        wait_s = load * self.mean_s / (1 - load)
        return self.mean_s + (wait_s / 2 if self.law == "deterministic" else wait_s)


@dataclass(slots=True)
class PrefixCachedPrompts:
    """A script that remembers every block of every prompt, and reports what it had: one token after `delay_s`."""

    delay_s: float
    block_tokens: int = 16
    _blocks: set[int] = field(default_factory=set)

    def __call__(self, number: int, body: dict[str, Any], now_s: float) -> Answer:
        prompt = tuple(body["prompt"])
        keys = [hash(prompt[:end]) for end in range(self.block_tokens, len(prompt) + 1, self.block_tokens)]
        num_cached = next((place for place, key in enumerate(keys) if key not in self._blocks), len(keys))
        self._blocks.update(keys)
        return token_stream([now_s + self.delay_s], len(prompt), num_cached * self.block_tokens)


class ScriptedServer:
    """Serves one script on a loopback port: `async with ScriptedServer(script) as server: server.url`."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self._script = script
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: set[_ScriptedConnection] = set()
        self.num_requests = 0
        self.in_flight = 0
        self.peak_in_flight = 0

    async def __aenter__(self) -> ScriptedServer:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _ScriptedConnection(self), "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.abort()
        if self._server is not None:
            await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def answer(self, body: bytes, now_s: float) -> Answer:
        self.num_requests += 1
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        return self._script(self.num_requests - 1, json.loads(body or b"{}"), now_s)

    def ended(self) -> None:
        self.in_flight -= 1

    def opened(self, connection: _ScriptedConnection) -> None:
        self._connections.add(connection)

    def closed(self, connection: _ScriptedConnection) -> None:
        self._connections.discard(connection)


class _ScriptedConnection(asyncio.Protocol):
    """One keep-alive connection: reads a request, plays its answer from timers."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._body = b""
        self._timer: asyncio.TimerHandle | None = None
        self._to_send: deque[tuple[float, str]] = deque()
        self._is_answering = False

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"expected a stream transport, got {type(transport).__name__}")
        self._transport = transport
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._end()
        self._server.closed(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > MAX_BODY_BYTES:
            self.abort()

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        self._is_answering = True
        answer = self._server.answer(body, self._loop.time())
        if answer.body or answer.status != 200:
            content = answer.body.encode()
            self._write(
                f"HTTP/1.1 {answer.status} Scripted\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(content)}\r\n\r\n".encode()
                + content
            )
            self._end()
            return
        self._write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        self._to_send.extend(answer.events)
        self._send_due()

    def _send_due(self) -> None:
        """Sends what is due and sets a timer for what is next: one timer at a time keeps the order at equal times."""
        while self._to_send and self._to_send[0][0] <= self._loop.time():
            event = f"data: {self._to_send.popleft()[1]}\n\n".encode()
            self._write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
        if self._to_send:
            self._timer = self._loop.call_at(self._to_send[0][0], self._send_due)
        else:
            self._end()
            self._write(b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _end(self) -> None:
        if self._is_answering:
            self._is_answering = False
            self._server.ended()


async def _serve(port: int, interval_s: float) -> None:
    def script(number: int, body: dict[str, Any], now_s: float) -> Answer:
        if not body:
            return Answer(body=json.dumps({"object": "list", "data": [{"id": "scripted", "object": "model"}]}))
        return token_stream(now_s + interval_s * (place + 1) for place in range(int(body.get("max_tokens", 16))))

    async with ScriptedServer(script, port) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve scripted token streams, to measure what a load client costs.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--interval-ms", type=float, default=20.0, help="time between tokens of a stream")
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.port, arguments.interval_ms / 1e3))


if __name__ == "__main__":
    main()
