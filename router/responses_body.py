"""The body of `POST /v1/responses` as a `GenerationRequest`: OpenAI's Responses API without a memory.

    instructions ─> a system message        input: a text, or messages, calls and their results, in order

The server keeps no answers: a conversation is sent whole each time, and what would need a store is refused by name.
Sampling fields mean what they mean in a chat, vLLM's extensions included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import InvalidRequest, shown
from router.api_types import ApiKind, GenerationRequest, Guide, Tool, ToolMode
from router.chat_messages import call_arguments
from router.conversation import Conversation
from router.field_rules import (
    Flag,
    ListOf,
    NotOffered,
    OneOf,
    OnlyValue,
    Record,
    Rule,
    Text,
    invalid_value,
    unknown_parameter,
    unsupported_parameter,
)
from router.guided_output import NamedSchema, ResponseFormat
from router.limits import MAX_NAME_CHARS, ServingLimits, accepted_hints, chat_fields, check_fields
from router.request_parser import NOTHING_AROUND, AroundBody, RequestParser
from router.tool_fields import MAX_TOOLS, AnyObject, FunctionType, checked_function, function_properties

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
MAX_METADATA = 16
MAX_METADATA_CHARS = 512
# Fields of a chat that this API has under the same name.
_SAME_FIELDS = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "user",
    "cache_salt", "speculation", "num_drafts", "priority", "parallel_tool_calls", "chat_template_kwargs",
    "include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens", "allowed_token_ids", "bad_words",
)  # fmt: skip
_NOTHING_KEPT = "this server keeps no answers; send the whole conversation as input"
# Beside what an item says: where it came from. Clients send items back as they got them.
_ITEM_MARKS = frozenset({"type", "id", "status", "phase"})


class ResponsesParser:
    """Checks bodies against one model's limits."""

    def __init__(self, parser: RequestParser) -> None:
        self._parser = parser
        self._fields = responses_fields(parser.limits)

    def parse(self, body: Mapping[str, Any], around: AroundBody = NOTHING_AROUND) -> GenerationRequest:
        """Raises `InvalidRequest`, `ContextLengthExceeded` or `ModelNotFound`."""
        values = check_fields(body, self._fields, frozenset({"input"}))
        self._parser.check_model(values)
        conversation = Conversation()
        if values.get("instructions"):
            conversation.say("system", values["instructions"])
        if body.get("input") is None:
            raise InvalidRequest("input is missing", param="input")
        _read_input(body["input"], conversation)
        messages = conversation.messages(self._parser.limits, "input")
        return self._parser.chat_request(ApiKind.RESPONSE, _chat_values(values), messages, around)


def responses_fields(limits: ServingLimits) -> dict[str, Rule]:
    """Name -> rule of each field but `input`."""
    chat = chat_fields(limits)
    return {
        **{name: chat[name] for name in _SAME_FIELDS},
        "instructions": Text(),
        "max_output_tokens": chat["max_tokens"],
        "tools": ListOf(_FunctionTool(), MAX_TOOLS, names_items=True),
        "tool_choice": _ToolChoice(),
        "text": _TextOptions(),
        "metadata": _Metadata(),
        "store": OnlyValue(False, _NOTHING_KEPT),
        "previous_response_id": NotOffered(_NOTHING_KEPT),
        "conversation": NotOffered(_NOTHING_KEPT),
        "prompt": NotOffered("prompt templates are kept nowhere; send instructions and input"),
        "background": OnlyValue(False, "an answer is made while its client waits"),
        "truncation": OnlyValue("disabled", "what does not fit into the context is refused, not cut"),
        "reasoning": Record({"effort": OnlyValue("none", "the served model has no reasoning to set")}),
        # What it would include is not there; agents ask for it of every model.
        "include": ListOf(OneOf(("reasoning.encrypted_content",)), 8),
        "stream_options": Record({"include_obfuscation": Flag()}),
        **accepted_hints(),
    }


def input_schema() -> dict[str, Any]:
    """The field `input` as JSON Schema, for the OpenAPI document."""
    text = {"type": "string", "minLength": 1}
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"type": {"enum": ["message"]}, "role": {"enum": list(ROLES)}, "content": text},
        "additionalProperties": False,
    }
    return {"anyOf": [text, {"type": "array", "items": message, "minItems": 1}]}


def _chat_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The checked fields under the names of a chat's."""
    chat = {name: values[name] for name in (*_SAME_FIELDS, "tools", "tool_choice") if name in values}
    if "max_output_tokens" in values:
        chat["max_tokens"] = values["max_output_tokens"]
    guide = values.get("text")
    return chat if guide is None else {**chat, "response_format": guide}


# --- the input --------------------------------------------------------------------------------------------------------


def _read_input(value: Any, conversation: Conversation) -> None:
    if isinstance(value, str):
        conversation.say("user", value)
        return
    if not isinstance(value, list):
        raise invalid_value("input", value, "a string or an array of items")
    if not value:
        raise InvalidRequest("input is empty, must have at least one item", param="input")
    for index, item in enumerate(value):
        _read_item(item, f"input[{index}]", conversation)


def _read_item(item: Any, param: str, conversation: Conversation) -> None:
    if not isinstance(item, dict):
        raise invalid_value(param, item, "an object")
    kind = item.get("type", "message")
    fields = {name: value for name, value in item.items() if name not in _ITEM_MARKS and value is not None}
    if kind == "message":
        values = Record({"role": OneOf(ROLES), "content": _Content()}, ("role", "content")).check(fields, param)
        conversation.say(values["role"], values["content"])
    elif kind == "function_call":
        name = Text(1, MAX_NAME_CHARS)
        rules: dict[str, Rule] = {"call_id": name, "name": name, "arguments": Text()}
        values = Record(rules, tuple(rules)).check(fields, param)
        arguments = call_arguments(values["arguments"], f"{param}.arguments")
        conversation.call(values["call_id"], values["name"], arguments, param)
    elif kind == "function_call_output":
        rules = {"call_id": Text(1, MAX_NAME_CHARS), "output": _Content()}
        values = Record(rules, tuple(rules)).check(fields, param)
        conversation.result(values["call_id"], values["output"])
    elif kind == "item_reference":
        raise unsupported_parameter(f"{param}.type", f"item_reference; {_NOTHING_KEPT}")
    else:
        offered = "only message, function_call and function_call_output are offered"
        raise unsupported_parameter(f"{param}.type", f"{shown(kind)}; {offered}")


class _Content:
    """A text, or parts that are texts."""

    def check(self, value: Any, param: str) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise invalid_value(param, value, "a string or an array of text parts")
        return "\n".join(self._part(part, f"{param}[{index}]") for index, part in enumerate(value))

    def schema(self) -> dict[str, Any]:
        return {"type": "string"}

    def _part(self, part: Any, param: str) -> str:
        if not isinstance(part, dict):
            raise invalid_value(param, part, "a content part")
        if part.get("type") not in TEXT_PARTS:
            raise unsupported_parameter(param, f"content of type {shown(part.get('type'))}; only text is accepted")
        for name, value in part.items():
            # An answer's own text comes back with these; empty they say nothing.
            if name not in ("type", "text") and not (name in ("annotations", "logprobs") and not value):
                raise unknown_parameter(f"{param}.{name}")
        return Text().check(part.get("text"), f"{param}.text")


# --- fields of a shape of their own -----------------------------------------------------------------------------------


class _FunctionTool:
    """One entry of `tools`: a function without the object around it that a chat has."""

    def check(self, value: Any, param: str) -> Tool:
        if not isinstance(value, dict):
            raise invalid_value(param, value, "an object")
        FunctionType().check(value.get("type"), f"{param}.type")
        return checked_function({name: item for name, item in value.items() if name != "type"}, param, "parameters")

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "required": ["type", "name"],
            "additionalProperties": False,
            "properties": {"type": {"enum": ["function"]}, **function_properties("parameters")},
        }


class _ToolChoice:
    """A mode's name, or one function by name: gives the mode and that name."""

    def check(self, value: Any, param: str) -> tuple[ToolMode, str]:
        if isinstance(value, str):
            if value not in {mode.value for mode in ToolMode}:
                raise invalid_value(param, value, "none, auto, required or a function's name in an object")
            return ToolMode(value), ""
        named = Record({"type": FunctionType(), "name": Text(1, 64)}, required=("type", "name")).check(value, param)
        return ToolMode.REQUIRED, named["name"]

    def schema(self) -> dict[str, Any]:
        named = {
            "type": "object",
            "required": ["type", "name"],
            "additionalProperties": False,
            "properties": {"type": {"enum": ["function"]}, "name": Text(1, 64).schema()},
        }
        return {"anyOf": [{"enum": [mode.value for mode in ToolMode]}, named]}


class _TextOptions:
    """`{"format": ...}`: a chat's `response_format`, with a schema's fields beside its type."""

    def check(self, value: Any, param: str) -> Guide | None:
        verbosity = OnlyValue("medium", "the model decides")
        values = Record({"format": AnyObject(), "verbosity": verbosity}).check(value, param)
        chosen = values.get("format", {"type": "text"})
        if chosen.get("type") != "json_schema":
            return ResponseFormat().check(chosen, f"{param}.format")
        described = {name: item for name, item in chosen.items() if name != "type" and item is not None}
        return NamedSchema().check(described, f"{param}.format")

    def schema(self) -> dict[str, Any]:
        plain = {
            "type": "object",
            "required": ["type"],
            "additionalProperties": False,
            "properties": {"type": {"enum": ["text", "json_object"]}},
        }
        return {"type": "object", "additionalProperties": False, "properties": {"format": plain}}


class _Metadata:
    """The client's own labels: they come back with the answer."""

    def check(self, value: Any, param: str) -> dict[str, str]:
        if not isinstance(value, dict) or len(value) > MAX_METADATA:
            raise invalid_value(param, value, f"an object of at most {MAX_METADATA} labels")
        label = Text(0, MAX_METADATA_CHARS)
        return {name: label.check(item, f"{param}.{name[:64]}") for name, item in value.items()}

    def schema(self) -> dict[str, Any]:
        label = Text(0, MAX_METADATA_CHARS).schema()
        return {"type": "object", "additionalProperties": label, "maxProperties": MAX_METADATA}
