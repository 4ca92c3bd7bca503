"""vLLM's parameters of prompt and output, over HTTP, whole and streamed, and over gRPC where it has them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tandem.v1 import common_pb2, worker_pb2

from tests.router.byte_tokenizer import END_ID, MAX_MODEL_LEN
from tests.router.conftest import MODEL, RunningRouter
from tests.router.fronts import Front, Reply
from tests.router.scripted_worker import Step
from tests.router.test_openai_features import says

IM_START = 257
CHAT = [{"role": "user", "content": "hi"}]
BEGUN = [*CHAT, {"role": "assistant", "content": "Well, "}]


async def ask(front: Front, router: RunningRouter, **fields: Any) -> Reply:
    return await front.ask(router, **{"prompt": "abc", "max_tokens": 50, "temperature": 0, **fields})


def ends_with_token(token_id: int, *before: bytes) -> Any:
    """A script: these bytes, a step each, then a token that stops the answer."""

    def script(submit: worker_pb2.SubmitRequest) -> list[Step]:
        event = worker_pb2.RequestEvent(request_id=submit.request_id, fence=submit.fence)
        event.finish_reason = common_pb2.FINISH_REASON_STOP
        event.has_stop_token, event.stop_token_id = True, token_id
        return [*(Step(list(piece)) for piece in before), Step([token_id], event)]

    return script


# --- what stops an answer ---------------------------------------------------------------------------------------------


async def test_a_stop_string_is_part_of_the_text_where_that_is_asked_for(router: RunningRouter, front: Front) -> None:
    router.workers[-1].script = says(b"ABC", b"DEF", b"G", b"HIxx", b"J")
    for included, text in ((True, "ABCDEFGHI"), (False, "ABC")):
        reply = await ask(front, router, stop=["DEFGHI"], include_stop_str_in_output=included)
        assert reply.text == text
        assert reply.finish_reasons == {0: "stop"}
        assert reply.usage.completion_tokens == 9


async def test_a_shown_stop_string_keeps_text_tokens_and_logprobs_together(router: RunningRouter, front: Front) -> None:
    router.workers[-1].script = says(b"ab", b"xy", b"z!")
    reply = await ask(front, router, stop=["xyz"], include_stop_str_in_output=True, logprobs=1)
    assert reply.text == "abxyz"
    assert "".join(token for chunk in reply.chunks for token in chunk.tokens) == "abxyz"


async def test_a_stop_tokens_text_is_shown_too_and_a_special_ones_only_with_special_tokens(
    router: RunningRouter, front: Front
) -> None:
    worker = router.workers[-1]
    worker.script = ends_with_token(ord("!"), b"ab")
    stops = {"stop_token_ids": [ord("!")]}
    assert (await ask(front, router, **stops)).text == "ab"
    assert (await ask(front, router, **stops, include_stop_str_in_output=True)).text == "ab!"
    worker.script = ends_with_token(END_ID, b"ab")
    assert (await ask(front, router, include_stop_str_in_output=True)).text == "ab"
    shown = await ask(front, router, include_stop_str_in_output=True, skip_special_tokens=False)
    assert shown.text == "ab<|im_end|>"
    assert (await ask(front, router, skip_special_tokens=False)).text == "ab"


async def test_special_tokens_within_an_answer_are_text_where_that_is_asked_for(
    router: RunningRouter, front: Front
) -> None:
    router.workers[-1].script = ends_with_token(END_ID, b"a", b"b")

    def with_special(submit: worker_pb2.SubmitRequest) -> list[Step]:
        first, *rest = ends_with_token(END_ID, b"a", b"b")(submit)
        return [first, Step([IM_START]), *rest]

    router.workers[-1].script = with_special
    assert (await ask(front, router)).text == "ab"
    assert (await ask(front, router, skip_special_tokens=False)).text == "a<|im_start|>b"


# --- the prompt -------------------------------------------------------------------------------------------------------


async def test_a_truncated_prompt_is_its_end(router: RunningRouter, front: Front) -> None:
    reply = await ask(front, router, prompt="a long prompt", truncate_prompt_tokens=6, max_tokens=2)
    assert bytes(router.workers[-1].submits[-1].token_ids) == b"prompt"
    assert reply.usage.prompt_tokens == 6
    await ask(front, router, prompt="short", truncate_prompt_tokens=100, max_tokens=2)
    assert bytes(router.workers[-1].submits[-1].token_ids) == b"short"


async def test_a_prompt_that_is_too_long_leaves_room_for_the_answer(router: RunningRouter, front: Front) -> None:
    text = "x" * MAX_MODEL_LEN + "end"
    assert (await ask(front, router, prompt=text, max_tokens=10)).code == "context_length_exceeded"
    reply = await ask(front, router, prompt=text, max_tokens=10, truncate_prompt_tokens=-1)
    assert reply.usage.prompt_tokens == MAX_MODEL_LEN - 10
    assert bytes(router.workers[-1].submits[-1].token_ids).endswith(b"xend")
    assert reply.usage.completion_tokens == 10


async def test_a_begun_answer_is_gone_on_with(router: RunningRouter, front: Front) -> None:
    await front.ask(router, messages=BEGUN, max_tokens=2, continue_final_message=True)
    assert list(router.workers[-1].submits[-1].token_ids) == [
        IM_START, *b"user\nhi", END_ID, 10, IM_START, *b"assistant\nWell, ",
    ]  # fmt: skip
    await front.ask(router, messages=BEGUN, max_tokens=2)
    assert list(router.workers[-1].submits[-1].token_ids)[-11:] == [IM_START, *b"assistant\n"]


async def test_the_assistants_turn_is_not_begun_where_that_is_asked_for(router: RunningRouter, front: Front) -> None:
    await front.ask(router, messages=CHAT, max_tokens=2, add_generation_prompt=False)
    assert list(router.workers[-1].submits[-1].token_ids) == [IM_START, *b"user\nhi", END_ID, 10]


@pytest.mark.parametrize(
    ("messages", "also"),
    [
        (CHAT, {}),
        ([*CHAT, {"role": "assistant", "content": ""}], {}),
        (BEGUN, {"add_generation_prompt": True}),
    ],
)
async def test_what_cannot_be_gone_on_with_is_refused(
    router: RunningRouter, front: Front, messages: Any, also: dict[str, Any]
) -> None:
    reply = await front.ask(router, messages=messages, max_tokens=2, continue_final_message=True, **also)
    assert reply.is_client_error
    assert reply.param == "continue_final_message"
    assert not router.workers[-1].submits


async def test_a_begun_answer_over_messages(router: RunningRouter, http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "max_tokens": 2, "messages": BEGUN}
    answer = await http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    token_ids = list(router.workers[-1].submits[-1].token_ids)
    assert token_ids[-16:] == [*b"assistant\nWell, "]
    counted = await http.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": BEGUN})
    assert counted.json()["input_tokens"] == len(token_ids)


# --- which tokens may come --------------------------------------------------------------------------------------------


async def test_allowed_tokens_and_bad_words_reach_the_worker_as_token_ids(router: RunningRouter, front: Front) -> None:
    await ask(front, router, allowed_token_ids=[97, 98], bad_words=[" ox", "y"], max_tokens=2)
    sampling = router.workers[-1].submits[-1].sampling
    assert list(sampling.allowed_token_ids) == [97, 98]
    assert [bytes(word.ids) for word in sampling.bad_words] == [b"ox", b" ox", b"y", b" y"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [END_ID], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [97], "regex": "a"}, "allowed_token_ids"),
        ({"bad_words": ["a"], "regex": "b"}, "bad_words"),
        ({"bad_words": ["a"] * 33}, "bad_words"),
        ({"bad_words": ["a" * 257]}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens"),
    ],
)
async def test_what_leaves_nothing_or_is_out_of_range_is_refused_by_name(
    router: RunningRouter, front: Front, fields: dict[str, Any], param: str
) -> None:
    reply = await ask(front, router, **fields)
    assert reply.is_client_error, reply
    assert reply.param == param
    assert not router.workers[-1].submits


# --- tokens as ids, over HTTP -----------------------------------------------------------------------------------------


async def _events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = (await http.post(path, json={**body, "stream": True})).text
    return [json.loads(event.removeprefix("data: ")) for event in text.removesuffix("\n\n").split("\n\n")[:-1]]


@pytest.mark.parametrize("is_chat", [False, True])
async def test_token_ids_are_all_that_usage_counts_shown_or_not(
    router: RunningRouter, http: httpx.AsyncClient, is_chat: bool
) -> None:
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    question: dict[str, Any] = {"messages": CHAT} if is_chat else {"prompt": "abc"}
    body = {"model": MODEL, **question, "max_tokens": 50, "stop": ["xyz"], "return_token_ids": True}
    for script, expected in (
        (says(b"ab", b"xy", b"z!"), [*b"abxyz"]),
        (ends_with_token(END_ID, b"a", b"bc"), [*b"abc", END_ID]),
    ):
        router.workers[-1].script = script
        whole = (await http.post(path, json=body)).json()
        prompt_ids = list(router.workers[-1].submits[-1].token_ids)
        choice = whole["choices"][0]
        assert choice["token_ids"] == expected
        assert (whole if is_chat else choice)["prompt_token_ids"] == prompt_ids
        assert whole["usage"]["completion_tokens"] == len(expected)
        events = await _events(http, path, body)
        assert [t for event in events for choice in event["choices"] for t in choice["token_ids"]] == expected
        first, *rest = [event if is_chat else event["choices"][0] for event in events]
        assert first["prompt_token_ids"] == prompt_ids
        assert all("prompt_token_ids" not in later for later in rest)


async def test_without_being_asked_no_token_ids_are_said(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/completions", json={"model": MODEL, "prompt": "abc", "max_tokens": 2})).text
    assert "token_ids" not in answer


async def test_tokens_of_logprobs_are_named_by_their_ids_where_that_is_asked_for(
    router: RunningRouter, http: httpx.AsyncClient
) -> None:
    router.workers[-1].script = says(b"xy")
    asked = {"model": MODEL, "max_tokens": 2, "return_tokens_as_token_ids": True}
    answer = await http.post("/v1/completions", json={**asked, "prompt": "abc", "logprobs": 2})
    logprobs = answer.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:120", "token_id:121"]
    assert set(logprobs["top_logprobs"][0]) == {"token_id:97", "token_id:98", "token_id:120"}
    answer = await http.post(
        "/v1/chat/completions", json={**asked, "messages": CHAT, "logprobs": True, "top_logprobs": 1}
    )
    first = answer.json()["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == ("token_id:120", [120])
    assert first["top_logprobs"][0]["token"] == "token_id:97"


async def test_a_request_brings_no_chat_template_and_hears_whose_they_are(http: httpx.AsyncClient) -> None:
    for path, question in (("/v1/chat/completions", {"messages": CHAT}), ("/v1/completions", {"prompt": "a"})):
        answer = await http.post(path, json={"model": MODEL, **question, "chat_template": "{{ messages }}"})
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "chat_template")
        assert "--chat-template-file" in error["message"]
