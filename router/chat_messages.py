"""The messages of a chat request: roles, and content as text. Nothing is ever fetched: images and files are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cluster.errors import ContextLengthExceeded, InvalidRequest, shown
from router.field_rules import Integer, Record, Rule, Text, invalid_value, unknown_parameter, unsupported_parameter
from router.limits import MAX_NAME_CHARS, ServingLimits, check_prompt_text

MAX_CALLS = 128  # in one message
ROLES = ("system", "developer", "user", "assistant", "tool")
# OpenAI's fields of a message that clients send back from an earlier answer; null or empty they say nothing.
_EMPTY_FIELDS = ("function_call", "refusal", "audio", "annotations", "reasoning_content")


def check_messages(value: Any, limits: ServingLimits) -> tuple[Mapping[str, Any], ...]:
    """The messages as a chat template takes them. Raises `InvalidRequest` naming the message and field."""
    if not isinstance(value, list):
        raise invalid_value("messages", value, "an array of messages")
    if not value:
        raise InvalidRequest("messages is empty, must have at least one message", param="messages")
    if len(value) > limits.max_model_len:  # each takes a token at least
        raise ContextLengthExceeded(
            f"messages has {len(value)} entries, more than the model's {limits.max_model_len} tokens", param="messages"
        )
    messages = tuple(_check_message(message, f"messages[{index}]") for index, message in enumerate(value))
    check_prompt_text(sum(map(num_chars, messages)), limits, "messages")
    return messages


def _check_message(value: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise invalid_value(param, value, "an object with role and content")
    role = value.get("role")
    if role not in ROLES:
        raise invalid_value(f"{param}.role", role, f"one of {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": role, "content": _check_content(value.get("content"), role, f"{param}.content")}
    for name, item in value.items():
        if name in ("role", "content") or item is None:
            continue
        if name in ("name", "tool_call_id"):
            if not isinstance(item, str) or len(item) > MAX_NAME_CHARS:
                raise invalid_value(f"{param}.{name}", item, f"a string of at most {MAX_NAME_CHARS} characters")
            message[name] = item
        elif name == "tool_calls":
            if calls := check_tool_calls(item, role, f"{param}.{name}"):
                message[name] = calls
        elif name in _EMPTY_FIELDS:
            if item not in ("", [], {}):
                raise unsupported_parameter(f"{param}.{name}", "this server does not offer it")
        else:
            raise unknown_parameter(f"{param}.{name}")
    return message


def check_tool_calls(value: Any, role: str, param: str) -> list[dict[str, Any]]:
    """Calls of an earlier answer, their arguments as objects: that is what chat templates write."""
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise invalid_value(param, value, f"an array of at most {MAX_CALLS} calls")
    if value and role != "assistant":
        raise InvalidRequest(f"{param} stands in a message of role {role}; calls are the assistant's", param=param)
    return [_check_call(call, f"{param}[{index}]") for index, call in enumerate(value)]


def _check_call(value: Any, param: str) -> dict[str, Any]:
    name = Text(1, MAX_NAME_CHARS)
    function = Record({"name": name, "arguments": Text()}, required=("name", "arguments"))
    rules: dict[str, Rule] = {"id": name, "type": Text(), "index": Integer(0, MAX_CALLS), "function": function}
    call = Record(rules, required=("function",)).check(value, param)
    arguments = call_arguments(call["function"]["arguments"], f"{param}.function.arguments")
    written = {"name": call["function"]["name"], "arguments": arguments}
    return {"id": call.get("id", ""), "type": "function", "function": written}


def call_arguments(text: str, param: str) -> dict[str, Any]:
    """The arguments of an earlier call, which travel as JSON text. Raises `InvalidRequest`."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid_value(param, text, "a JSON object as text")
    return arguments


def num_chars(message: Mapping[str, Any]) -> int:
    """What a message may cost in tokens, before any is counted."""
    return len(message["content"]) + len(str(message.get("tool_calls", "")))


def _check_content(value: Any, role: str, param: str) -> str:
    if isinstance(value, str):
        return value
    if value is None and role == "assistant":
        return ""
    if isinstance(value, list) and value:
        return "\n".join(_check_part(part, f"{param}[{index}]") for index, part in enumerate(value))
    raise invalid_value(param, value, "a string or an array of text parts")


def _check_part(part: Any, param: str) -> str:
    if not isinstance(part, dict):
        raise invalid_value(param, part, "a content part")
    if part.get("type") != "text":
        raise unsupported_parameter(param, f"content of type {shown(part.get('type'))}; only text is accepted")
    for name in part:
        if name not in ("type", "text"):
            raise unknown_parameter(f"{param}.{name}")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid_value(f"{param}.text", text, "a string")
    return text
