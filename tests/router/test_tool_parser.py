"""Tool calls out of text, cut anywhere: content, names and arguments come out the same."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from router.tool_format import HERMES, LLAMA_3, ToolFormat
from router.tool_parser import ToolCallParser

NAMES = ("get_weather", "add")
WEATHER = '{"city": "Pa}ris \\"q\\" {", "days": [1, {"a": 2}]}'
HERMES_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>'
ADD_CALL = '<tool_call>{"name":"add","arguments":{}}</tool_call>'
EVIL = "__import__('os').system('touch /tmp/canary')"

# text -> (content, [(name, arguments)])
TEXTS: dict[str, tuple[ToolFormat, str, str, list[tuple[str, str]]]] = {
    "one call": (HERMES, HERMES_CALL, "", [("get_weather", WEATHER)]),
    "two calls": (HERMES, f"{HERMES_CALL}\n{ADD_CALL}\n", "", [("get_weather", WEATHER), ("add", "{}")]),
    "content before": (HERMES, f"Let me see.\n{ADD_CALL}", "Let me see.\n", [("add", "{}")]),
    "content after": (HERMES, f"{ADD_CALL}\nDone <b>.", "\nDone <b>.", [("add", "{}")]),
    "no call": (HERMES, "1 < 2 and <tool is no call", "1 < 2 and <tool is no call", []),
    "other order": (
        HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]
    ),
    "arguments as a string": (
        HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]
    ),
    "unknown function": (
        HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', []
    ),
    "code": (HERMES, f"<tool_call>{EVIL}</tool_call>", f"<tool_call>{EVIL}</tool_call>", []),
    "never closed": (HERMES, '<tool_call>{"name": "add"', '<tool_call>{"name": "add"', []),
    "cut off": (HERMES, HERMES_CALL[:70], "", [("get_weather", WEATHER[: 70 - HERMES_CALL.index(WEATHER)])]),
    "no closing mark": (HERMES, ADD_CALL.removesuffix("</tool_call>") + "\nand so on", "and so on", [("add", "{}")]),
    "llama": (LLAMA_3, f'{{"name": "get_weather", "parameters": {WEATHER}}}', "", [("get_weather", WEATHER)]),
    "llama with a type": (
        LLAMA_3, ' {"type": "function", "name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]
    ),
    "llama, two": (
        LLAMA_3, '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {"b": 2}}', "",
        [("add", "{}"), ("add", '{"b": 2}')],
    ),
    "llama, text": (LLAMA_3, "It is {warm}.", "It is {warm}.", []),
    "llama, other JSON": (LLAMA_3, '{"answer": 4}', '{"answer": 4}', []),
    "nothing": (HERMES, "", "", []),
}  # fmt: skip


def read(form: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    ids = itertools.count()
    parser = ToolCallParser(form, NAMES, lambda: f"call_{next(ids)}")
    content, names, arguments = "", [], []
    for delta in (*(parser.push(piece) for piece in pieces), parser.finish()):
        content += delta.content
        for call in delta.calls:
            if call.name:
                assert call.call_id == f"call_{call.index}"
                names.append(call.name)
                arguments.append("")
            arguments[call.index] += call.arguments
    assert parser.num_calls == len(names)
    return content, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("name", TEXTS)
def test_calls_and_content_come_out_however_the_text_is_cut(name: str) -> None:
    form, text, content, calls = TEXTS[name]
    expected = (content, calls)
    assert read(form, [text]) == expected
    assert read(form, list(text)) == expected
    for cut in range(len(text)):
        assert read(form, [text[:cut], text[cut:]]) == expected, text[:cut]
    for _, arguments in calls:
        if name != "cut off":
            assert isinstance(json.loads(arguments), dict)


def test_arguments_are_given_as_they_come() -> None:
    parser = ToolCallParser(HERMES, NAMES, lambda: "id")
    head, _, rest = HERMES_CALL.partition(WEATHER)
    assert parser.push(head).calls == ()  # the value must be an object: only its first brace says so
    begun = parser.push(WEATHER[:5])
    assert [call.name for call in begun.calls if call.name] == ["get_weather"]
    assert "".join(call.arguments for call in begun.calls) == WEATHER[:5]
    assert parser.push(WEATHER[5:9]).calls[0].arguments == WEATHER[5:9]
    assert "".join(call.arguments for call in parser.push(WEATHER[9:] + rest).calls) == WEATHER[9:]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" + " " * 50_000,
        "<tool_call>{" + '"name": [' * 10_000,
        "<tool_call>" * 5_000,
        "<" * 50_000,
        "<tool_call>" + "[" * 50_000 + "]" * 50_000,
        '<tool_call>{"name": "' + "a" * 50_000,
    ],
    ids=["spaces", "names", "marks", "angles", "brackets", "long name"],
)
def test_s_b23_hostile_text_takes_linear_time(text: str) -> None:
    started = time.process_time()
    content, calls = read(HERMES, [text[index : index + 50] for index in range(0, len(text), 50)])
    assert calls == []
    assert content == text
    assert time.process_time() - started < 20
