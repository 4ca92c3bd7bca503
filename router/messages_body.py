"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's API, as the router's own types.

    system ─> a system message      user and assistant turns, of texts, tool_use and tool_result blocks, in order

`cache_control` is taken and changes nothing: prefixes are cached without being asked. Images, documents, thinking and
tools that run elsewhere are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import InvalidRequest, shown
from router.api_types import ApiKind, ChatPrompt, GenerationRequest, Guide, Tool, ToolMode
from router.conversation import Conversation
from router.field_rules import (
    AnyValue,
    Flag,
    ListOf,
    NotOffered,
    OneOf,
    Record,
    Rule,
    Text,
    invalid_value,
    unsupported_parameter,
)
from router.json_schema_rules import check_schema
from router.limits import MAX_NAME_CHARS, ServingLimits, chat_fields, check_fields
from router.prompt_encoder import PromptEncoder
from router.request_parser import NOTHING_AROUND, AroundBody, RequestParser
from router.tool_fields import MAX_TOOLS, AnyObject, checked_function, function_properties, tool_use

ROLES = ("user", "assistant")
_OWNER = b"count_tokens"  # texts that are only counted make nobody's generation faster
# Fields of a chat that mean the same here; below them vLLM's extensions.
_SAME_FIELDS = (
    "model", "stream", "temperature", "top_p", "top_k",
    "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop_token_ids",
    "min_tokens", "ignore_eos", "cache_salt", "speculation", "num_drafts", "priority", "include_stop_str_in_output",
    "skip_special_tokens", "truncate_prompt_tokens", "allowed_token_ids", "bad_words",
)  # fmt: skip


class MessagesParser:
    """Checks bodies against one model's limits."""

    def __init__(self, parser: RequestParser) -> None:
        self._parser = parser
        self._fields = messages_fields(parser.limits)

    def parse(self, body: Mapping[str, Any], around: AroundBody = NOTHING_AROUND) -> GenerationRequest:
        """Raises `InvalidRequest`, `ContextLengthExceeded` or `ModelNotFound`."""
        values, messages = self._read(body)
        if "max_tokens" not in values:
            raise InvalidRequest("max_tokens is missing", param="max_tokens")
        return self._parser.chat_request(ApiKind.MESSAGE, values, messages, around)

    async def count_tokens(self, body: Mapping[str, Any], encoder: PromptEncoder) -> dict[str, int]:
        """What the same body's prompt has: `{"input_tokens"}`."""
        values, messages = self._read(body)
        use = tool_use(values)
        is_continued = values.get("continue_final_message", False)
        prompt = ChatPrompt(
            messages,
            () if use is None else use.tools,
            is_continued=is_continued,
            has_generation_prompt=not is_continued,
        )
        return {"input_tokens": len(await encoder.encode(prompt, _OWNER))}

    def _read(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Mapping[str, Any], ...]]:
        """The checked fields under the names of a chat's, and the conversation."""
        values = check_fields(body, self._fields, frozenset({"messages", "system"}))
        self._parser.check_model(values)
        conversation = Conversation()
        if body.get("system"):
            conversation.say("system", _text_of(body["system"], "system"))
        _read_turns(body.get("messages"), conversation)
        chat = {name: values[name] for name in (*_SAME_FIELDS, "max_tokens", "tools") if name in values}
        if "stop_sequences" in values:
            chat["stop"] = values["stop_sequences"]
        if guide := values.get("output_config"):
            chat["response_format"] = guide
        if user := values.get("metadata", {}).get("user_id"):
            chat["user"] = user
        if conversation.last_role == "assistant":
            chat["continue_final_message"] = True  # the client has begun the answer
        return {**chat, **values.get("tool_choice", {})}, conversation.messages(self._parser.limits, "messages")


def messages_fields(limits: ServingLimits) -> dict[str, Rule]:
    """Name -> rule of each field but `messages` and `system`."""
    chat = chat_fields(limits)
    return {
        **{name: chat[name] for name in _SAME_FIELDS},
        "max_tokens": chat["max_tokens"],
        "stop_sequences": chat["stop"],
        "tools": ListOf(_ClientTool(), MAX_TOOLS, names_items=True),
        "tool_choice": _ToolChoice(),
        "metadata": Record({"user_id": Text(0, MAX_NAME_CHARS)}),
        "thinking": _Thinking(),
        "output_config": _OutputConfig(),
        "service_tier": OneOf(("auto", "standard_only")),
    }


def turns_schema() -> dict[str, Any]:
    """The field `messages` as JSON Schema, for the OpenAPI document."""
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user"]}, "content": {"type": "string", "minLength": 1}},
        "additionalProperties": False,
    }
    return {"type": "array", "items": message, "minItems": 1}


# --- the conversation -------------------------------------------------------------------------------------------------


def _read_turns(value: Any, conversation: Conversation) -> None:
    if value is None:
        raise InvalidRequest("messages is missing", param="messages")
    if not isinstance(value, list):
        raise invalid_value("messages", value, "an array of messages")
    for index, message in enumerate(value):
        param = f"messages[{index}]"
        turn = Record({"role": OneOf(ROLES), "content": AnyValue()}, ("role", "content")).check(message, param)
        _read_turn(turn["role"], turn["content"], f"{param}.content", conversation)
    if conversation.ends_with_calls:
        raise InvalidRequest(
            "the last message is the assistant's and has calls: their results are missing",
            param=f"messages[{len(value) - 1}]",
        )


def _read_turn(role: str, content: Any, param: str, conversation: Conversation) -> None:
    """Texts that follow each other are one message; results and calls keep their places."""
    if isinstance(content, str):
        conversation.say(role, content)
        return
    if not isinstance(content, list):
        raise invalid_value(param, content, "a string or an array of blocks")
    texts: list[str] = []
    for index, block in enumerate(content):
        place = f"{param}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(_text_block(block, place))
            continue
        if texts:
            conversation.say(role, "\n".join(texts))
            texts = []
        if kind == "tool_use" and role == "assistant":
            call = _checked_block(block, place, {"id": _NAME, "name": _NAME, "input": AnyObject()})
            conversation.call(call["id"], call["name"], call["input"], place)
        elif kind == "tool_result" and role == "user":
            result = _checked_block(block, place, {"tool_use_id": _NAME}, {"content": AnyValue(), "is_error": Flag()})
            conversation.result(result["tool_use_id"], _text_of(result.get("content", ""), f"{place}.content"))
        else:
            offered = "text and tool_use" if role == "assistant" else "text and tool_result"
            raise unsupported_parameter(place, f"a block of type {shown(kind)}; only {offered} are offered here")
    if texts:
        conversation.say(role, "\n".join(texts))


def _text_of(value: Any, param: str) -> str:
    """A text, or text blocks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid_value(param, value, "a string or an array of text blocks")
    return "\n".join(_text_block(block, f"{param}[{index}]") for index, block in enumerate(value))


def _text_block(block: Any, param: str) -> str:
    if not isinstance(block, dict):
        raise invalid_value(param, block, "a text block")
    if block.get("type") != "text":
        raise unsupported_parameter(param, f"a block of type {shown(block.get('type'))}; only text is accepted")
    text: str = _checked_block(block, param, {"text": Text()})["text"]
    return text


def _checked_block(
    block: Mapping[str, Any], param: str, required: Mapping[str, Rule], optional: Mapping[str, Rule] | None = None
) -> dict[str, Any]:
    """A block's fields; where it may be cached is taken and not needed."""
    marks: dict[str, Rule] = {"type": Text(), "cache_control": AnyObject()}
    return Record({**marks, **required, **(optional or {})}, tuple(required)).check(block, param)


_NAME = Text(1, MAX_NAME_CHARS)


# --- fields of a shape of their own -----------------------------------------------------------------------------------


class _ClientTool:
    """One entry of `tools`: a function of the client's, with `input_schema`."""

    def check(self, value: Any, param: str) -> Tool:
        if not isinstance(value, dict):
            raise invalid_value(param, value, "an object")
        if value.get("type", "custom") not in ("custom", None):
            raise unsupported_parameter(
                f"{param}.type", f"{shown(value['type'])}; only the client's own tools are offered"
            )
        function = {name: item for name, item in value.items() if name not in ("type", "cache_control")}
        return checked_function(function, param, "input_schema")

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": function_properties("input_schema"),
        }


class _ToolChoice:
    """`{"type": auto | any | tool | none}`: gives a chat's `tool_choice` and `parallel_tool_calls`."""

    _modes = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.REQUIRED, "none": ToolMode.NONE}  # noqa: RUF012

    def check(self, value: Any, param: str) -> dict[str, Any]:
        rules: dict[str, Rule] = {"type": OneOf(tuple(self._modes)), "disable_parallel_tool_use": Flag()}
        if isinstance(value, dict) and value.get("type") == "tool":
            rules["name"] = Text(1, 64)
        values = Record(rules, tuple(name for name in rules if name != "disable_parallel_tool_use")).check(value, param)
        return {
            "tool_choice": (self._modes[values["type"]], values.get("name", "")),
            "parallel_tool_calls": not values.get("disable_parallel_tool_use", False),
        }

    def schema(self) -> dict[str, Any]:
        properties = {"type": {"enum": ["auto", "none"]}, "disable_parallel_tool_use": {"type": "boolean"}}
        return {"type": "object", "required": ["type"], "properties": properties, "additionalProperties": False}


class _Thinking:
    """Only off: the served models have no thinking that could be told apart."""

    def check(self, value: Any, param: str) -> None:
        if not isinstance(value, dict) or value.get("type") != "disabled":
            raise unsupported_parameter(
                param, 'the served model has none to set; leave it out or give {"type": "disabled"}'
            )

    def schema(self) -> dict[str, Any]:
        return Record({"type": OneOf(("disabled",))}, ("type",)).schema()


class _OutputConfig:
    """`{"format": {"type": "json_schema", "schema": ...}}`: a chat's `response_format`."""

    def check(self, value: Any, param: str) -> Guide | None:
        values = Record({"format": AnyObject(), "effort": NotOffered("the served model has none to set")}).check(
            value, param
        )
        if "format" not in values:
            return None
        place = f"{param}.format"
        Record({"type": OneOf(("json_schema",)), "schema": AnyValue()}, ("type", "schema")).check(
            values["format"], place
        )
        return Guide("json_schema", check_schema(values["format"]["schema"], f"{place}.schema"), f"{place}.schema")

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": False, "properties": {}}
