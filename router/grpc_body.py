"""A gRPC request as the JSON body that asks for the same, and what is wrong with it by the names that protobuf has.

Nothing is checked here but what has no JSON to be checked as: `request_parser` does that, for HTTP alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tandem.v1 import inference_pb2

from cluster.errors import InvalidRequest
from router.api_types import Guide
from router.json_body import parse_json_object

# Fields that HTTP has under the same name, with a presence of their own.
_OPTIONAL_FIELDS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "n", "min_tokens", "priority", "num_drafts", "parallel_tool_calls",
    "skip_special_tokens", "truncate_prompt_tokens", "add_generation_prompt",
)  # fmt: skip
# What constrains the answer, and what HTTP calls it.
_GUIDES = {"json_schema": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar"}


def body_of(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    """Raises `InvalidRequest` for a tool's parameters that are no JSON."""
    present = {field.name for field, _ in request.ListFields()}
    body: dict[str, Any] = {name: getattr(request, name) for name in _OPTIONAL_FIELDS if name in present}
    body.update({field: getattr(request, name) for name, field in _GUIDES.items() if getattr(request, name)})
    if request.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in request.logit_bias.items()}
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        if values := getattr(request, name):
            body[name] = list(values)
    for name in ("user", "cache_salt", "speculation"):
        if getattr(request, name):
            body[name] = getattr(request, name)
    for name in ("ignore_eos", "include_stop_str_in_output", "continue_final_message"):
        body[name] = getattr(request, name)
    match request.WhichOneof("prompt"):
        case "text":
            body["prompt"] = request.text
        case "token_ids":
            body["prompt"] = list(request.token_ids.ids)
        case "chat":
            body["messages"] = [_message(message) for message in request.chat.messages]
    if request.HasField("logprobs"):
        is_chat = "messages" in body
        body.update({"logprobs": True, "top_logprobs": request.logprobs} if is_chat else {"logprobs": request.logprobs})
    if request.tools:
        body["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
    match request.tool_choice.WhichOneof("choice"):
        case "mode":
            body["tool_choice"] = request.tool_choice.mode
        case "function":
            body["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.function}}
    return body


def renamed_error(error: InvalidRequest) -> InvalidRequest:
    """The error with the parameter's name as it is in protobuf."""
    param = _renamed(error.param)
    if param == error.param:
        return error
    return InvalidRequest(error.message.replace(error.param, param, 1), param=param, code=error.error_code)


def renamed_guide(guide: Guide) -> Guide:
    """What a grammar that turns out to be none shall be called."""
    return dataclasses.replace(guide, param=_renamed(guide.param))


def _renamed(param: str) -> str:
    for name, field in _GUIDES.items():
        if param.startswith(field):
            return param.replace(field, name, 1)
    # A tool and a call are their functions here: there is no other kind.
    is_function = param.startswith("tools[") or ".tool_calls[" in param
    return param.replace(".function.", ".", 1) if is_function else param


def _tool(tool: inference_pb2.Tool, param: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "strict": tool.strict}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        try:
            function["parameters"] = parse_json_object(tool.parameters.encode())
        except InvalidRequest as error:
            place = f"{param}.parameters"
            raise InvalidRequest(
                f"{place}: {error.message.replace('the body', 'the schema', 1)}",
                param=place,
                code="invalid_json_schema",
            ) from None
    return {"type": "function", "function": function}


def _message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id"):
        if value := getattr(message, name):
            written[name] = value
    if message.tool_calls:
        written["tool_calls"] = [_call(call) for call in message.tool_calls]
    return written


def _call(call: inference_pb2.ToolCall) -> dict[str, Any]:
    named = {"id": call.id} if call.id else {}
    return {**named, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
