"""Connections that send too slowly, too much, or no HTTP at all; readers that do not read."""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import httpx
import pytest

from router import http_protocol
from router.http_protocol import BoundedHttpProtocol, ReceiptTimes
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.scripted_worker import Step

BODY = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
GOOD = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> ReceiptTimes:
    times = ReceiptTimes(headers_s=0.3, body_s=0.4, stalled_reader_s=0.5)
    monkeypatch.setattr(BoundedHttpProtocol, "times", times)
    return times


async def _connect(router: RunningRouter) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = router.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def _send(router: RunningRouter, data: bytes, timeout_s: float = 60.0) -> bytes:
    """Everything that comes back until the server closes, or, after an answer's beginning, half a second of silence."""
    reader, writer = await _connect(router)
    writer.write(data)
    answer = b""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await reader.read(65536)
            while part := await asyncio.wait_for(reader.read(65536), 0.5):
                answer += part
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return answer


def _status_and_code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def _golden(router: RunningRouter) -> None:
    assert (await _send(router, GOOD)).startswith(b"HTTP/1.1 200")


def test_the_defaults_are_those_of_the_interface_document() -> None:
    assert (ReceiptTimes().headers_s, ReceiptTimes().body_s) == (10.0, 30.0)
    assert (http_protocol.MAX_HEADER_BYTES, http_protocol.MAX_HEADERS) == (16 * 1024, 100)


@pytest.mark.fronts("http")
async def test_f19_s_b32_headers_that_trickle_get_408_at_the_deadline(
    router: RunningRouter, short_times: ReceiptTimes
) -> None:
    reader, writer = await _connect(router)
    answer, num_sent = b"", 0
    for byte in HEAD:  # a byte each 50 ms would keep uvicorn's own timer alive for ever
        num_sent += 1
        writer.write(bytes([byte]))
        try:
            answer = await asyncio.wait_for(reader.read(4096), 0.05)
            break
        except TimeoutError:
            continue
    assert _status_and_code(answer) == (408, "request_timeout")
    assert num_sent < len(HEAD)
    assert await reader.read() == b""
    writer.close()
    await _golden(router)


async def test_f19_a_body_that_trickles_gets_408_at_its_deadline(
    router: RunningRouter, short_times: ReceiptTimes
) -> None:
    reader, writer = await _connect(router)
    writer.write(HEAD + b"content-length: 1000\r\n\r\n")
    answer = b""
    for _ in range(40):
        writer.write(b" ")
        try:
            answer = await asyncio.wait_for(reader.read(4096), 0.05)
            break
        except TimeoutError:
            continue
    assert _status_and_code(answer) == (408, "request_timeout")
    writer.close()
    await router.until(lambda: router.core.service.num_running == 0)
    await _golden(router)


async def test_f19_five_hundred_slow_senders_do_not_disturb_others(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "times", ReceiptTimes(headers_s=3.0))
    slow = [await _connect(router) for _ in range(500)]
    try:
        for _, writer in slow:
            writer.write(b"POST /v1")
        await _golden(router)
        async with asyncio.timeout(120):
            answers = [await reader.read() for reader, _ in slow]
    finally:
        for _, writer in slow:
            writer.close()
    assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers)
    await _golden(router)


async def test_a_connection_that_says_nothing_is_closed(router: RunningRouter, short_times: ReceiptTimes) -> None:
    reader, writer = await _connect(router)
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()


async def test_a_connection_is_used_again_after_an_answer(router: RunningRouter, short_times: ReceiptTimes) -> None:
    reader, writer = await _connect(router)
    for _ in range(3):
        writer.write(GOOD)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
    writer.close()


TOO_MUCH: dict[str, tuple[bytes, int, str]] = {
    "one header of 17 KiB": (HEAD + b"x: " + b"a" * 17 * 1024 + b"\r\n\r\n", 431, "headers_too_large"),
    "101 headers": (HEAD + b"".join(b"x-%d: 1\r\n" % i for i in range(101)) + b"\r\n", 431, "headers_too_large"),
    "long path": (b"GET /" + b"a" * 17 * 1024 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 431, "headers_too_large"),
    "header without end": (HEAD + b"x: " + b"a" * 300_000, 431, "headers_too_large"),
    "100,000 headers": (HEAD + b"".join(b"x: 1\r\n" for _ in range(100_000)), 431, "headers_too_large"),
    "declared body": (HEAD + b"content-length: 99999999\r\n\r\n", 413, "request_too_large"),
    "chunked body": (
        HEAD
        + b"transfer-encoding: chunked\r\n\r\n"
        + b"".join(b"80000\r\n" + b" " * 0x80000 + b"\r\n" for _ in range(9)),
        413,
        "request_too_large",
    ),
    "other type": (
        HEAD.replace(b"application/json", b"text/plain") + b"content-length: 2\r\n\r\n{}",
        415,
        "unsupported_media_type",
    ),
    "no type": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}",
        415,
        "unsupported_media_type",
    ),
    "form": (
        HEAD.replace(b"application/json", b"multipart/form-data; boundary=x") + b"content-length: 2\r\n\r\n{}",
        415,
        "unsupported_media_type",
    ),
}


@pytest.mark.fronts("http")
@pytest.mark.parametrize("name", TOO_MUCH)
async def test_s_b17_bounds_of_headers_bodies_and_types(name: str, router: RunningRouter) -> None:
    data, status, code = TOO_MUCH[name]
    answer = await _send(router, data)
    assert _status_and_code(answer) == (status, code)
    assert b"x-should-retry: false" in answer
    await _golden(router)


NOT_HTTP: dict[str, bytes] = {
    "http2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "tls hello": bytes.fromhex("16030100a5010000a10303") + bytes(100),
    "pickle": b"\x80\x04cposix\nsystem\n\x8c\x02id\x85R.",
    "redis": b"*1\r\n$4\r\nPING\r\n",
    "length and chunked": HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n123456",
    "negative length": HEAD + b"content-length: -1\r\n\r\n",
    "bad chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "NUL in a header": HEAD + b"x: a\x00b\r\n\r\n",
    "folded header": HEAD + b"x: a\r\n b\r\n\r\n",
    "space before colon": HEAD + b"x : a\r\n\r\n",
}


@pytest.mark.fronts("http")
@pytest.mark.parametrize("name", NOT_HTTP)
async def test_f35_s_b30_what_is_no_http_is_refused_and_nothing_dies(name: str, router: RunningRouter) -> None:
    answer = await _send(router, NOT_HTTP[name])
    assert answer == b"" or 400 <= int(answer.split()[1]) < 500, answer
    assert b"Traceback" not in answer
    await _golden(router)


async def test_f35_random_bytes_never_give_a_5xx(router: RunningRouter) -> None:
    generator = random.Random(11)
    for _ in range(30):
        answer = await _send(router, generator.randbytes(generator.randrange(1, 3000)) + b"\r\n\r\n")
        assert answer == b"" or int(answer.split()[1]) < 500
    await _golden(router)


async def test_f35_requests_cut_off_anywhere_leave_nothing_behind(router: RunningRouter) -> None:
    for length in range(1, len(GOOD), 7):
        _, writer = await _connect(router)
        writer.write(GOOD[:length])
        await writer.drain()
        writer.close()
    await router.until(lambda: router.core.service.num_running == 0)
    await _golden(router)
    assert router.bookings() == [(0, 0, 0)] * 2


async def test_f18_a_client_that_never_reads_is_cut_off_and_its_request_cancelled(
    start_router: StartRouter, short_times: ReceiptTimes
) -> None:
    router = await start_router()
    worker = await router.add_worker(router.new_worker("decode-a"))
    # Without end, and six bytes of JSON for each token: the sockets between hold megabytes.
    worker.script = lambda _: itertools.repeat(Step([0] * 4096))
    host, port = router.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 500, "stream": True}).encode()
    writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    await worker.wait_for(lambda: len(worker.cancels) == 1)
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        assert (await http.get("/livez")).status_code == 200
    await router.until(lambda: router.bookings() == [(0, 0, 0)])
    writer.close()
