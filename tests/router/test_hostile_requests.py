"""Faults of other servers, as requests: what a client gets wrong, or a worker says, hurts nobody else."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from tandem.v1 import common_pb2

from cluster.errors import (
    DeadlineExceeded,
    EngineFailure,
    KvCapacityExhausted,
    KvTransferFailed,
    RequestExceedsKvCapacity,
    ServerOverloaded,
    TandemError,
    WorkerUnavailable,
    to_failure,
)
from tests.router.byte_tokenizer import MAX_MODEL_LEN
from tests.router.conftest import MODEL, RunningRouter

BODY: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 2, "temperature": 0}
# A template that ran would take minutes.
HELD_UP_S = 20.0


def circuits(router: RunningRouter) -> set[str]:
    return {state.circuit.position.value for state, _ in router.core.registry.workers}


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
        {"add_generation_prompt": False},
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


@pytest.mark.parametrize("num_tokens", [1, MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1, MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
async def test_s_b28_the_last_token_that_fits_is_served_and_one_more_refused(
    http: httpx.AsyncClient, num_tokens: int
) -> None:
    answer = await http.post("/v1/completions", json={**BODY, "prompt": [65] * num_tokens, "max_tokens": 1})
    assert answer.status_code == (200 if num_tokens < MAX_MODEL_LEN else 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_s_b62_s_b48_a_thousand_oversize_prompts_open_no_circuit_and_reach_no_worker(
    router: RunningRouter, http: httpx.AsyncClient
) -> None:
    async def ask() -> int:
        return (await http.post("/v1/completions", json={**BODY, "prompt": "a" * MAX_MODEL_LEN})).status_code

    for _ in range(20):
        assert set(await asyncio.gather(*(ask() for _ in range(50)))) == {400}
    assert circuits(router) == {"closed"}
    assert not any(worker.submits for worker in router.workers)
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_s_b63_overload_of_a_worker_is_no_failure_of_it(router: RunningRouter, http: httpx.AsyncClient) -> None:
    worker = router.workers[-1]
    worker.refuse = lambda _: to_failure(ServerOverloaded("full", retry_after_s=1.0))
    answers = await asyncio.gather(*(http.post("/v1/completions", json=BODY) for _ in range(30)))
    assert {answer.status_code for answer in answers} == {503}
    assert circuits(router) == {"closed"}
    worker.refuse = None
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200


FAILURES: list[tuple[TandemError, int]] = [
    (ServerOverloaded("full"), 503),
    (KvCapacityExhausted("no blocks"), 503),
    (WorkerUnavailable("draining"), 503),
    (KvTransferFailed("digest differs"), 502),
    (RequestExceedsKvCapacity("too large"), 400),
    (DeadlineExceeded("late"), 504),
    (EngineFailure("a row without numbers"), 500),
]


@pytest.mark.parametrize(("failure", "status"), FAILURES, ids=lambda value: type(value).__name__)
async def test_s_b58_whatever_a_worker_fails_with_the_client_hears_of_it(
    router: RunningRouter, failure: TandemError, status: int
) -> None:
    worker = router.workers[-1]
    worker.refuse = lambda _: to_failure(failure)
    async with httpx.AsyncClient(base_url=router.url, timeout=60, trust_env=False) as http:
        answer = await http.post("/v1/completions", json=BODY, headers={"X-Request-Timeout-Ms": "3000"})
    # A worker that is not there may come back until the deadline.
    assert answer.status_code in ({status, 504} if isinstance(failure, WorkerUnavailable) else {status}), answer.text
    assert answer.json()["error"]["code"]


async def test_s_b58_an_unknown_code_is_an_internal_error(router: RunningRouter, http: httpx.AsyncClient) -> None:
    router.workers[-1].refuse = lambda _: common_pb2.Failure(code="never_heard_of", message="m")
    answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == 500


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
