"""Answers in the shape of OpenAI's Responses API: one object, or typed server-sent events with a number each.

    response.created, response.in_progress
      for each text   output_item.added, content_part.added, output_text.delta ..., output_text.done,
                      content_part.done, output_item.done
      for each call   output_item.added, function_call_arguments.delta ..., function_call_arguments.done,
                      output_item.done
    response.completed, or response.incomplete when the length cut it

There is no `[DONE]`. A failure in mid-stream is an `error` event, and the stream closes without the last one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cluster.errors import TandemError
from router.answer import LENGTH, Answer, ChoiceUpdate
from router.answer_blocks import AnswerBlocks, Block, BlockStep, Step
from router.api_types import GenerationRequest
from router.http_errors import error_fields
from router.openai_format import timeline_json
from router.openai_tools import ToolCallReader
from router.tool_format import ToolFormat

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"


class ResponsesWriter:
    """One answer. Either `events` for each batch and `last_events` at the end, or `whole` with all updates."""

    def __init__(
        self,
        body: Mapping[str, Any],
        request: GenerationRequest,
        answer: Answer,
        model: str,
        tool_format: ToolFormat,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """`body` as it came: the answer repeats what was asked."""
        self._body = body
        self._request = request
        self._answer = answer
        self._model = model
        self._created_at = int(unix_time())
        self._blocks = AnswerBlocks(None if request.tool_use is None else ToolCallReader(request.tool_use, tool_format))
        self._id = answer.request_id.partition("-")[2]
        self._num_events = 0

    def events(self, updates: Sequence[ChoiceUpdate]) -> bytes:
        """The events of a batch of updates; nothing while text is held back that may become a call."""
        lines: list[str] = []
        for update in updates:
            for step in self._blocks.push(update):
                if not self._num_events:
                    started = self._response(IN_PROGRESS)
                    lines += [self._event("response.created", response=started)]
                    lines += [self._event("response.in_progress", response=started)]
                lines += self._step_events(step)
        return "".join(lines).encode()

    def last_events(self) -> bytes:
        """After the last update."""
        status = self._status()
        return self._event(f"response.{status}", response=self._response(status)).encode()

    def error_event(self, error: TandemError) -> bytes:
        """The fields stand twice: as the API's reference has them, and where the client looks for an error to raise."""
        fields = error_fields(error)
        flat = {name: fields[name] for name in ("code", "message", "param")}
        return self._event("error", **flat, error=fields).encode()

    def whole(self, updates: Sequence[ChoiceUpdate]) -> bytes:
        """The answer as one JSON object, from all of its updates in order."""
        for update in updates:
            for _ in self._blocks.push(update):
                pass
        return json.dumps(self._response(self._status())).encode()

    def _status(self) -> str:
        return INCOMPLETE if self._blocks.finish_reason == LENGTH else COMPLETED

    # --- events -------------------------------------------------------------------------------------------------------

    def _step_events(self, step: BlockStep) -> Iterator[str]:
        block = step.block
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        part = {} if block.is_call else {"content_index": 0}
        match step.step:
            case Step.OPENED:
                opened = Block(block.index, block.call_id, block.name)
                item = self._item(opened, IN_PROGRESS)
                if not block.is_call:
                    item["content"] = []
                yield self._event("response.output_item.added", output_index=block.index, item=item)
                if not block.is_call:
                    yield self._event("response.content_part.added", **place, **part, part=_text_part(""))
            case Step.GREW if block.is_call:
                yield self._event("response.function_call_arguments.delta", **place, delta=step.text)
            case Step.GREW:
                yield self._event("response.output_text.delta", **place, **part, delta=step.text, logprobs=[])
            case Step.CLOSED:
                if block.is_call:
                    yield self._event(
                        "response.function_call_arguments.done", **place, name=block.name, arguments=block.text
                    )
                else:
                    yield self._event("response.output_text.done", **place, **part, text=block.text, logprobs=[])
                    yield self._event("response.content_part.done", **place, **part, part=_text_part(block.text))
                item = self._item(block, self._status())
                yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: Any) -> str:
        written = json.dumps({"type": kind, "sequence_number": self._num_events, **fields}, separators=(",", ":"))
        self._num_events += 1
        return f"event: {kind}\ndata: {written}\n\n"

    # --- objects ------------------------------------------------------------------------------------------------------

    def _response(self, status: str) -> dict[str, Any]:
        request, body = self._request, self._body
        has_ended = status != IN_PROGRESS
        blocks = self._blocks.blocks if has_ended else []
        response: dict[str, Any] = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "instructions": body.get("instructions"),
            "max_output_tokens": request.max_tokens,
            "metadata": body.get("metadata") or {},
            "model": self._model,
            "output": [self._item(block, status) for block in blocks],
            "parallel_tool_calls": request.tool_use is None or request.tool_use.is_parallel,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": request.temperature,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": self._usage() if has_ended else None,
            "user": body.get("user"),
        }
        if has_ended and request.wants_timeline:
            response["tandem"] = {"timeline": timeline_json(self._answer)}
        return response

    def _usage(self) -> dict[str, Any]:
        usage = self._answer.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        is_cut = status == INCOMPLETE and block is self._blocks.blocks[-1]
        item: dict[str, Any] = {"id": self._item_id(block), "status": INCOMPLETE if is_cut else COMPLETED}
        if status == IN_PROGRESS:
            item["status"] = IN_PROGRESS
        if block.is_call:
            return {
                **item,
                "type": "function_call",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": block.text,
            }
        return {**item, "type": "message", "role": "assistant", "content": [_text_part(block.text)]}

    def _item_id(self, block: Block) -> str:
        return f"{'fc' if block.is_call else 'msg'}_{self._id}{block.index:02x}"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
