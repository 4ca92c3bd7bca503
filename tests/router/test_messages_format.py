"""Anthropic's Messages API as its official client sees it: whole, streamed, with tools, counted, refused, broken."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from tandem.v1 import common_pb2, worker_pb2

from router.tenants import ApiKeys
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.scripted_worker import expected_token
from tests.router.test_responses_format import breaks_once_seen, prompt_of
from tests.router.test_tools import CALL, CITY, says

WEATHER: Any = {"name": "weather", "input_schema": CITY}
BODY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 6,
    "messages": [{"role": "user", "content": "hi"}],
}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # the API's own fields no longer have it


def client_of(router: RunningRouter, api_key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=router.url, api_key=api_key, max_retries=0)


async def test_whole_and_streamed_answers_are_the_same(router: RunningRouter) -> None:
    async with client_of(router) as client:
        whole = await client.messages.create(**BODY, **GREEDY)
        async with client.messages.stream(**BODY, **GREEDY) as stream:
            streamed = await stream.get_final_message()
    submit = router.workers[-1].submits[0]
    text = "".join(chr(expected_token(submit, position)) for position in range(6))
    assert [block.type == "text" and block.text for block in whole.content] == [text]
    assert [block.type == "text" and block.text for block in streamed.content] == [text]
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    for usage in (whole.usage, streamed.usage):
        num_input_tokens = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert (num_input_tokens, usage.output_tokens) == (len(submit.token_ids), 6)


async def test_cached_tokens_are_counted_apart(router: RunningRouter) -> None:
    def script(submit: worker_pb2.SubmitRequest) -> list[Any]:
        steps = says("ok")(submit)
        steps[0].event.cached_tokens = 3
        return list(steps)

    router.workers[-1].script = script
    async with client_of(router) as client:
        answer = await client.messages.create(**BODY)
    num_prompt_tokens = len(router.workers[-1].submits[0].token_ids)
    assert answer.usage.cache_read_input_tokens == 3
    assert answer.usage.input_tokens == num_prompt_tokens - 3


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_calls_are_blocks_with_their_input(router: RunningRouter, is_streamed: bool) -> None:
    router.workers[-1].script = says(f"Sure.{CALL}\n{CALL}")
    body = {**BODY, "tools": [WEATHER]}
    async with client_of(router) as client:
        if is_streamed:
            async with client.messages.stream(**body) as stream:
                answer: Any = await stream.get_final_message()
        else:
            answer = await client.messages.create(**body)
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
    assert [(block.name, block.input) for block in answer.content[1:]] == [("weather", {"city": "Rome"})] * 2
    assert all(block.id.startswith("toolu_") for block in answer.content[1:])
    assert answer.stop_reason == "tool_use"


async def test_a_cut_call_keeps_its_text(router: RunningRouter) -> None:
    router.workers[-1].script = says(CALL[:-20], common_pb2.FINISH_REASON_LENGTH)
    async with client_of(router) as client:
        answer = await client.messages.create(**BODY, tools=[WEATHER])
    block = answer.content[0]
    assert block.type == "tool_use"
    assert set(block.input) == {"INVALID_JSON"}
    assert answer.stop_reason == "max_tokens"


async def test_a_stop_sequence_is_named(router: RunningRouter) -> None:
    router.workers[-1].script = says("one END two")
    async with client_of(router) as client:
        answer = await client.messages.create(**BODY, stop_sequences=["END"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "one "


async def test_a_conversation_with_tools_reaches_the_model_in_order(router: RunningRouter) -> None:
    router.workers[-1].script = says("It is warm.")
    cached = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "warm"}]}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", **cached}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "In short."}]},
    ]
    system = [{"type": "text", "text": "Be brief.", **cached}]
    body = {**BODY, "messages": turns, "system": system, "tools": [{"name": "weather", **cached}]}
    async with client_of(router) as client:
        await client.messages.create(**body)
        del body["max_tokens"]
        counted = await client.messages.count_tokens(**body)
    written = prompt_of(router)
    parts = ("Be brief.", "Weather?", "Let me see.", '"city": "Rome"', "warm", "In short.")
    places = [written.index(part) for part in parts]
    assert places == sorted(places)
    assert counted.input_tokens == len(router.workers[-1].submits[-1].token_ids)


async def test_a_schema_constrains_the_answer(router: RunningRouter) -> None:
    async with client_of(router) as client:
        await client.messages.create(**BODY, output_config={"format": {"type": "json_schema", "schema": CITY}})
    assert "city" in router.workers[-1].submits[-1].sampling.json_schema


async def test_a_forced_call_is_a_grammar(router: RunningRouter) -> None:
    choices: list[tuple[Any, bool]] = [
        ({"type": "auto"}, False), ({"type": "any"}, True), ({"type": "tool", "name": "weather"}, True),
    ]  # fmt: skip
    async with client_of(router) as client:
        for choice, is_forced in choices:
            await client.messages.create(**BODY, tools=[WEATHER], tool_choice=choice)
            assert bool(router.workers[-1].submits[-1].sampling.grammar) == is_forced, choice


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "max_tokens": ({"max_tokens": None}, "max_tokens"),
    "no messages": ({"messages": None}, "messages"),
    "empty": ({"messages": []}, "messages"),
    "role": ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    "nothing begun": ({"messages": [*BODY["messages"], {"role": "assistant", "content": ""}]}, "messages[1]"),
    "call of a user": (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
        "messages[0].content[0]",
    ),
    "thinking": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    "hosted tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    "tool's schema": ({"tools": [{**WEATHER, "input_schema": {"type": "x"}}]}, "tools[0].input_schema"),
    "effort": ({"output_config": {"effort": "high"}}, "output_config.effort"),
    "schema": ({"output_config": {"format": {"type": "json_schema", "schema": []}}}, "output_config.format.schema"),
    "unknown field": ({"max_completion_tokens": 4}, "max_completion_tokens"),
    "choice": ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "tool_choice.name"),
}  # fmt: skip


async def test_whatever_is_wrong_is_named(router: RunningRouter, http: httpx.AsyncClient) -> None:
    for case, (changed, param) in WRONG.items():
        answer = await http.post("/v1/messages", json={**BODY, **changed})
        body = answer.json()
        assert (answer.status_code, body["type"]) == (400, "error"), (case, body)
        assert (body["error"]["type"], body["error"]["param"]) == ("invalid_request_error", param), (case, body)
    assert router.workers[-1].submits == []


async def test_errors_have_the_types_that_its_clients_know(start_router: StartRouter) -> None:
    empty = await start_router()
    async with client_of(empty) as client:
        with pytest.raises(anthropic.NotFoundError, match="no model"):
            await client.messages.create(**{**BODY, "model": "other"})
        with pytest.raises(anthropic.APIStatusError) as refused:
            await client.messages.create(**BODY)
    assert refused.value.status_code == 503
    assert refused.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


async def test_its_clients_key_is_a_key(start_router: StartRouter) -> None:
    import hashlib

    from cluster.identity import Tenant

    keys = ApiKeys({hashlib.sha256(b"right").digest(): Tenant("someone")})
    router = await start_router(keys=keys)
    await router.add_worker(router.new_worker("decode-0", "aggregated"))
    async with client_of(router, "right") as client:
        assert (await client.messages.create(**BODY)).role == "assistant"
    async with client_of(router, "wrong") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**BODY)


async def test_a_failure_in_mid_stream_is_an_error_event_and_no_end(
    router: RunningRouter, http: httpx.AsyncClient
) -> None:
    is_seen = breaks_once_seen(router)
    events: list[str] = []
    async with http.stream("POST", "/v1/messages", json={**BODY, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                events.append(line.removeprefix("event: "))
                is_seen.set()
    assert events[0] == "message_start"
    assert events[-1] == "error"
    assert "message_stop" not in events
