"""What leaves together, and what never waits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from router.response_transport import ResponseTransport
from tests.router.conftest import MODEL, RunningRouter
from tests.router.test_http_protocol import HEAD


class _RecordingTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[bytes | str] = []

    def write(self, data: Any) -> None:
        self.said.append(bytes(data))

    def close(self) -> None:
        self.said.append("close")

    def abort(self) -> None:
        self.said.append("abort")


def test_a_head_leaves_with_the_first_of_its_body_and_nothing_else_waits() -> None:
    real = _RecordingTransport()
    transport = ResponseTransport(real)
    transport.write(b"100 Continue")
    transport.hold_next()
    transport.write(b"head ")
    assert real.said == [b"100 Continue"]
    transport.write(b"first")
    transport.write(b"second")
    assert real.said == [b"100 Continue", b"head first", b"second"]


def test_a_held_head_leaves_when_nothing_follows_it() -> None:
    real = _RecordingTransport()
    transport = ResponseTransport(real)
    transport.flush()
    transport.hold_next()
    transport.write(b"head of no body")
    transport.flush()
    transport.hold_next()
    transport.write(b"refusal")
    transport.close()
    assert real.said == [b"head of no body", b"refusal", "close"]


def test_an_aborted_connection_says_nothing_more() -> None:
    real = _RecordingTransport()
    transport = ResponseTransport(real)
    transport.hold_next()
    transport.write(b"head")
    transport.abort()
    transport.flush()
    assert real.said == ["abort"]


async def _connected(router: RunningRouter) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = router.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_streamed_answer_of_one_token_is_one_write(router: RunningRouter) -> None:
    reader, writer = await _connected(router)
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1, "stream": True}).encode()
    try:
        for _ in range(5):  # a write that is cut in two may arrive as one by chance
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            async with asyncio.timeout(10):
                answer = await reader.read(65536)
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    finally:
        writer.close()


async def test_a_head_without_a_body_and_a_body_that_is_asked_for_come_at_once(router: RunningRouter) -> None:
    reader, writer = await _connected(router)
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    try:
        async with asyncio.timeout(10):
            writer.write(b"HEAD /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
            assert (await reader.readuntil(b"\r\n\r\n")) == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    finally:
        writer.close()


async def test_requests_sent_ahead_are_answered_in_order(router: RunningRouter) -> None:
    reader, writer = await _connected(router)
    writer.write(
        b"".join(b"GET /%s HTTP/1.1\r\nhost: localhost\r\n\r\n" % path for path in (b"livez", b"no", b"livez"))
    )
    try:
        async with asyncio.timeout(10):
            statuses = []
            for _ in range(3):
                head = await reader.readuntil(b"\r\n\r\n")
                statuses.append(int(head.split()[1]))
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        assert statuses == [200, 404, 200]
    finally:
        writer.close()
