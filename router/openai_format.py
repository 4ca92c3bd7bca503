"""Answers in OpenAI's shape: whole, and as server-sent events.

Events are put together from text that is the same in every chunk and a little that is not: one engine step of one
stream costs a string escape and a join, and is written at once. Text is escaped by `json`'s own C function.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from google.protobuf import json_format
from tandem.v1 import common_pb2

from cluster.errors import TandemError
from cluster.tokenizer import Tokenizer
from router.answer import Answer, ChoiceUpdate, Usage
from router.api_types import ApiKind, GenerationRequest, TextPrompt
from router.choice_text import ShownToken
from router.http_errors import error_event
from router.openai_logprobs import chat_logprobs, completion_logprobs, id_as_name, prompt_logprobs
from router.openai_tools import ToolCallReader, delta_json, whole_calls
from router.tool_format import ToolFormat

DONE = b"data: [DONE]\n\n"


class OpenAiWriter:
    """One answer, as chat completion or completion: they differ in a chunk's name and in where the text stands.

    Either `events` for each batch and `last_events` at the end, or `whole` with all updates.
    """

    def __init__(
        self,
        request: GenerationRequest,
        answer: Answer,
        tokenizer: Tokenizer,
        model: str,
        tool_format: ToolFormat,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._request = request
        self._answer = answer
        self._tokenizer = tokenizer
        self._is_chat = request.kind is ApiKind.CHAT
        self._tools = None if request.tool_use is None else ToolCallReader(request.tool_use, tool_format)
        self._has_logprobs = request.logprobs >= 0
        self._begun: set[int] = set()  # choices of which something was sent
        created = int(unix_time())
        self._fixed = {"id": answer.request_id, "object": "", "created": created, "model": model}
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        # Written by hand like the chunks: an encoder with separators of its own is made anew for each call.
        self._head = (
            f'data: {{"id":{quoted(answer.request_id)},"object":"{kind}","created":{created},"model":{quoted(model)},'
        )
        # OpenAI: with include_usage every chunk but the last says `null`.
        self._tail = ',"usage":null}\n\n' if request.includes_usage else "}\n\n"

    def events(self, updates: Sequence[ChoiceUpdate]) -> bytes:
        """The chunks for a batch of updates."""
        return "".join([self._event(update) for update in updates]).encode()

    def last_events(self) -> bytes:
        """After the last update: usage and timeline when asked for, and `[DONE]`."""
        end = ""
        if self._request.includes_usage:
            end += f',"usage":{usage_text(self._answer.usage)}'
        if self._request.wants_timeline:
            end += f',"tandem":{json.dumps({"timeline": timeline_json(self._answer)})}'
        return f'{self._head}"choices":[]{end}}}\n\n'.encode() + DONE if end else DONE

    def whole(self, updates: Sequence[ChoiceUpdate]) -> bytes:
        """The answer as one JSON object, from all of its updates in order."""
        by_choice: list[list[ChoiceUpdate]] = [[] for _ in range(self._answer.num_added)]
        for update in updates:
            by_choice[update.index].append(update)
        body: dict[str, Any] = {
            **self._fixed,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "choices": [self._whole_choice(index, parts) for index, parts in enumerate(by_choice)],
            "usage": usage_json(self._answer.usage),
        }
        if self._request.return_token_ids and self._is_chat:
            body["prompt_token_ids"] = list(self._answer.specs[0].token_ids)
        if self._request.wants_timeline:
            body["tandem"] = {"timeline": timeline_json(self._answer)}
        return json.dumps(body).encode()

    def error_event(self, error: TandemError) -> bytes:
        return error_event(error)

    # --- chunks -------------------------------------------------------------------------------------------------------

    def _event(self, update: ChoiceUpdate) -> str:
        text = update.delta.text
        finish_reason, tool_delta = update.finish_reason, None
        if self._tools is not None:
            tool_delta = self._tools.read(update.index, text, is_last=finish_reason is not None)
            if not (tool_delta or finish_reason or update.delta.tokens or update.generated_ids):
                return ""  # held back until it shows whether it is a call
            finish_reason = self._tools.finish_reason(update.index, finish_reason)
        is_first = update.index not in self._begun
        if is_first:
            self._begun.add(update.index)
        if is_first and self._request.echo:
            text = self._echo_text(update.index) + text
        finish = "null" if finish_reason is None else f'"{finish_reason}"'
        stop = f',"stop_reason":{json.dumps(update.stop_reason)}' if update.stop_reason is not None else ""
        logprobs = json.dumps(self._chunk_logprobs(update, is_first)) if self._has_logprobs else "null"
        tail = self._tail
        if self._request.has_continuous_usage:
            tail = f',"usage":{usage_text(self._answer.usage)}}}\n\n'
        if tool_delta is not None:
            content = f'"delta":{delta_json(tool_delta, with_role=is_first)}'
        elif self._is_chat:
            role = '"role":"assistant",' if is_first else ""
            content = f'"delta":{{{role}"content":{quoted(text)}}}'
        else:
            content = f'"text":{quoted(text)}'
        if self._request.return_token_ids:
            stop += f',"token_ids":{json.dumps(list(update.generated_ids))}'
            if is_first:
                prompt_ids = f',"prompt_token_ids":{json.dumps(list(self._answer.specs[update.index].token_ids))}'
                stop, tail = (stop, prompt_ids + tail) if self._is_chat else (stop + prompt_ids, tail)
        return (
            f'{self._head}"choices":[{{"index":{update.index},{content},"logprobs":{logprobs},'
            f'"finish_reason":{finish}{stop}}}]{tail}'
        )

    def _chunk_logprobs(self, update: ChoiceUpdate, is_first: bool) -> dict[str, Any] | None:
        tokens = update.delta.tokens
        echoed = update.prompt_logprobs if self._request.echo and is_first else ()
        return self._logprobs(update.index, tokens, echoed) if tokens or echoed else None

    # --- whole --------------------------------------------------------------------------------------------------------

    def _whole_choice(self, index: int, parts: Sequence[ChoiceUpdate]) -> dict[str, Any]:
        text = "".join(part.delta.text for part in parts)
        tokens = [token for part in parts for token in part.delta.tokens]
        prompt = next((part.prompt_logprobs for part in parts if part.prompt_logprobs), ())
        last = parts[-1]
        choice: dict[str, Any] = {"index": index}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            if self._tools is not None:
                read = self._tools.read(index, text, is_last=True)
                if read.calls:
                    choice["message"] |= {"content": read.content or None, "tool_calls": whole_calls(read.calls)}
        else:
            choice["text"] = self._echo_text(index) + text if self._request.echo else text
        echoed = prompt if self._request.echo else ()
        choice["logprobs"] = self._logprobs(index, tokens, echoed) if self._has_logprobs else None
        reason = last.finish_reason
        choice["finish_reason"] = reason if self._tools is None else self._tools.finish_reason(index, reason)
        choice["stop_reason"] = last.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = [token_id for part in parts for token_id in part.generated_ids]
            if not self._is_chat:
                choice["prompt_token_ids"] = list(self._answer.specs[index].token_ids)
        if self._request.prompt_logprobs >= 0:
            spec = self._answer.specs[index]
            choice["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, spec.token_ids, prompt, self._request.prompt_logprobs
            )
        return choice

    def _logprobs(
        self, index: int, tokens: Sequence[ShownToken], echoed: Sequence[common_pb2.PositionLogprobs]
    ) -> dict[str, Any]:
        name = id_as_name if self._request.return_tokens_as_token_ids else None
        if self._is_chat:
            return chat_logprobs(self._tokenizer, tokens, self._request.logprobs, name)
        prompt_ids = self._answer.specs[index].token_ids if self._request.echo else ()
        return completion_logprobs(
            self._tokenizer,
            tokens,
            self._request.logprobs,
            prompt_ids=prompt_ids if echoed else (),
            prompt_positions=echoed,
            text_start=len(self._echo_text(index)) if self._request.echo else 0,
            name=name,
        )

    def _echo_text(self, index: int) -> str:
        prompt = self._request.prompts[index // self._request.num_choices]
        if isinstance(prompt, TextPrompt) and not self._request.truncate_prompt_tokens:
            return prompt.text
        return self._tokenizer.decode(self._answer.specs[index].token_ids)


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def usage_text(usage: Usage) -> str:
    """The same for a chunk."""
    return (
        f'{{"prompt_tokens":{usage.prompt_tokens},"completion_tokens":{usage.completion_tokens},'
        f'"total_tokens":{usage.total_tokens},"prompt_tokens_details":{{"cached_tokens":{usage.cached_tokens}}}}}'
    )


def timeline_json(answer: Answer) -> dict[str, Any]:
    """The worker's timeline with the router's own stages: microseconds since the request was admitted here."""
    times = answer.times
    merged = answer.merged_timeline()
    # 64-bit integers as numbers, not as the strings of protobuf's JSON: they are far below 2**53.
    fields = json_format.MessageToDict(
        merged, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    timeline = {name: int(value) if name.endswith(("_us", "_bytes")) else value for name, value in fields.items()}
    timeline["router_encoded_us"] = _us(times.encoded_s - times.admitted_s)
    if times.first_token_s:
        timeline["router_first_token_us"] = _us(times.first_token_s - times.admitted_s)
        timeline["router_last_token_us"] = _us(times.last_token_s - times.admitted_s)
    return timeline


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
