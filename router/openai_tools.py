"""Tool calls of an answer in OpenAI's shape: in deltas as they are written, and in whole messages."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from router.api_types import ToolUse
from router.tool_format import ToolFormat
from router.tool_parser import CallDelta, ToolCallParser, ToolDelta

TOOL_CALLS = "tool_calls"  # the finish reason of an answer with calls


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolCallReader:
    """One answer's choices, each read by a parser of its own."""

    def __init__(self, use: ToolUse, form: ToolFormat, make_call_id: Callable[[], str] = new_call_id) -> None:
        self._names = [tool.name for tool in use.tools]
        self._form = form
        self._make_call_id = make_call_id
        self._parsers: dict[int, ToolCallParser] = {}

    def read(self, choice: int, text: str, *, is_last: bool) -> ToolDelta:
        """What the next piece of a choice's text came to."""
        parser = self._parsers.get(choice)
        if parser is None:
            parser = self._parsers[choice] = ToolCallParser(self._form, self._names, self._make_call_id)
        delta = parser.push(text)
        if not is_last:
            return delta
        end = parser.finish()
        return ToolDelta(delta.content + end.content, (*delta.calls, *end.calls))

    def finish_reason(self, choice: int, reason: str | None) -> str | None:
        """An answer that called something ended for that; one that was cut off was cut off."""
        parser = self._parsers.get(choice)
        return TOOL_CALLS if reason == "stop" and parser is not None and parser.num_calls else reason


def calls_delta(calls: Iterable[CallDelta]) -> list[dict[str, Any]]:
    """The entries of a chunk's `tool_calls`: one for each call, id and name with its first part only."""
    entries: dict[int, dict[str, Any]] = {}
    for call in calls:
        entry = entries.setdefault(call.index, {"index": call.index, "function": {"arguments": ""}})
        if call.name:
            entry.update(id=call.call_id, type="function")
            entry["function"] = {"name": call.name, "arguments": ""}
        entry["function"]["arguments"] += call.arguments
    return list(entries.values())


def whole_calls(calls: Iterable[CallDelta]) -> list[dict[str, Any]]:
    """The `tool_calls` of a message."""
    return [{name: value for name, value in entry.items() if name != "index"} for entry in calls_delta(calls)]


def delta_json(delta: ToolDelta, *, with_role: bool) -> str:
    """A chunk's delta."""
    fields: dict[str, Any] = {"role": "assistant"} if with_role else {}
    if delta.content or not delta.calls:
        fields["content"] = delta.content
    if delta.calls:
        fields[TOOL_CALLS] = calls_delta(delta.calls)
    return json.dumps(fields, separators=(",", ":"))
