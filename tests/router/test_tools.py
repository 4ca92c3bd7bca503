"""Tools over HTTP: what reaches the worker, how calls come back, streamed and whole, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tandem.v1 import common_pb2, worker_pb2

from cluster.chat_template import ChatTemplate
from cluster.errors import InvalidRequest
from cluster.sampling_params import SamplingParams
from engine.grammar_compiler import GrammarCompiler
from router.api_types import Tool, ToolMode, ToolUse
from router.tool_format import HERMES, LLAMA_3, ToolFormat, call_guide, messages_as_text, tool_format_of
from tests.router.byte_tokenizer import VOCAB_SIZE, byte_tokenizer, chatml
from tests.router.conftest import MODEL, RunningRouter
from tests.router.scripted_worker import Step

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 4,
    "tools": [WEATHER],
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def says(text: str, reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_STOP) -> Any:
    """A script: one byte a step."""

    def script(submit: worker_pb2.SubmitRequest) -> list[Step]:
        events = [worker_pb2.RequestEvent(request_id=submit.request_id, fence=submit.fence) for _ in text.encode()]
        events[-1].finish_reason = reason
        return [Step([byte], event) for byte, event in zip(text.encode(), events, strict=True)]

    return script


def tool(described: dict[str, Any], *, is_strict: bool = False) -> Tool:
    parameters = json.dumps(described["function"].get("parameters", {"type": "object", "properties": {}}))
    return Tool(described["function"]["name"], "", parameters, is_strict, "tools[0].function")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_calls_come_back_with_id_name_and_arguments(router: RunningRouter, is_streamed: bool) -> None:
    router.workers[-1].script = says(f"Sure.{CALL}\n{CALL}")
    async with router.client() as client:
        if is_streamed:
            stream = await client.chat.completions.create(**{**BODY, "stream": True})
            chunks = [chunk async for chunk in stream]
            deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
            content = "".join(delta.content or "" for delta in deltas)
            parts = [part for delta in deltas for part in delta.tool_calls or []]
            calls = [(part.id, part.function.name) for part in parts if part.id and part.function]
            arguments = ["", ""]
            for part in parts:
                arguments[part.index] += part.function.arguments or ""
            assert len(parts) > 4, "arguments came in one piece"
            reason = chunks[-1].choices[0].finish_reason
        else:
            answer = await client.chat.completions.create(**BODY)
            message = answer.choices[0].message
            content, reason = message.content or "", answer.choices[0].finish_reason
            calls = [(call.id, call.function.name) for call in message.tool_calls or []]
            arguments = [call.function.arguments for call in message.tool_calls or []]
    assert content == "Sure."
    assert [name for _, name in calls] == ["weather", "weather"]
    assert all(str(call_id).startswith("call_") for call_id, _ in calls)
    assert len({call_id for call_id, _ in calls}) == 2
    assert [json.loads(text) for text in arguments] == [{"city": "Rome"}] * 2
    assert reason == "tool_calls"


async def test_text_without_a_call_is_content_and_a_cut_call_says_length(router: RunningRouter) -> None:
    async with router.client() as client:
        router.workers[-1].script = says("It is <b>warm</b>.")
        answer = await client.chat.completions.create(**BODY)
        assert answer.choices[0].message.content == "It is <b>warm</b>."
        assert answer.choices[0].finish_reason == "stop"
        router.workers[-1].script = says(CALL[:-20], common_pb2.FINISH_REASON_LENGTH)
        cut = await client.chat.completions.create(**BODY)
        assert cut.choices[0].finish_reason == "length"
        assert cut.choices[0].message.tool_calls


async def test_s_b11_what_the_model_writes_is_never_run(router: RunningRouter, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    evil = f"__import__('os').system('touch {canary}')"
    router.workers[-1].script = says(f'<tool_call>{{"name": "weather", "arguments": {evil}}}</tool_call>')
    async with router.client() as client:
        answer = await client.chat.completions.create(**BODY)
    assert evil in str(answer.choices[0].message.content)
    assert not canary.exists()


async def test_forced_calls_are_a_grammar_for_the_worker(router: RunningRouter, http: httpx.AsyncClient) -> None:
    body = {**BODY, "tools": [WEATHER, CLOCK]}
    named = {"type": "function", "function": {"name": "clock"}}
    grammars, prompts = {}, {}
    for choice in ("auto", "none", "required", named):
        answer = await http.post("/v1/chat/completions", json={**body, "tool_choice": choice})
        assert answer.status_code == 200, answer.text
        submit = router.workers[-1].submits[-1]
        grammars[str(choice)] = submit.sampling.grammar
        prompts[str(choice)] = bytes(token for token in submit.token_ids if token < 256).decode()
    assert grammars["auto"] == grammars["none"] == ""
    assert "weather" in grammars["required"]
    assert "clock" in grammars["required"]
    assert "weather" not in grammars[str(named)]
    assert "weather" in prompts["auto"]
    assert "weather" not in prompts["none"], "tools that may not be called are not shown"


def parameters(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "a", "parameters": schema}}


def called(role: str, arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": arguments}}
    return [{"role": role, "content": "a", "tool_calls": [call]}]


BAD_SCHEMA = "invalid_json_schema"
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no list": ({"tools": {}}, "tools", "invalid_request"),
    "no function": ({"tools": [{**CLOCK, "type": "retrieval"}]}, "tools[0].type", "unsupported_parameter"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "invalid_request"),
    "bad name": (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_request"
    ),
    "twice": ({"tools": [CLOCK, CLOCK]}, "tools", "invalid_request"),
    "unknown field": ({"tools": [{**CLOCK, "x": 1}]}, "tools[0].x", "unknown_parameter"),
    "S-B20 type": ({"tools": [parameters({"type": "something"})]}, "tools[0].function.parameters", BAD_SCHEMA),
    "S-B20 pattern": (
        {"tools": [CLOCK, parameters({"properties": {"p": {"pattern": "("}}})]},
        "tools[1].function.parameters.properties.p", BAD_SCHEMA,
    ),
    "reference": ({"tools": [parameters({"$ref": "http://h/"})]}, "tools[0].function.parameters.$ref", BAD_SCHEMA),
    "too many": ({"tools": [CLOCK] * 129}, "tools", "invalid_request"),
    "choice": ({"tool_choice": "any"}, "tool_choice", "invalid_request"),
    "unknown choice": (
        {"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice", "invalid_request"
    ),
    "nothing to call": ({"tools": [], "tool_choice": "required"}, "tool_choice", "invalid_request"),
    "a format as well": ({"response_format": {"type": "json_object"}}, "response_format", "invalid_request"),
    "old functions": ({"functions": [{"name": "a"}]}, "functions", "unsupported_parameter"),
    "calls of a user": ({"messages": called("user", "{}")}, "messages[0].tool_calls", "invalid_request"),
    "arguments": (
        {"messages": called("assistant", "{")}, "messages[0].tool_calls[0].function.arguments", "invalid_request"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
async def test_s_b20_wrong_tools_are_named_and_reach_no_worker(
    name: str, router: RunningRouter, http: httpx.AsyncClient
) -> None:
    fields, param, code = WRONG[name]
    answer = await http.post("/v1/chat/completions", json={**BODY, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert not router.workers[-1].submits


async def test_a_described_schema_may_say_what_a_followed_one_may_not(http: httpx.AsyncClient) -> None:
    body = {**BODY, "tools": [parameters({"type": "object", "not": {"required": ["x"]}})]}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    forced = await http.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
    assert forced.status_code == 400
    assert forced.json()["error"]["param"] == "tools[0].function.parameters"


async def test_a_conversation_with_calls_and_results_goes_into_the_prompt(router: RunningRouter) -> None:
    async with router.client() as client:
        router.workers[-1].script = says(CALL)
        message = (await client.chat.completions.create(**BODY)).choices[0].message
        assert message.tool_calls
        router.workers[-1].script = says("Sunny.")
        messages: list[Any] = [
            *BODY["messages"],
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "22 C"},
        ]
        await client.chat.completions.create(**{**BODY, "messages": messages})
    prompt = bytes(token for token in router.workers[-1].submits[-1].token_ids if token < 256).decode()
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in prompt
    assert "<tool_response>\n22 C" in prompt


@pytest.mark.parametrize("form", [HERMES, LLAMA_3], ids=lambda form: form.name)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_the_grammar_of_forced_calls_takes_calls_and_nothing_else(form: ToolFormat, is_parallel: bool) -> None:
    guide = call_guide(ToolUse((tool(WEATHER), tool(CLOCK)), ToolMode.REQUIRED, is_parallel), form)
    assert guide is not None
    weather = form.head(tool(WEATHER)) + '{"city": "Rome"}' + form.tail
    clock = form.head(tool(CLOCK)) + "{}" + form.tail
    assert is_followed(guide.text, weather)
    assert is_followed(guide.text, clock)
    assert is_followed(guide.text, weather + form.between + clock) is is_parallel
    assert not is_followed(guide.text, "Sure. " + weather)
    assert not is_followed(guide.text, weather.replace("Rome", 'Rome", "x": "y'))


def test_strict_tools_are_followed_where_a_call_begins() -> None:
    strict = tool(WEATHER, is_strict=True)
    guide = call_guide(ToolUse((strict,), ToolMode.AUTO), HERMES)
    assert guide is not None
    call = HERMES.head(strict) + '{"city": "Rome"}' + HERMES.tail
    assert is_followed(guide.text, "Let me see. " + call)
    assert is_followed(guide.text, "No need.")
    assert not is_followed(guide.text, call.replace("city", "town"))
    assert call_guide(ToolUse((tool(WEATHER),), ToolMode.AUTO), HERMES) is None
    with pytest.raises(InvalidRequest, match=r"tools\[0\].function.strict"):
        call_guide(ToolUse((strict,), ToolMode.AUTO), LLAMA_3)


def is_followed(grammar: str, text: str) -> bool:
    """Whether the whole text is an answer under the grammar."""
    compiler = GrammarCompiler(byte_tokenizer, VOCAB_SIZE)
    try:
        future = compiler.compile(SamplingParams(max_tokens=1, grammar=grammar))
        assert future is not None
        matcher = future.result(60)._start.deep_copy()
        return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()
    finally:
        compiler.close()


def test_the_form_of_calls_shows_in_the_template() -> None:
    llama = '{{ messages }}{% if tools %}ipython {"name": x, "parameters": y}{% endif %}'
    assert tool_format_of(chatml()) is HERMES
    assert tool_format_of(ChatTemplate(llama, {})) is LLAMA_3
    assert tool_format_of(ChatTemplate("{{ messages }}{# tools <tool_call> parameters #}", {})) is HERMES
    assert tool_format_of(None) is HERMES


def test_a_template_that_writes_tools_gets_them_untouched() -> None:
    template = ChatTemplate("{{ messages }}{{ tools }}{# tool_calls #}", {})
    messages = [{"role": "user", "content": "a"}]
    assert messages_as_text(messages, [tool(CLOCK)], template) == messages
    plain = messages_as_text([{"role": "system", "content": "Be kind."}, *messages], [tool(CLOCK)], chatml())
    assert plain[0]["content"].startswith("Be kind.\n\nYou may call these functions")
