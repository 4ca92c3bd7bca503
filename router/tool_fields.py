"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat request, checked; and what the model may do with them.

Nothing here is ever called: a tool is a name, a description and a JSON schema, and its call is text of the model's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cluster.errors import InvalidRequest, shown
from router.api_types import Tool, ToolMode, ToolUse
from router.field_rules import Flag, ListOf, Record, Rule, Text, invalid_value, unsupported_parameter
from router.json_schema_rules import check_schema

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 64 * 1024
MAX_DESCRIPTION_CHARS = 8_192
NO_PARAMETERS = '{"type":"object","properties":{}}'
TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolRule:
    """One entry of `tools`."""

    def check(self, value: Any, param: str) -> Tool:
        Record({"type": FunctionType(), "function": AnyObject()}, required=("type", "function")).check(value, param)
        return checked_function(value["function"], f"{param}.function", "parameters")

    def schema(self) -> dict[str, Any]:
        function = {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": function_properties("parameters"),
        }
        return {
            "type": "object",
            "required": ["type", "function"],
            "additionalProperties": False,
            "properties": {"type": {"enum": ["function"]}, "function": function},
        }


class ToolChoice:
    """`"none"`, `"auto"`, `"required"`, or one function by name: gives the mode and that name."""

    def check(self, value: Any, param: str) -> tuple[ToolMode, str]:
        if isinstance(value, str):
            if value not in {mode.value for mode in ToolMode}:
                raise invalid_value(param, value, "none, auto, required or a function's name in an object")
            return ToolMode(value), ""
        Record({"type": FunctionType(), "function": AnyObject()}, required=("type", "function")).check(value, param)
        named = Record({"name": Text(1, 64)}, required=("name",)).check(value["function"], f"{param}.function")
        return ToolMode.REQUIRED, named["name"]

    def schema(self) -> dict[str, Any]:
        named = {
            "type": "object",
            "required": ["type", "function"],
            "additionalProperties": False,
            "properties": {
                "type": {"enum": ["function"]},
                "function": Record({"name": Text(1, 64)}, required=("name",)).schema(),
            },
        }
        return {"anyOf": [{"enum": [mode.value for mode in ToolMode]}, named]}


TOOLS = ListOf(ToolRule(), MAX_TOOLS, names_items=True)


def checked_function(function: Mapping[str, Any], place: str, schema_field: str) -> Tool:
    """A function's name, description and schema, whatever the API calls the schema. Raises `InvalidRequest`."""
    rules: dict[str, Rule] = {"name": Text(1, 64), "description": Text(0, MAX_DESCRIPTION_CHARS), "strict": Flag()}
    rest = {name: item for name, item in function.items() if name != schema_field}
    values = Record(rules, required=("name",)).check(rest, place)
    if _NAME.fullmatch(values["name"]) is None:
        raise invalid_value(f"{place}.name", values["name"], "letters, digits, `_`, `.` and `-`")
    parameters = function.get(schema_field)
    schema = NO_PARAMETERS if parameters is None else check_schema(parameters, f"{place}.{schema_field}")
    return Tool(values["name"], values.get("description", ""), schema, values.get("strict", False), place, schema_field)


def function_properties(schema_field: str) -> dict[str, Any]:
    """The same fields as JSON Schema."""
    return {
        "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
        "description": {"type": "string", "maxLength": MAX_DESCRIPTION_CHARS},
        "strict": {"type": "boolean"},
        schema_field: {"type": "object"},
    }


def tool_use(values: Mapping[str, Any]) -> ToolUse | None:
    """What the checked fields come to; None where no tool can be called. Raises `InvalidRequest`."""
    tools: tuple[Tool, ...] = values.get("tools", ())
    mode, name = values.get("tool_choice", (ToolMode.AUTO, ""))
    _check_names(tools)
    if not tools:
        if mode is ToolMode.REQUIRED:
            raise InvalidRequest("tool_choice asks for a call and tools is empty", param="tool_choice")
        return None
    if mode is ToolMode.NONE:
        return None
    is_parallel = values.get("parallel_tool_calls", True)
    if name:
        tools = tuple(tool for tool in tools if tool.name == name)
        if not tools:
            raise invalid_value("tool_choice", name, "the name of one of tools")
        is_parallel = False
    return ToolUse(tools, mode, is_parallel)


def _check_names(tools: tuple[Tool, ...]) -> None:
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"tools has two functions named {shown(twice)}", param="tools")
    size = sum(len(tool.parameters) + len(tool.description) for tool in tools)
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequest(
            f"tools has {size} bytes, at most {MAX_TOOLS_BYTES}", param="tools", code="invalid_json_schema"
        )


class FunctionType:
    """OpenAI's other kinds of tools run on its own servers."""

    def check(self, value: Any, param: str) -> str:
        if value != "function":
            raise unsupported_parameter(param, f"{shown(value)}; only functions are offered")
        return "function"

    def schema(self) -> dict[str, Any]:
        return {"enum": ["function"]}


class AnyObject:
    def check(self, value: Any, param: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise invalid_value(param, value, "an object")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "object"}
