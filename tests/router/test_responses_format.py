"""OpenAI's Responses API as the official client sees it: whole, streamed, with calls, constrained, refused, broken."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from tandem.v1 import worker_pb2

from router.limits import ServingLimits, chat_fields
from router.responses_body import responses_fields
from tests.router.conftest import MODEL, RunningRouter
from tests.router.scripted_worker import Step, expected_token
from tests.router.test_tools import BAD_SCHEMA, CALL, CITY, says

WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": CITY}
BODY: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 6, "temperature": 0}


def prompt_of(router: RunningRouter) -> str:
    """The last prompt that reached a worker, without its special tokens."""
    return bytes(token for token in router.workers[-1].submits[-1].token_ids if token < 256).decode()


async def test_whole_and_streamed_answers_are_the_same(router: RunningRouter) -> None:
    async with router.client() as client:
        whole = await client.responses.create(**BODY)
        events = [event async for event in await client.responses.create(**BODY, stream=True)]
    submit = router.workers[-1].submits[0]
    text = "".join(chr(expected_token(submit, position)) for position in range(6))
    assert whole.output_text == text
    assert (whole.status, whole.incomplete_details and whole.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (len(submit.token_ids), 6)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == text
    assert last.response.usage == whole.usage


async def test_events_come_in_the_order_of_the_api(router: RunningRouter) -> None:
    router.workers[-1].script = says("ok")
    async with router.client() as client:
        events = [event async for event in await client.responses.create(**BODY, stream=True)]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for kind in kinds if kind != "output_text.delta"] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_calls_are_items_of_their_own(router: RunningRouter, is_streamed: bool) -> None:
    router.workers[-1].script = says(f"Sure.{CALL}\n{CALL}")
    body = {**BODY, "tools": [WEATHER]}
    async with router.client() as client:
        if is_streamed:
            async with client.responses.stream(**body) as stream:
                pieces = [
                    event.delta async for event in stream if event.type == "response.function_call_arguments.delta"
                ]
                answer: Any = await stream.get_final_response()
            assert len(pieces) > 4, "arguments came in one piece"
        else:
            answer = await client.responses.create(**body)
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    assert answer.output_text == "Sure."
    calls = answer.output[1:]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Rome"})] * 2
    assert len({call.call_id for call in calls} | {call.id for call in calls}) == 4
    assert answer.status == "completed"


async def test_a_conversation_with_calls_reaches_the_model_in_order(router: RunningRouter) -> None:
    router.workers[-1].script = says(CALL)
    question = {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}
    async with router.client() as client:
        first = await client.responses.create(**{**BODY, "input": [question], "tools": [WEATHER]})
        call = first.output[0]
        assert call.type == "function_call"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
        router.workers[-1].script = says("It is warm.")
        body = {**BODY, "input": [question, call.model_dump(), result], "instructions": "Be brief."}
        second = await client.responses.create(**body)
        again = [*body["input"], second.output[0].model_dump(), {"role": "user", "content": "Thanks"}]
        await client.responses.create(**{**body, "input": again})
    written = prompt_of(router)
    places = [written.index(part) for part in ("Be brief.", "Weather?", '"city": "Rome"', "It is warm.", "Thanks")]
    assert places == sorted(places)
    assert second.instructions == "Be brief."


async def test_fields_reach_the_worker_and_come_back(router: RunningRouter, http: httpx.AsyncClient) -> None:
    body = {**BODY, "top_p": 0.5, "seed": 7, "top_k": 3, "metadata": {"run": "a"}, "store": False, "truncation": None}
    format_ = {"type": "json_schema", "name": "place", "schema": CITY, "strict": True}
    answer = await http.post("/v1/responses", json={**body, "text": {"format": format_}})
    assert answer.status_code == 200, answer.text
    sampling = router.workers[-1].submits[-1].sampling
    assert (sampling.top_k, sampling.seed, sampling.max_tokens) == (3, 7, 6)
    assert json.loads(sampling.json_schema)["required"] == ["city"]
    said = answer.json()
    assert said["metadata"] == {"run": "a"}
    assert said["text"]["format"]["name"] == "place"
    assert (said["temperature"], said["top_p"], said["store"]) == (0.0, 0.5, False)
    assert answer.headers["x-request-id"].startswith("resp-")


NO_STORE = "unsupported_parameter"
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no input": ({"input": None}, "input", "invalid_request"),
    "empty input": ({"input": []}, "input", "invalid_request"),
    "input's kind": ({"input": 3}, "input", "invalid_request"),
    "item's kind": ({"input": ["hi"]}, "input[0]", "invalid_request"),
    "unknown item": ({"input": [{"type": "web_search_call"}]}, "input[0].type", NO_STORE),
    "reference": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", NO_STORE),
    "role": ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "invalid_request"),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://h/"}]}]},
        "input[0].content[0]", NO_STORE,
    ),
    "arguments": (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]},
        "input[0].arguments", "invalid_request",
    ),
    "stored answer": ({"previous_response_id": "resp_1"}, "previous_response_id", NO_STORE),
    "store": ({"store": True}, "store", NO_STORE),
    "background": ({"background": True}, "background", NO_STORE),
    "unknown field": ({"max_tokens": 4}, "max_tokens", "unknown_parameter"),
    "hosted tool": ({"tools": [{"type": "web_search"}]}, "tools[0].type", NO_STORE),
    "nested tool": (
        {"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools[0].function", "unknown_parameter",
    ),
    "tool's schema": (
        {"tools": [{**WEATHER, "parameters": {"type": "something"}}]}, "tools[0].parameters", BAD_SCHEMA,
    ),
    "format's schema": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": []}}}, "text.format.schema", BAD_SCHEMA,
    ),
    "format": ({"text": {"format": {"type": "xml"}}}, "text.format.type", NO_STORE),
    "choice": (
        {"tool_choice": {"type": "function", "name": "other"}, "tools": [WEATHER]}, "tool_choice", "invalid_request",
    ),
}  # fmt: skip


async def test_whatever_is_wrong_is_named(router: RunningRouter, http: httpx.AsyncClient) -> None:
    for case, (changed, param, code) in WRONG.items():
        answer = await http.post("/v1/responses", json={**BODY, **changed})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, code), (case, error)
    assert router.workers[-1].submits == []


def breaks_once_seen(router: RunningRouter) -> asyncio.Event:
    """The worker's answer fails after its first token, and not before the client has set the event."""
    seen = asyncio.Event()

    def script(submit: worker_pb2.SubmitRequest) -> list[Step]:
        unheard_of: Any = 99
        broken = worker_pb2.RequestEvent(request_id=submit.request_id, finish_reason=unheard_of)
        return [Step([97]), Step([98], broken)]

    async def pace(_: worker_pb2.SubmitRequest, num_sent: int) -> None:
        if num_sent:
            async with asyncio.timeout(30):
                await seen.wait()

    router.workers[-1].script, router.workers[-1].pace = script, pace
    return seen


async def test_a_failure_in_mid_stream_is_an_error_event_and_no_last_one(router: RunningRouter) -> None:
    is_seen = breaks_once_seen(router)
    kinds: list[str] = []

    async def read() -> None:
        async with router.client() as client:
            async for event in await client.responses.create(**BODY, stream=True):
                kinds.append(event.type)
                is_seen.set()

    with pytest.raises(openai.APIError):
        await read()
    assert kinds[0] == "response.created"
    assert not {"response.completed", "response.incomplete"} & set(kinds)


def test_limits_of_the_body_are_those_of_a_chat() -> None:
    limits = ServingLimits(MODEL, 300, 100)
    chat, responses = chat_fields(limits), responses_fields(limits)
    assert all(responses[name] == chat[name] for name in ("temperature", "top_p", "seed", "stop", "priority"))
