"""An OpenAI server with one mock engine in it: what other people's routers are put in front of.

The engine, its prefix cache and its timing model are those of our mock workers, and chats go through the same template,
so a prompt has the same tokens on either; only the way in differs: HTTP here, a gRPC session there. `python -m
benchmarks.mock_server --port 9000`; `GET /counts` says what it was asked and what it found in its cache. It knows
nothing of sampling parameters: an answer has `max_tokens` tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from cluster.chat_template import ChatTemplate
from cluster.errors import StartupError
from cluster.identity import RequestId
from cluster.model_files import DEFAULT_MODEL, resolve_model
from cluster.sampling_params import SamplingParams
from cluster.tokenizer import Tokenizer, load_tokenizer
from cluster.worker_settings import DEFAULT_MOCK_DECODE_MS, DEFAULT_MOCK_PREFILL_MS
from engine.block_pool import BlockPool
from engine.mock_engine import MockEngine, StepTiming
from engine.mock_worker import DEFAULT_NUM_BLOCKS, NUM_LAYERS
from engine.request import EngineLimits, EngineRequest, SequenceOutput
from router.asgi_types import Receive, Scope, Send, send_response
from router.http_server import bind_socket

BLOCK_TOKENS = 16
MAX_MODEL_LEN = 8192
JSON_TYPE = b"application/json"
# What the routers ask of a worker before they send it anything.
MODEL_INFO = {"model_path": DEFAULT_MODEL, "is_generation": True, "max_total_num_tokens": DEFAULT_NUM_BLOCKS * 16}


class MockServer:
    """An ASGI application. Owned by its process."""

    def __init__(self, tokenizer: Tokenizer, timing: StepTiming, num_blocks: int) -> None:
        """Raises `StartupError` for a model without a chat template."""
        limits = EngineLimits(max_model_len=MAX_MODEL_LEN)
        pool = BlockPool(num_blocks, BLOCK_TOKENS, "mock")
        self._tokenizer = tokenizer
        vocabulary = tokenizer.vocabulary
        if vocabulary.chat_template is None:
            raise StartupError("the model has no chat template: its server has no chats to answer")
        self._template = ChatTemplate(vocabulary.chat_template, vocabulary.special_tokens)
        self._engine = MockEngine(timing, pool, limits, vocab_size=tokenizer.vocab_size, num_layers=NUM_LAYERS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[RequestId, asyncio.Queue[SequenceOutput]] = {}
        self._counts = {"requests": 0, "prompt_tokens": 0, "cached_tokens": 0}

    def stop(self) -> None:
        self._engine.stop(5.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._engine.start(self._sink)
        path = scope["path"]
        if scope["method"] == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            await self._generate(await _read_json(receive), send, is_chat="chat" in path)
            return
        models = {"object": "list", "data": [{"id": DEFAULT_MODEL, "object": "model"}]}
        answer: Any = {"/counts": self._counts, "/v1/models": models}.get(path, MODEL_INFO)
        await send_response(send, 200, JSON_TYPE, json.dumps(answer).encode())

    async def _generate(self, body: dict[str, Any], send: Send, *, is_chat: bool) -> None:
        token_ids = self._token_ids(body, is_chat=is_chat)
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += len(token_ids)
        request_id = RequestId(f"r{self._counts['requests']}")
        max_tokens = int(body.get("max_tokens") or 16)
        request = EngineRequest(
            request_id, np.array(token_ids, dtype=np.int32), SamplingParams(max_tokens=max_tokens), scope_key=b""
        )
        stream = self._streams[request_id] = asyncio.Queue(max_tokens + 1)
        self._engine.submit(request)
        try:
            if body.get("stream"):
                await self._stream(stream, len(token_ids), send, is_chat=is_chat)
                return
            tokens = [token async for output in _outputs(stream) for token in output.token_ids]
            whole = _chunk(self._tokenizer.decode(tokens), "length", is_chat=is_chat, is_whole=True)
            whole["usage"] = {"prompt_tokens": len(token_ids), "completion_tokens": len(tokens)}
            await send_response(send, 200, JSON_TYPE, json.dumps(whole).encode())
        finally:
            del self._streams[request_id]
            self._engine.cancel(request_id)

    async def _stream(
        self, stream: asyncio.Queue[SequenceOutput], num_prompt_tokens: int, send: Send, *, is_chat: bool
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        num_tokens = cached_tokens = 0
        async for output in _outputs(stream):
            cached_tokens = max(cached_tokens, output.cached_tokens)
            num_tokens += len(output.token_ids)
            reason = "length" if output.finish_reason is not None else None
            chunk = _chunk(self._tokenizer.decode(output.token_ids), reason, is_chat=is_chat)
            await send({"type": "http.response.body", "body": _event(chunk), "more_body": True})
        self._counts["cached_tokens"] += cached_tokens
        usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
        last = _event({**_chunk("", None, is_chat=is_chat), "choices": [], "usage": usage}) + b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _token_ids(self, body: dict[str, Any], *, is_chat: bool) -> Sequence[int]:
        if is_chat:
            return self._tokenizer.encode(self._template.render(body["messages"]), add_special_tokens=False)
        prompt = body["prompt"]
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _sink(self, outputs: Sequence[SequenceOutput]) -> None:
        """From the engine's thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: Sequence[SequenceOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put_nowait(output)


async def _outputs(stream: asyncio.Queue[SequenceOutput]) -> AsyncIterator[SequenceOutput]:
    while True:
        output = await stream.get()
        yield output
        if output.finish_reason is not None:
            return


def _chunk(text: str, finish_reason: str | None, *, is_chat: bool, is_whole: bool = False) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    if is_chat:
        choice["message" if is_whole else "delta"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    kind = "chat.completion" if is_chat else "text_completion"
    return {"id": "mock", "object": kind, "created": 0, "model": DEFAULT_MODEL, "choices": [choice]}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def _read_json(receive: Receive) -> dict[str, Any]:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    parsed: dict[str, Any] = json.loads(body)
    return parsed


def _coefficients(text: str) -> tuple[float, float, float]:
    first, second, third = map(float, text.split(","))
    return first, second, third


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokenizer is used")
    parser.add_argument("--prefill-ms", type=_coefficients, default=DEFAULT_MOCK_PREFILL_MS)
    parser.add_argument("--decode-ms", type=_coefficients, default=DEFAULT_MOCK_DECODE_MS)
    parser.add_argument("--num-blocks", type=int, default=DEFAULT_NUM_BLOCKS, help="of its KV pool")
    arguments = parser.parse_args()
    path: Path = resolve_model(arguments.model)
    timing = StepTiming(arguments.prefill_ms, arguments.decode_ms)
    server = MockServer(load_tokenizer(path), timing, arguments.num_blocks)
    try:
        config = uvicorn.Config(server, log_level="warning", access_log=False, lifespan="off")
        uvicorn.Server(config).run([bind_socket("127.0.0.1", arguments.port, "--port")])
    finally:
        server.stop()


if __name__ == "__main__":
    main()
