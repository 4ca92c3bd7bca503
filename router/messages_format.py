"""Answers and errors in the shape of Anthropic's Messages API: one object, or its server-sent events.

    message_start, (content_block_start, content_block_delta ..., content_block_stop) ..., message_delta, message_stop

A call's input is an object there: arguments that are no JSON object, cut off or malformed by the model, come as
`{"INVALID_JSON": "<the text>"}`, the form that Anthropic's own documentation gives them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from cluster.errors import TandemError
from router.answer import LENGTH, Answer, ChoiceUpdate
from router.answer_blocks import AnswerBlocks, Block, BlockStep, Step
from router.api_types import GenerationRequest
from router.http_errors import error_fields
from router.openai_format import timeline_json
from router.openai_tools import TOOL_CALLS, ToolCallReader
from router.tool_format import ToolFormat

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesWriter:
    """One answer. Either `events` for each batch and `last_events` at the end, or `whole` with all updates."""

    def __init__(self, request: GenerationRequest, answer: Answer, model: str, tool_format: ToolFormat) -> None:
        self._request = request
        self._answer = answer
        self._model = model
        self._blocks = AnswerBlocks(
            None if request.tool_use is None else ToolCallReader(request.tool_use, tool_format, new_tool_use_id)
        )
        self._has_begun = False

    def events(self, updates: Sequence[ChoiceUpdate]) -> bytes:
        """The events of a batch of updates; nothing while text is held back that may become a call."""
        lines: list[str] = []
        for update in updates:
            for step in self._blocks.push(update):
                if not self._has_begun:
                    self._has_begun = True
                    started = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
                    lines.append(_event("message_start", message=started))
                lines.extend(_step_events(step))
        return "".join(lines).encode()

    def last_events(self) -> bytes:
        """After the last update."""
        message = self._message()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        more = {"tandem": message["tandem"]} if "tandem" in message else {}
        end = _event("message_delta", delta=delta, usage=message["usage"], **more)
        return (end + _event("message_stop")).encode()

    def error_event(self, error: TandemError) -> bytes:
        return b"event: error\ndata: " + messages_error_body(error) + b"\n\n"

    def whole(self, updates: Sequence[ChoiceUpdate]) -> bytes:
        """The answer as one JSON object, from all of its updates in order."""
        for update in updates:
            for _ in self._blocks.push(update):
                pass
        return json.dumps(self._message()).encode()

    def _message(self) -> dict[str, Any]:
        """As far as it has come."""
        blocks = self._blocks
        matched = blocks.stop_reason if isinstance(blocks.stop_reason, str) else None
        usage = self._answer.usage
        message: dict[str, Any] = {
            "id": self._answer.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [_content(block) for block in blocks.blocks],
            "stop_reason": _stop_reason(blocks.finish_reason, matched),
            "stop_sequence": matched,
            "usage": {
                "input_tokens": usage.prompt_tokens - usage.cached_tokens,  # there the cached ones are counted apart
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached_tokens,
                "output_tokens": usage.completion_tokens,
            },
        }
        if blocks.finish_reason is not None and self._request.wants_timeline:
            message["tandem"] = {"timeline": timeline_json(self._answer)}
        return message


def new_tool_use_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


def messages_error_body(error: TandemError) -> bytes:
    """Anthropic's shape, with the parameter and our code beside its two fields."""
    default = "invalid_request_error" if error.http_status < 500 else "api_error"
    fields = {**error_fields(error), "type": _ERROR_TYPES.get(error.http_status, default)}
    return json.dumps({"type": "error", "error": fields}).encode()


def _step_events(step: BlockStep) -> Iterator[str]:
    block = step.block
    match step.step:
        case Step.OPENED:
            content = _content(Block(block.index, block.call_id, block.name))
            yield _event("content_block_start", index=block.index, content_block=content)
        case Step.GREW:
            kind = ("input_json_delta", "partial_json") if block.is_call else ("text_delta", "text")
            yield _event("content_block_delta", index=block.index, delta={"type": kind[0], kind[1]: step.text})
        case Step.CLOSED:
            yield _event("content_block_stop", index=block.index)


def _event(kind: str, **fields: Any) -> str:
    written = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {written}\n\n"


def _content(block: Block) -> dict[str, Any]:
    if not block.is_call:
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def _stop_reason(finish_reason: str | None, matched: str | None) -> str | None:
    if finish_reason is None:
        return None
    if finish_reason == TOOL_CALLS:
        return "tool_use"
    if finish_reason == LENGTH:
        return "max_tokens"
    return "end_turn" if matched is None else "stop_sequence"
