"""Tools over gRPC: the same prompts, grammars, calls and refusals as over HTTP, by the names that protobuf has."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio
from tandem.v1 import common_pb2, inference_pb2, inference_pb2_grpc

from tests.router.conftest import RunningRouter
from tests.router.test_tools import BODY, CALL, CITY, CLOCK, WEATHER, says

TOOL = inference_pb2.Tool(name="weather", parameters=json.dumps(CITY))
OTHER = inference_pb2.Tool(name="clock")
HI = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")])


@pytest_asyncio.fixture(loop_scope="session")
async def stub(router: RunningRouter) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def _choices(stub: Any, **fields: Any) -> list[inference_pb2.GenerateChoice]:
    request = inference_pb2.GenerateRequest(**{"chat": HI, "max_tokens": 4, "tools": [TOOL], **fields})
    return [choice async for response in stub.Generate(request, timeout=60) for choice in response.choices]


async def test_calls_are_streamed_with_id_name_and_arguments(router: RunningRouter, stub: Any) -> None:
    text = f"Sure.{CALL}\n{CALL}"
    router.workers[-1].script = says(text)
    choices = await _choices(stub)
    parts = [call for choice in choices for call in choice.tool_calls]
    assert "".join(choice.text for choice in choices) == "Sure."
    assert bytes(token for choice in choices for token in choice.token_ids).decode() == text
    begun = [(call.index, call.name) for call in parts if call.id]
    assert begun == [(0, "weather"), (1, "weather")]
    assert len({call.id for call in parts if call.id}) == 2
    arguments = ["".join(call.arguments for call in parts if call.index == index) for index in range(2)]
    assert [json.loads(one) for one in arguments] == [{"city": "Rome"}] * 2
    assert len([call for call in parts if call.arguments]) > 4, "arguments came in one piece"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [common_pb2.FINISH_REASON_TOOL_CALLS]


async def test_text_without_a_call_is_content_and_a_cut_call_says_length(router: RunningRouter, stub: Any) -> None:
    router.workers[-1].script = says("It is <b>warm</b>.")
    plain = await _choices(stub)
    assert "".join(choice.text for choice in plain) == "It is <b>warm</b>."
    assert plain[-1].finish_reason == common_pb2.FINISH_REASON_STOP
    router.workers[-1].script = says(CALL[:-20], common_pb2.FINISH_REASON_LENGTH)
    cut = await _choices(stub)
    assert cut[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert any(choice.tool_calls for choice in cut)


@pytest.mark.parametrize(
    ("over_grpc", "over_http"),
    [
        ({}, {}),
        ({"tool_choice": inference_pb2.ToolChoice(mode="none")}, {"tool_choice": "none"}),
        ({"tool_choice": inference_pb2.ToolChoice(mode="required")}, {"tool_choice": "required"}),
        (
            {"tool_choice": inference_pb2.ToolChoice(mode="required"), "parallel_tool_calls": False},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tool_choice": inference_pb2.ToolChoice(function="clock")},
            {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
        ),
    ],
)
async def test_a_worker_gets_the_same_prompt_and_grammar_as_over_http(
    router: RunningRouter, stub: Any, http: httpx.AsyncClient, over_grpc: dict[str, Any], over_http: dict[str, Any]
) -> None:
    await _choices(stub, tools=[TOOL, OTHER], **over_grpc)
    tools = [{**tool, "function": {**tool["function"], "strict": False}} for tool in (WEATHER, CLOCK)]
    answer = await http.post("/v1/chat/completions", json={**BODY, "tools": tools, **over_http})
    assert answer.status_code == 200, answer.text
    first, second = router.workers[-1].submits
    assert list(first.token_ids) == list(second.token_ids)
    assert first.sampling.grammar == second.sampling.grammar
    assert bool(first.sampling.grammar) is ("required" in str(over_http) or "clock" in str(over_http))


async def test_calls_and_results_of_earlier_turns_go_into_the_prompt(router: RunningRouter, stub: Any) -> None:
    call = inference_pb2.ToolCall(id="call_1", name="weather", arguments='{"city": "Rome"}')
    messages = [
        *HI.messages,
        inference_pb2.ChatMessage(role="assistant", tool_calls=[call]),
        inference_pb2.ChatMessage(role="tool", tool_call_id="call_1", content="22 C"),
    ]
    await _choices(stub, chat=inference_pb2.ChatPrompt(messages=messages))
    prompt = bytes(token for token in router.workers[-1].submits[-1].token_ids if token < 256).decode()
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in prompt
    assert "<tool_response>\n22 C" in prompt


def _called(role: str, arguments: str) -> inference_pb2.ChatPrompt:
    call = inference_pb2.ToolCall(id="c", name="a", arguments=arguments)
    return inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role=role, content="a", tool_calls=[call])])


def _schema(text: str) -> inference_pb2.Tool:
    return inference_pb2.Tool(name="a", parameters=text)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no name": ({"tools": [inference_pb2.Tool()]}, "tools[0].name"),
    "bad name": ({"tools": [inference_pb2.Tool(name="a b")]}, "tools[0].name"),
    "twice": ({"tools": [OTHER, OTHER]}, "tools has two functions"),
    "too many": ({"tools": [OTHER] * 129}, "tools has 129 entries"),
    "S-B20 no JSON": ({"tools": [OTHER, _schema("{")]}, "tools[1].parameters: the schema is not JSON"),
    "S-B20 no object": ({"tools": [_schema("[]")]}, "tools[0].parameters: the schema must be a JSON object"),
    "S-B20 deep": ({"tools": [_schema('{"a":' * 2000 + "1" + "}" * 2000)]}, "schema is nested"),
    "S-B20 type": ({"tools": [_schema('{"type": "something"}')]}, "tools[0].parameters"),
    "S-B20 pattern": ({"tools": [_schema('{"properties": {"p": {"pattern": "("}}}')]}, "parameters.properties.p"),
    "reference": ({"tools": [_schema('{"$ref": "http://h/"}')]}, "tools[0].parameters.$ref"),
    "choice": ({"tool_choice": inference_pb2.ToolChoice(mode="any")}, "tool_choice"),
    "unknown choice": ({"tool_choice": inference_pb2.ToolChoice(function="nobody")}, "tool_choice"),
    "nothing to call": ({"tools": [], "tool_choice": inference_pb2.ToolChoice(mode="required")}, "tool_choice"),
    "a schema as well": ({"json_schema": '{"type": "object"}'}, "json_schema and tools"),
    "no chat": ({"text": "a"}, "tools"),
    "calls of a user": ({"chat": _called("user", "{}")}, "messages[0].tool_calls"),
    "arguments": ({"chat": _called("assistant", "{")}, "messages[0].tool_calls[0].arguments"),
    "forced and not followed": (
        {
            "tools": [_schema('{"type": "object", "not": {"required": ["x"]}}')],
            "tool_choice": inference_pb2.ToolChoice(mode="required"),
        },
        "tools[0].parameters",
    ),
}


async def test_s_b20_wrong_tools_are_named_over_grpc_too(router: RunningRouter, stub: Any) -> None:
    for name, (fields, named) in WRONG.items():
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _choices(stub, **({**fields, "chat": None} if "text" in fields else fields))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
        assert named in str(refused.value.details()), (name, refused.value.details())
    assert not router.workers[-1].submits
