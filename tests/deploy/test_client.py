"""The client against a real HTTP server that speaks as the router does, well or badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rich.console import Console

from deploy.client import AnswerFailed, AnswerRecord, ClusterClient, ClusterUnreachable, Question
from deploy.timeline_table import timeline_table

TIMELINE = {
    "placed_us": "1500", "prefill_compute_us": 42000, "transfer_exposed_us": 900, "kv_bytes": 2 * 2**20,
    "kv_frames": 12, "transport": "shm", "prefill_worker_id": "prefill-0", "decode_worker_id": "decode-0",
    "attempts": 1, "a_field_of_tomorrow": 1,
}  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "Blue"}}]},
    {"choices": [{"index": 0, "delta": {"content": " light"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
        "tandem": {"timeline": TIMELINE},
    },
]


def sse(events: list[dict[str, Any]], end: str = "data: [DONE]\n\n") -> bytes:
    frames = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + frames.encode()


def answer_json(status: str, body: object) -> bytes:
    text = json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode() + text


@asynccontextmanager
async def server(respond: Callable[[str, bytes], bytes]) -> AsyncIterator[str]:
    """`respond(request line and headers, body)` gives the bytes of the response."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line.split(":")[1]) for line in head.lower().splitlines() if "content-length" in line), 0)
        writer.write(respond(head, await reader.readexactly(length)))
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


async def read(url: str, question: Question) -> tuple[str, AnswerRecord]:
    record = AnswerRecord()
    async with ClusterClient(url, "key-1") as client:
        return "".join([piece async for piece in client.stream_answer(question, record)]), record


async def test_answer_streams_with_usage_and_timeline() -> None:
    requests: list[tuple[str, bytes]] = []

    def respond(head: str, body: bytes) -> bytes:
        requests.append((head, body))
        return answer_json("200 OK", {"data": [{"id": "served"}]}) if "/v1/models" in head else sse(EVENTS)

    async with server(respond) as url:
        text, record = await read(url, Question("why?", seed=7))
    assert text == "Blue light"
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (9, 2, 4)
    assert record.finish_reason == "stop"
    assert len(record.gaps_s) == 1
    assert record.timeline is not None
    assert (record.timeline.placed_us, record.timeline.prefill_worker_id) == (1500, "prefill-0")
    head, body = requests[-1]
    assert "x-tandem-timeline: 1" in head.lower()
    assert "authorization: bearer key-1" in head.lower()
    assert json.loads(body).items() >= {"model": "served", "seed": 7, "stream": True}.items()


async def test_timeline_table_names_both_workers_and_the_exposed_transfer() -> None:
    async with server(lambda head, body: sse(EVENTS)) as url:
        _, record = await read(url, Question("why?", model="m"))
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(timeline_table(record))
    printed = capture.get()
    for part in ("prefill-0", "decode-0", "transfer, exposed", "0.9 ms", "2.0 MiB in 12 frames over shm", "9 prompt"):
        assert part in printed


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (answer_json("404 Not Found", {"error": {"message": "no model 'x'", "code": "model_not_found"}}),
         r"no model 'x' \(model_not_found\)"),
        (answer_json("500 Oops", "?"), "status 500"),
        (sse(EVENTS[:2], end=""), "ended before the answer did"),
        (sse([*EVENTS[:2], {"error": {"message": "engine failed"}}]), "engine failed"),
    ],
)  # fmt: skip
async def test_refusals_and_broken_streams_are_failures(response: bytes, said: str) -> None:
    async with server(lambda head, body: response) as url:
        with pytest.raises(AnswerFailed, match=said):
            await read(url, Question("why?", model="m"))


async def test_a_worker_is_drained_and_an_unknown_one_is_a_failure() -> None:
    heads: list[str] = []

    def respond(head: str, _: bytes) -> bytes:
        heads.append(head.splitlines()[0])
        if "decode-0" in head:
            return answer_json("202 Accepted", {"worker_id": "decode-0", "in_flight": 3})
        return answer_json("404 Not Found", {"error": {"message": "no worker 'a/b'", "code": "unknown_worker"}})

    async with server(respond) as url, ClusterClient(url) as client:
        assert await client.drain("decode-0") == 3
        with pytest.raises(AnswerFailed, match="no worker 'a/b'"):
            await client.drain("a/b")
    assert heads == ["POST /workers/decode-0/drain HTTP/1.1", "POST /workers/a%2Fb/drain HTTP/1.1"]


async def test_something_else_on_the_port_is_unreachable() -> None:
    other = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
    async with server(lambda head, body: other) as url, ClusterClient(url) as client:
        with pytest.raises(ClusterUnreachable, match="tandem serve"):
            await client.status()
