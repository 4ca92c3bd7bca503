"""The public fronts as one client: a test that asks through it runs over HTTP, whole and streamed, and over gRPC.

A field is called as HTTP calls it, where gRPC's `Generate` has it too; what constrains an answer as gRPC calls it. Who
leaves cancels the task that asks: the connection, or the call, ends with it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
import httpx
from tandem.v1 import common_pb2, inference_pb2, inference_pb2_grpc

from cluster.rpc_errors import from_rpc_error

CLIENT_TIMEOUT_S = 60.0
_GUIDES = {"json_schema": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar"}
_REASONS = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


class Served(Protocol):
    """Where one router serves."""

    url: str
    grpc_address: str


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Chunk:
    """What one message says of one choice: its text, and of each token (with `logprobs`) text, value, alternatives."""

    index: int
    text: str
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    num_alternatives: tuple[int, ...] = ()


@dataclass
class Reply:
    """All that a client got: an answer, a refusal, or an answer that broke off."""

    status: int | str = 200  # HTTP's, or the name of gRPC's
    request_id: str = ""
    chunks: list[Chunk] = field(default_factory=list)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usages: list[Usage] = field(default_factory=list)
    is_whole: bool = False  # it ended as an answer ends
    code: str = ""
    param: str = ""
    message: str = ""
    stage: str = ""
    retry_after_s: float = 0.0

    @property
    def texts(self) -> list[str]:
        texts: dict[int, str] = defaultdict(str)
        for chunk in self.chunks:
            texts[chunk.index] += chunk.text
        return [texts[index] for index in sorted(texts)]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def usage(self) -> Usage:
        (usage,) = self.usages
        return usage

    @property
    def is_client_error(self) -> bool:
        """The client's own fault, as this front says it."""
        return self.status in (400, "INVALID_ARGUMENT")


class Front(ABC):
    """One way in. Keeps its connections until it is closed."""

    name: str

    @abstractmethod
    async def ask(self, at: Served, *, key: str = "", headers: Mapping[str, str] | None = None, **fields: Any) -> Reply:
        """One request, whatever becomes of it. `timeout_ms` among the fields: its deadline."""

    @abstractmethod
    async def close(self) -> None: ...


class OverHttp(Front):
    """`/v1/completions`, or with `messages` `/v1/chat/completions`."""

    def __init__(self, model: str, *, is_streamed: bool) -> None:
        self.name = "http-stream" if is_streamed else "http"
        self._model = model
        self._is_streamed = is_streamed
        self._client = httpx.AsyncClient(trust_env=False, timeout=CLIENT_TIMEOUT_S)

    async def ask(self, at: Served, *, key: str = "", headers: Mapping[str, str] | None = None, **fields: Any) -> Reply:
        sent = dict(headers or {})
        if key:
            sent["authorization"] = f"Bearer {key}"
        if timeout_ms := fields.pop("timeout_ms", 0):
            sent["x-request-timeout-ms"] = str(timeout_ms)
        body = {"model": self._model, **{_GUIDES.get(name, name): value for name, value in fields.items()}}
        if self._is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        answer = await self._client.post(at.url + path, json=body, headers=sent)
        reply = Reply(answer.status_code, answer.headers.get("x-request-id", ""))
        reply.stage = answer.headers.get("x-tandem-stage", "")
        reply.retry_after_s = float(answer.headers.get("retry-after", 0))
        if answer.headers["content-type"].startswith("text/event-stream"):
            *events, rest = answer.text.split("\n\n")
            reply.is_whole = not rest and events[-1:] == ["data: [DONE]"]
            for event in events[:-1] if reply.is_whole else events:
                _read_object(json.loads(event.removeprefix("data: ")), reply)
        else:
            _read_object(answer.json(), reply)
            reply.is_whole = answer.status_code == 200
        return reply

    async def close(self) -> None:
        await self._client.aclose()


def _read_object(said: dict[str, Any], reply: Reply) -> None:
    """One JSON object: an answer, a chunk of one, or an error."""
    if error := said.get("error"):
        reply.code, reply.param, reply.message = error["code"], error["param"] or "", error["message"]
        return
    reply.request_id = said["id"]
    for choice in said["choices"]:
        shown = choice.get("delta") or choice.get("message") or choice
        logprobs = choice.get("logprobs") or {}
        tops: Sequence[dict[str, float] | None] = logprobs.get("top_logprobs") or ()
        chunk = Chunk(
            choice["index"],
            shown.get("text") or shown.get("content") or "",
            tuple(logprobs.get("tokens", ())),
            tuple(logprobs.get("token_logprobs", ())),
            tuple(len(top or ()) for top in tops) or (0,) * len(logprobs.get("tokens", ())),
        )
        reply.chunks.append(chunk)
        if reason := choice.get("finish_reason"):
            reply.finish_reasons[choice["index"]] = reason
    if usage := said.get("usage"):
        cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        counts = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"], cached_tokens)
        reply.usages.append(Usage(*counts))


class OverGrpc(Front):
    """`tandem.v1.Inference/Generate`."""

    name = "grpc"

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def ask(self, at: Served, *, key: str = "", headers: Mapping[str, str] | None = None, **fields: Any) -> Reply:
        metadata = [(name.lower(), value) for name, value in (headers or {}).items()]
        if key:
            metadata.append(("authorization", f"Bearer {key}"))
        timeout_s = fields.pop("timeout_ms", CLIENT_TIMEOUT_S * 1000) / 1000
        if at.grpc_address not in self._channels:
            self._channels[at.grpc_address] = grpc.aio.insecure_channel(at.grpc_address)
        stub: Any = inference_pb2_grpc.InferenceStub(self._channels[at.grpc_address])
        reply = Reply()
        call = stub.Generate(_to_message(fields), metadata=tuple(metadata), timeout=timeout_s)
        try:
            async for response in call:
                _read_response(response, reply)
            reply.is_whole = True
        except grpc.aio.AioRpcError as raised:
            error = from_rpc_error(raised)
            reply.status = raised.code().name
            reply.code, reply.param, reply.message = error.error_code, error.param, error.message
            reply.stage, reply.retry_after_s = error.stage, error.retry_after_s
        finally:
            call.cancel()
        return reply

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)


def _to_message(fields: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    values = dict(fields)
    prompt = values.pop("prompt", None)
    if isinstance(prompt, str):
        values["text"] = prompt
    elif prompt is not None:
        values["token_ids"] = inference_pb2.TokenIds(ids=prompt)
    if messages := values.pop("messages", None):
        values["chat"] = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(**one) for one in messages])
    return inference_pb2.GenerateRequest(**values)


def _read_response(response: inference_pb2.GenerateResponse, reply: Reply) -> None:
    reply.request_id = response.request_id
    for choice in response.choices:
        chunk = Chunk(
            choice.index,
            choice.text,
            tuple(chr(logprobs.chosen.token_id) for logprobs in choice.logprobs),
            tuple(logprobs.chosen.logprob for logprobs in choice.logprobs),
            tuple(len(logprobs.top) for logprobs in choice.logprobs),
        )
        reply.chunks.append(chunk)
        if choice.finish_reason:
            reply.finish_reasons[choice.index] = _REASONS[choice.finish_reason]
    if response.HasField("usage"):
        usage = response.usage
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.cached_tokens)
        reply.usages.append(Usage(*counts))
