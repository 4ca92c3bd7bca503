"""`POST /tokenize` and `/detokenize`, in vLLM's shape: what the model sees of a text, and the text of token ids."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from cluster.errors import InvalidRequest, RequestCancelled, TandemError
from router.api_types import ChatPrompt, Prompt, TextPrompt
from router.asgi_types import Receive, Scope, Send, send_response
from router.chat_messages import check_messages
from router.field_rules import ListOf, Rule, Text, TokenId
from router.http_body import read_json_bytes
from router.http_errors import as_tandem_error, error_body, error_headers
from router.limits import MAX_NAME_CHARS, ServingLimits, check_fields, check_prompt_text
from router.prompt_encoder import PromptEncoder

JSON_TYPE = b"application/json"
# Texts that are only counted: they make nobody's generation faster.
_OWNER = b"tokenize"


class TokenEndpoint:
    """A path that turns one JSON object into another, as an ASGI application."""

    def __init__(
        self,
        answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
        encoder: PromptEncoder,
        max_body_bytes: int,
        error_body: Callable[[TandemError], bytes] = error_body,
    ) -> None:
        self._answer = answer
        self._error_body = error_body
        self._encoder = encoder
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._encoder.parse(await read_json_bytes(scope, receive, self._max_body_bytes))
            answer = json.dumps(await self._answer(body)).encode()
        except RequestCancelled:
            return
        except Exception as raised:
            error = as_tandem_error(raised)
            await send_response(send, error.http_status, JSON_TYPE, self._error_body(error), error_headers(error))
            return
        await send_response(send, 200, JSON_TYPE, answer)


class TokenService:
    """What both paths answer."""

    def __init__(self, encoder: PromptEncoder, limits: ServingLimits) -> None:
        self._encoder = encoder
        self._limits = limits

    async def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        """`{"prompt"}` or `{"messages"}` -> `{"tokens", "count", "max_model_len"}`."""
        rules = {"model": Text(1, MAX_NAME_CHARS), "prompt": Text()}
        values = check_fields(body, rules, frozenset({"messages"}))
        prompt: Prompt
        if body.get("messages") is not None:
            prompt = ChatPrompt(check_messages(body["messages"], self._limits))
        elif "prompt" in values:
            check_prompt_text(len(values["prompt"]), self._limits, "prompt")
            prompt = TextPrompt(values["prompt"])
        else:
            raise InvalidRequest("prompt is missing", param="prompt")
        token_ids = await self._encoder.encode(prompt, _OWNER)
        return {"tokens": token_ids, "count": len(token_ids), "max_model_len": self._limits.max_model_len}

    async def detokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        """`{"tokens"}` -> `{"prompt"}`."""
        max_tokens = self._limits.max_prompt_chars
        rules: dict[str, Rule] = {
            "model": Text(1, MAX_NAME_CHARS),
            "tokens": ListOf(TokenId(self._limits.vocab_size), max_tokens),
        }
        values = check_fields(body, rules, frozenset())
        if "tokens" not in values:
            raise InvalidRequest("tokens is missing", param="tokens")
        return {"prompt": await self._encoder.decode(list(values["tokens"]))}
