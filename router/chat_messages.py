"""The messages of a chat request: roles, and content as text. Nothing is ever fetched: images and files are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import ContextLengthExceeded, InvalidRequest, shown
from router.field_rules import invalid_value, unknown_parameter, unsupported_parameter
from router.limits import MAX_NAME_CHARS, ServingLimits, check_prompt_text

ROLES = ("system", "developer", "user", "assistant", "tool")
# OpenAI's fields of a message that clients send back from an earlier answer; null or empty they say nothing.
_EMPTY_FIELDS = ("tool_calls", "function_call", "refusal", "audio", "annotations", "reasoning_content")


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
    check_prompt_text(sum(len(message["content"]) for message in messages), limits, "messages")
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
        elif name in _EMPTY_FIELDS:
            if item not in ("", [], {}):
                raise unsupported_parameter(f"{param}.{name}", "this server does not offer it")
        else:
            raise unknown_parameter(f"{param}.{name}")
    return message


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
