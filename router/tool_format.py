"""How a model family writes tool calls: as text in its prompt, as a grammar for calls that must come, and its marks.

    Hermes, Qwen 2.5 and 3   <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>
    Llama 3                  {"name": "f", "parameters": {...}}, several with `;` between

Which one a model follows shows in its chat template. A template that knows no tools gets them in a system message, and
past calls and results as text, in Hermes' form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llguidance

from cluster.chat_template import ChatTemplate
from cluster.guided_grammar import JSON_WHITE_SPACE
from router.api_types import Guide, Tool, ToolMode, ToolUse
from router.field_rules import unsupported_parameter
from router.guided_output import lark_literal

# Calls in one answer that must consist of calls.
MAX_CALLS = 16
_INSTRUCTIONS = """You may call these functions:
<tools>
{tools}
</tools>
To call one, answer:
<tool_call>
{{"name": <its name>, "arguments": <a JSON object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`opening` and `closing` stand around a call; empty for calls that are the whole text."""

    name: str
    opening: str
    closing: str
    between: str  # two calls
    arguments_key: str

    def head(self, tool: Tool) -> str:
        """What comes before a call's arguments."""
        return f'{self.opening}{{"name": {json.dumps(tool.name)}, "{self.arguments_key}": '

    @property
    def tail(self) -> str:
        return f"}}{self.closing}"


HERMES = ToolFormat("hermes", "<tool_call>\n", "\n</tool_call>", "\n", "arguments")
LLAMA_3 = ToolFormat("llama3", "", "", "; ", "parameters")


def tool_format_of(template: ChatTemplate | None) -> ToolFormat:
    """The form that the model was trained on, as far as its template shows it."""
    if template is not None and template.mentions("parameters") and not template.mentions("<tool_call>"):
        return LLAMA_3 if template.mentions("ipython") or template.mentions("python_tag") else HERMES
    return HERMES


def call_guide(use: ToolUse, form: ToolFormat) -> Guide | None:
    """What makes calls follow their schemas, and come at all; None where the model is free.

    Raises `InvalidRequest` for a strict tool that need not be called, in a form without a mark where a call begins.
    """
    if use.mode is not ToolMode.REQUIRED:
        strict = next((tool for tool in use.tools if tool.is_strict), None)
        if strict is None:
            return None
        if not form.opening:
            raise unsupported_parameter(
                f"{strict.param}.strict",
                "this model's calls begin without a mark; set tool_choice to required",
            )
        return Guide("grammar", _calls_within_text(use, form), "tools")
    calls = "call" if not use.is_parallel else f"call ({lark_literal(form.between)} call)~0..{MAX_CALLS - 1}"
    rules = [f"start: {calls}", "call: " + " | ".join(f"call_{index}" for index in range(len(use.tools)))]
    for index, tool in enumerate(use.tools):
        rules.append(f"call_{index}: {lark_literal(form.head(tool))} arguments_{index} {lark_literal(form.tail)}")
        rules.append(f"arguments_{index}: %json {_loose_json(tool.parameters)}")
    return Guide("grammar", "\n".join(rules), "tools")


def messages_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], template: ChatTemplate
) -> list[Mapping[str, Any]]:
    """The conversation for a template that does not write tools, calls or results by itself."""
    written = list(messages)
    if not template.mentions("tool_calls"):
        written = [_as_text(message) for message in written]
    if tools and not template.mentions("tools"):
        described = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool.to_template()["function"]) for tool in tools))
        if written and written[0]["role"] == "system":
            first = {**written[0], "content": f"{written[0]['content']}\n\n{described}"}
            return [first, *written[1:]]
        return [{"role": "system", "content": described}, *written]
    return written


def _calls_within_text(use: ToolUse, form: ToolFormat) -> str:
    """Any text, and calls that follow their schemas from the mark on."""
    tags = [
        llguidance.StructTag(
            trigger=form.opening.strip(), begin=form.head(tool), grammar=_loose_json(tool.parameters), end=form.tail
        )
        for tool in use.tools
    ]
    return llguidance.StructTag.to_grammar(tags, assume_special=False)


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [{"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in calls]
    texts = [f"{HERMES.opening}{json.dumps(function)}{HERMES.closing}" for function in functions]
    return {"role": "assistant", "content": "\n".join([text for text in (message["content"], *texts) if text])}


def _loose_json(parameters: str) -> str:
    """The schema with white space allowed between JSON's tokens."""
    options = {"whitespace_flexible": True, "whitespace_pattern": JSON_WHITE_SPACE}
    return json.dumps({**json.loads(parameters), "x-guidance": options})
