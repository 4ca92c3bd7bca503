"""A client of a running cluster over HTTP: one streamed answer with its timeline, and the cluster's status."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from google.protobuf import json_format
from tandem.v1 import common_pb2

from cluster.front_tls import client_context

CONNECT_TIMEOUT_S = 5.0
# Between two pieces of an answer; the server's own deadline is shorter than this.
READ_TIMEOUT_S = 600.0
TIMELINE_HEADER = "X-Tandem-Timeline"


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files by which a client and a front know each other. For an http URL nothing of it is looked at."""

    authority: Path | None = None  # who signed the front's certificate, or that itself; None: whom this machine trusts
    certificate: Path | None = None  # the client's own, with its key: where the front asks for one
    key: Path | None = None
    names_host: bool = True  # False: whatever the certificate calls itself

    def context(self) -> ssl.SSLContext:
        """Raises `StartupError` for files that cannot be used."""
        return client_context(self.authority, self.certificate, self.key, names_host=self.names_host)


NO_TLS_FILES = ClientTls()


class ClusterUnreachable(Exception):
    """Nothing that speaks our API answers at the URL. The message is one line."""


class AnswerFailed(Exception):
    """The cluster refused or broke off. The message is one line."""


@dataclass(frozen=True, slots=True)
class Question:
    """One chat turn."""

    prompt: str
    model: str = ""  # empty: the served one
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None


@dataclass(slots=True)
class AnswerRecord:
    """What was seen of one answer. Filled by `stream_answer` while it streams."""

    first_piece_s: float = 0.0  # sent to first piece of text
    gaps_s: list[float] = field(default_factory=list)  # between pieces
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    timeline: common_pb2.Timeline | None = None


class ClusterClient:
    """Talks to one URL. Use as an async context manager."""

    def __init__(self, url: str, api_key: str = "", tls: ClientTls = NO_TLS_FILES) -> None:
        """Raises `StartupError` for TLS files that cannot be used."""
        self._url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        # Reading the certificates takes 0.1 s, and a cluster on this machine has none.
        verify = tls.context() if url.startswith("https") else False
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, trust_env=False, verify=verify)

    async def __aenter__(self) -> ClusterClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def status(self) -> dict[str, Any]:
        """What `/statusz` says."""
        return await self._get("/statusz")

    async def explain(self, request_id: str) -> dict[str, Any]:
        """What `/explain` says of a request."""
        return await self._get(f"/explain/{quote(request_id, safe='')}")

    async def drain(self, worker_id: str) -> int:
        """Tells a worker to end when it is idle. Gives how many requests it still has."""
        path = f"/workers/{quote(worker_id, safe='')}/drain"
        return int((await self._request("POST", path, httpx.codes.ACCEPTED))["in_flight"])

    async def served_model(self) -> str:
        models = await self._get("/v1/models")
        return str(models["data"][0]["id"])

    async def stream_answer(self, question: Question, record: AnswerRecord) -> AsyncIterator[str]:
        """The answer's text, piece by piece. Raises `AnswerFailed`, `ClusterUnreachable`."""
        body = {
            "model": question.model or await self.served_model(),
            "messages": [{"role": "user", "content": question.prompt}],
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"seed": question.seed} if question.seed is not None else {}),
        }
        last_s = sent_s = time.monotonic()
        async for event in self._events("/v1/chat/completions", body):
            _note_end(event, record)
            text = _text(event)
            if text:
                now_s = time.monotonic()
                if record.first_piece_s == 0:
                    record.first_piece_s = now_s - sent_s
                else:
                    record.gaps_s.append(now_s - last_s)
                last_s = now_s
                yield text

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The server-sent events up to `[DONE]`. A stream that ends without it is a failure."""
        try:
            async with self._http.stream("POST", path, json=body, headers={TIMELINE_HEADER: "1"}) as response:
                if response.status_code != httpx.codes.OK:
                    raise AnswerFailed(_error_text(await response.aread(), response.status_code))
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if data == "[DONE]":
                        return
                    if data:
                        event = json.loads(data)
                        if "error" in event:
                            raise AnswerFailed(str(event["error"].get("message", event["error"])))
                        yield event
        except httpx.ConnectError as error:
            raise self._unreachable(error) from None
        except httpx.TransportError as error:
            raise AnswerFailed(f"the stream broke: {error or type(error).__name__}") from None
        raise AnswerFailed("the stream ended before the answer did")

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._request("GET", path, httpx.codes.OK)

    async def _request(self, method: str, path: str, expected_status: int) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, timeout=CONNECT_TIMEOUT_S)
        except httpx.TransportError as error:
            raise self._unreachable(error) from None
        if response.status_code != expected_status:
            raise AnswerFailed(_error_text(response.content, response.status_code))
        try:
            answer = response.json()
        except ValueError:
            raise self._unreachable() from None
        return dict(answer)

    def _unreachable(self, error: httpx.TransportError | None = None) -> ClusterUnreachable:
        if error is not None and "CERTIFICATE_VERIFY_FAILED" in str(error):
            reason = str(error).partition("verify failed: ")[2].partition(" (_ssl")[0]
            return ClusterUnreachable(
                f"the certificate of {self._url} is not trusted ({reason}): give who signed it, or the certificate, "
                "with --ca-file (TANDEM_CA_FILE)"
            )
        return ClusterUnreachable(
            f"no Tandem cluster answers at {self._url}: start one with `tandem serve`, or give --url (TANDEM_URL)"
        )


def _text(event: dict[str, Any]) -> str:
    return "".join(choice.get("delta", {}).get("content") or "" for choice in event.get("choices", ()))


def _note_end(event: dict[str, Any], record: AnswerRecord) -> None:
    for choice in event.get("choices", ()):
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
    if usage := event.get("usage"):
        record.prompt_tokens = usage["prompt_tokens"]
        record.completion_tokens = usage["completion_tokens"]
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if timeline := (event.get("tandem") or {}).get("timeline"):
        record.timeline = json_format.ParseDict(timeline, common_pb2.Timeline(), ignore_unknown_fields=True)


def _error_text(body: bytes, status: int) -> str:
    try:
        error = json.loads(body)["error"]
        if status == httpx.codes.UNAUTHORIZED:
            return "this cluster needs an API key, and none or a wrong one was given: --api-key (TANDEM_API_KEY)"
        return f"{error['message']} ({error.get('code') or status})"
    except (ValueError, KeyError, TypeError):
        return f"status {status}"
