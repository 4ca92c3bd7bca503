"""Faults of other servers, as requests: what a client gets wrong, or a worker says, hurts nobody else."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from tests.router.conftest import MODEL, RunningRouter

BODY: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 2, "temperature": 0}
# A template that ran would take minutes.
HELD_UP_S = 20.0


async def test_s_b16_best_of_is_no_way_to_more_choices(router: RunningRouter, http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={**BODY, "best_of": 1_000_000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "best_of")
    assert not router.workers[-1].submits


@pytest.mark.parametrize(
    "field",
    [
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
        {"chat_template": "{{ 'a' * 10**10 }}"},
        {"add_generation_prompt": "{% for i in range(10**9) %}x{% endfor %}"},
    ],
)
async def test_s_b18_s_b19_a_request_brings_no_template_and_holds_nobody_up(
    http: httpx.AsyncClient, field: dict[str, Any]
) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    started = time.monotonic()
    refused, served = await asyncio.gather(
        http.post("/v1/chat/completions", json={**chat, **field}), http.post("/v1/chat/completions", json=chat)
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == next(iter(field))
    assert served.status_code == 200
    assert time.monotonic() - started < HELD_UP_S


async def test_what_is_not_there_says_what_it_was(http: httpx.AsyncClient) -> None:
    for path, code, part in (
        ("/v1/models/other", "model_not_found", f"'other'; served: {MODEL}"),
        ("/explain/chatcmpl-none", "not_found", "no such request"),
        ("/docs", "not_found", "/openapi.json"),
    ):
        answer = await http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)
        assert part in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/assistants", "/v1/audio/speech", "/rerank"])
async def test_other_services_are_refused_by_name(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(path, json={"model": MODEL, "input": "a"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_offered"
    assert path in answer.json()["error"]["message"]
