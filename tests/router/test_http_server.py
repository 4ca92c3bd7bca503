"""The HTTP server by itself: connections that ask nothing any more are closed when their time is over."""

from __future__ import annotations

import asyncio
import socket

import pytest

from router import http_server
from router.asgi_types import Receive, Scope, Send
from router.http_server import HttpServer

TIMEOUT_S = 60.0
NUM_IDLE = 50


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def test_f33_connections_stay_open_after_an_answer_and_are_closed_when_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "IDLE_TIMEOUT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        bound.setblocking(False)
        server = HttpServer(_answer, bound, drain_timeout_s=5)
        server.start()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                opened = [await asyncio.open_connection(*bound.getsockname()) for _ in range(NUM_IDLE)]
                for reader, writer in opened:
                    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                    await reader.readuntil(b"ok")
                last, _ = opened[-1]
                assert not last.at_eof(), "kept for the next request"
                left = await asyncio.gather(*(reader.read() for reader, _ in opened))
            assert left == [b""] * NUM_IDLE
            for _, writer in opened:
                writer.close()
                await writer.wait_closed()
        finally:
            await server.stop()
