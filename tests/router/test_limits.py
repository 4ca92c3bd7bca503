"""Every limit, over HTTP: the status, code and parameter it has, and that nothing of it reaches a worker."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from router.limits import INTERNAL_FIELDS, UNSUPPORTED_FIELDS
from router.tool_fields import TOOL_FIELDS
from tests.router.conftest import MODEL, RunningRouter
from tests.router.requests_table import WRONG_VALUES, Row

TEMPLATE_FIELDS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
GOLDEN = {"model": MODEL, "prompt": "golden", "max_tokens": 2, "temperature": 0}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


async def _golden(http: httpx.AsyncClient) -> str:
    answer = await http.post("/v1/completions", json=GOLDEN)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def _error(answer: httpx.Response, status: int, code: str, param: str | None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert answer.headers["x-should-retry"] == "false"
    return error


async def test_f37_s_b9_s_b15_s_b16_s_b25_s_b26_s_b36_every_wrong_value_is_named_and_reaches_no_worker(
    router: RunningRouter, http: httpx.AsyncClient
) -> None:
    expected = await _golden(http)
    worker = router.workers[-1]
    for number, row in enumerate(WRONG_VALUES):
        num_submits = len(worker.submits)
        content = json.dumps({**GOLDEN, row.field: row.value}).encode()
        answer = await http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        try:
            error = _error(answer, row.status, row.code, row.named)
        except AssertionError as failure:
            raise AssertionError(f"{row}: {failure}") from failure
        assert row.named.split(".")[0].lower() in error["message"].lower()
        assert len(error["message"]) < 400
        assert len(worker.submits) == num_submits
        if number % 10 == 0:
            assert await _golden(http) == expected
    assert await _golden(http) == expected


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("temperature", 0, 2),
        ("temperature", 0.0, 2.0),
        ("top_p", 1e-9, 1),
        ("min_p", 0, 1),
        ("repetition_penalty", 0.001, 2),
        ("presence_penalty", -2, 2),
        ("n", 1, 8),
        ("top_k", -1, 300),
        ("top_k", 1, 1),
        ("seed", -(2**63), 2**63 - 1),
        ("logprobs", 0, 20),
        ("stop", "a", ["a" * 256] * 4),
        ("logit_bias", {}, {"299": -100, "0": 100}),
        ("max_tokens", 1, 500),
        ("user", "", "u" * 256),
        ("speculation", "off", "eagle"),
        ("num_drafts", 1, 15),
        ("stream_options", None, None),
        ("response_format", None, {"type": "text"}),
        ("tools", None, []),
        ("best_of", None, 1),
    ],
)
async def test_f37_the_bounds_themselves_are_accepted(field: str, low: Any, high: Any, http: httpx.AsyncClient) -> None:
    for value in (low, high, None):
        if field == "prompt" and value is None:
            continue
        answer = await http.post("/v1/completions", json={**GOLDEN, field: value})
        assert answer.status_code == 200, (field, value, answer.text)


# What LangChain, LiteLLM and others write into every request of theirs.
HARMLESS: dict[str, Any] = {
    "use_beam_search": False, "length_penalty": 1.0, "include_stop_str_in_output": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "add_generation_prompt": True, "continue_final_message": False,
    "return_token_ids": False, "bad_words": [], "modalities": ["text"], "reasoning_effort": "none",
    "verbosity": "medium", "best_of": 1, "store": False, "service_tier": "auto", "prompt_cache_key": "a conversation",
    "safety_identifier": "somebody", "truncate_prompt_tokens": None, "functions": None,
}  # fmt: skip


async def test_defaults_that_libraries_write_into_requests_are_no_errors(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json={**CHAT, **HARMLESS})
    assert answer.status_code == 200, answer.text


async def test_internal_and_unsupported_fields_say_so(http: httpx.AsyncClient) -> None:
    for path, good in (("/v1/completions", GOLDEN), ("/v1/chat/completions", CHAT)):
        for field in sorted(INTERNAL_FIELDS | UNSUPPORTED_FIELDS):
            if path == "/v1/chat/completions" and field in (*TOOL_FIELDS, *TEMPLATE_FIELDS):
                continue
            answer = await http.post(path, json={**good, field: "x"})
            _error(answer, 400, "unsupported_parameter", field)


BAD_MESSAGES: dict[str, tuple[Any, str, str]] = {
    "no array": ("hi", "invalid_request", "messages"),
    "empty": ([], "invalid_request", "messages"),
    "no object": (["hi"], "invalid_request", "messages[0]"),
    "no role": ([{"content": "a"}], "invalid_request", "messages[0].role"),
    "wrong role": ([{"role": "root", "content": "a"}], "invalid_request", "messages[0].role"),
    "no content": ([{"role": "user"}], "invalid_request", "messages[0].content"),
    "number": ([{"role": "user", "content": 1}], "invalid_request", "messages[0].content"),
    "empty parts": ([{"role": "user", "content": []}], "invalid_request", "messages[0].content"),
    "unknown field": ([{"role": "user", "content": "a", "x": 1}], "unknown_parameter", "messages[0].x"),
    "tool calls": (
        [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}],
        "invalid_request",
        "messages[0].tool_calls[0].function",
    ),
    "second message": (
        [{"role": "user", "content": "a"}, {"role": "user", "content": {}}],
        "invalid_request",
        "messages[1].content",
    ),
    "too long": ([{"role": "user", "content": "a" * 20_000}], "context_length_exceeded", "messages"),
    "too many": ([{"role": "user", "content": ""}] * 40_000, "context_length_exceeded", "messages"),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
async def test_bad_messages_are_named(name: str, http: httpx.AsyncClient) -> None:
    messages, code, param = BAD_MESSAGES[name]
    _error(await http.post("/v1/chat/completions", json={**CHAT, "messages": messages}), 400, code, param)


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/", "https://example.org/a.png", "file:///etc/passwd", "data:,x"]
)
async def test_s_b40_images_are_never_fetched(url: str, http: httpx.AsyncClient) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    answer = await http.post("/v1/chat/completions", json={**CHAT, "messages": [{"role": "user", "content": [part]}]})
    _error(answer, 400, "unsupported_parameter", "messages[0].content[0]")


async def test_text_parts_are_joined(router: RunningRouter, http: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer = await http.post("/v1/chat/completions", json={**CHAT, "messages": [{"role": "user", "content": parts}]})
    assert answer.status_code == 200
    assert b"one\ntwo" in bytes(t for t in router.workers[-1].submits[-1].token_ids if t < 256)


async def test_a8_max_completion_tokens_is_heeded_and_must_agree_with_max_tokens(http: httpx.AsyncClient) -> None:
    body = {key: value for key, value in CHAT.items() if key != "max_tokens"}
    answer = await http.post("/v1/chat/completions", json={**body, "max_completion_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    both = await http.post("/v1/chat/completions", json={**body, "max_completion_tokens": 3, "max_tokens": 3})
    assert both.status_code == 200
    unequal = await http.post("/v1/chat/completions", json={**body, "max_completion_tokens": 3, "max_tokens": 4})
    _error(unequal, 400, "invalid_request", "max_completion_tokens")


async def test_defaults_are_what_fits_for_a_chat_and_sixteen_for_a_completion(
    router: RunningRouter, http: httpx.AsyncClient
) -> None:
    await http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
    await http.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT["messages"]})
    completion, chat = router.workers[-1].submits
    assert completion.sampling.max_tokens == 16
    assert chat.sampling.max_tokens == 512 - len(chat.token_ids)


async def test_more_than_any_pool_holds_is_refused_before_it_is_placed(
    router: RunningRouter, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.core.registry, "max_capacity_tokens", lambda: 100)
    answer = await http.post("/v1/completions", json={**GOLDEN, "prompt": "a" * 90, "max_tokens": 11})
    _error(answer, 400, "request_exceeds_kv_capacity", "prompt")
    assert (
        await http.post("/v1/completions", json={**GOLDEN, "prompt": "a" * 90, "max_tokens": 10})
    ).status_code == 200
    assert router.workers[-1].submits[-1].sampling.max_tokens == 10


async def test_values_in_messages_are_escaped_and_short(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={**GOLDEN, "model": "\x1b[31m" + "x" * 200})
    error = _error(answer, 404, "model_not_found", "model")
    assert "\x1b" not in error["message"]
    assert len(error["message"]) < 200


def test_rows_cover_every_numeric_field_of_the_limits() -> None:
    covered = {row.field for row in WRONG_VALUES}
    assert {"temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "logit_bias", "logprobs"} <= covered
    assert all(isinstance(row, Row) for row in WRONG_VALUES)
