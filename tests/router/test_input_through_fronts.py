"""Hostile and wrong requests over HTTP and over gRPC: refused alike, by name, and nobody else notices."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from typing import Any

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
from cluster.identity import Tenant
from router import grammar_checker
from router.tenants import ApiKeys
from tests.router.byte_tokenizer import MAX_MODEL_LEN
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fronts import Front, Reply

# What ran a hostile request would take minutes.
HELD_UP_S = 20.0
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})


async def ask(front: Front, router: RunningRouter, **fields: Any) -> Reply:
    return await front.ask(router, **{"prompt": "abc", "max_tokens": 2, "temperature": 0, **fields})


async def golden(front: Front, router: RunningRouter) -> None:
    reply = await ask(front, router)
    assert (len(reply.text), reply.is_whole) == (2, True), reply


def circuits(router: RunningRouter) -> set[str]:
    return {state.circuit.position.value for state, _ in router.core.registry.workers}


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({"n": n}, "n") for n in (10**9, 129, 9, 0)),
        *(({"logprobs": logprobs}, "logprobs") for logprobs in (-1, 21, 299)),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
    ],
)
async def test_s_b15_s_b25_s_b36_a_wrong_value_is_named_reaches_no_worker_and_hurts_nobody(
    fields: dict[str, Any], param: str, router: RunningRouter, front: Front
) -> None:
    reply = await ask(front, router, **fields)
    assert (reply.is_client_error, reply.param) == (True, param), reply
    assert not router.workers[-1].submits
    await golden(front, router)


@pytest.mark.parametrize("num_tokens", [1, MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1, MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
async def test_s_b28_the_last_token_that_fits_is_served_and_one_more_refused(
    num_tokens: int, router: RunningRouter, front: Front
) -> None:
    reply = await ask(front, router, prompt=[65] * num_tokens, max_tokens=1)
    if num_tokens < MAX_MODEL_LEN:
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (num_tokens, 1)
    else:
        assert reply.is_client_error
        assert reply.code == "context_length_exceeded"
    await golden(front, router)


BAD_GUIDES: list[dict[str, str]] = [
    {"json_schema": '{"type": "something"}'},
    {"json_schema": '{"properties": {"a": {"pattern": "("}}}'},
    {"json_schema": '{"$ref": "http://127.0.0.1:1/s"}'},
    {"regex": "(a"},
    {"grammar": "start: ("},
]


async def test_s_b20_s_b21_bad_constraints_before_and_after_good_ones_kill_nothing(
    router: RunningRouter, front: Front
) -> None:
    """Each kind after each other: what compiled before must not matter, nor what did not."""
    goods = ({"json_schema": SCHEMA}, {"regex": "(a+)+$"}, {"grammar": 'start: "x"'})
    for number, bad in enumerate(BAD_GUIDES):
        assert (await ask(front, router, **goods[number % 3])).is_whole
        reply = await ask(front, router, **bad)
        assert reply.is_client_error, (bad, reply)
        assert "json" in reply.param if "json_schema" in bad else next(iter(bad)) in reply.param
        assert (await ask(front, router, **goods[(number + 1) % 3])).is_whole
    assert len(router.workers[-1].submits) == 2 * len(BAD_GUIDES)


async def test_s_b22_unique_schemas_leave_bounded_memory(
    router: RunningRouter, front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_REMEMBERED", 8)
    for number in range(20):
        assert (await ask(front, router, json_schema=f'{{"type": "integer", "maximum": {number}}}')).is_whole
    assert router.core.grammars.num_remembered == 8


@pytest.mark.parametrize(
    "text", ["{% for i in range(10**9) %}x{% endfor %}", "{{ 'a' * 10**10 }}", "{{ cycler.__init__.__globals__ }}"]
)
async def test_s_b18_s_b19_a_template_in_a_message_is_text(text: str, router: RunningRouter, front: Front) -> None:
    """Fields that bring a template are refused over HTTP by name; gRPC has none."""
    started_s = time.monotonic()
    reply = await front.ask(router, messages=[{"role": "user", "content": text}], max_tokens=2)
    assert reply.is_whole
    assert text.encode() in bytes(token for token in router.workers[-1].submits[0].token_ids if token < 256)
    assert time.monotonic() - started_s < HELD_UP_S


async def test_s_b11_what_a_prompt_or_a_model_says_is_never_run(router: RunningRouter, front: Front) -> None:
    evil = "__import__('os').system('x')"
    reply = await ask(front, router, prompt=evil)
    assert reply.is_whole
    assert bytes(router.workers[-1].submits[0].token_ids) == evil.encode()


# --- who asks ---------------------------------------------------------------------------------------------------------


async def test_s_b37_s_b41_only_holders_of_a_key_are_served_each_in_a_scope_of_its_own(
    start_router: StartRouter, front: Front
) -> None:
    keys = ApiKeys({hashlib.sha256(key.encode()).digest(): Tenant(name) for name, key in (("a", "k-1"), ("b", "k-2"))})
    router = await start_router(keys=keys)
    worker = await router.add_worker(router.new_worker("both", "aggregated"))
    for key in ("", "k-", "k-11", "K-1", "a"):
        refused = await front.ask(router, key=key, prompt="x", max_tokens=1)
        assert (refused.status in (401, "UNAUTHENTICATED"), refused.code) == (True, "invalid_api_key"), key
    assert not worker.submits
    for key in ("k-1", "k-2"):
        assert (await front.ask(router, key=key, prompt=[98] * 64, max_tokens=1)).is_whole
    first, second = worker.submits
    assert (first.tenant, second.tenant) == ("a", "b")
    assert first.scope.scope_key != second.scope.scope_key


async def test_s_b39_ids_are_the_servers_own_whatever_the_client_sends(router: RunningRouter, front: Front) -> None:
    evil = "abc___decode_addr_evil:1234"
    reply = await front.ask(router, headers={"x-request-id": evil}, prompt="x", max_tokens=1)
    assert reply.is_whole
    assert "evil" not in reply.request_id
    assert "evil" not in str(router.workers[-1].submits)
    assert router.workers[-1].submits[0].request_id.startswith(reply.request_id)


# --- what workers say -------------------------------------------------------------------------------------------------

FAILURES: list[tuple[TandemError, int, str]] = [
    (ServerOverloaded("full"), 503, "UNAVAILABLE"),
    (KvCapacityExhausted("no blocks"), 503, "UNAVAILABLE"),
    (KvTransferFailed("digest differs"), 502, "DATA_LOSS"),
    (RequestExceedsKvCapacity("too large"), 400, "FAILED_PRECONDITION"),
    (DeadlineExceeded("late"), 504, "DEADLINE_EXCEEDED"),
    (EngineFailure("a row without numbers"), 500, "INTERNAL"),
]


@pytest.mark.parametrize(("failure", "http_status", "grpc_status"), FAILURES, ids=lambda value: type(value).__name__)
async def test_s_b58_whatever_a_worker_fails_with_the_client_hears_of_it(
    failure: TandemError, http_status: int, grpc_status: str, router: RunningRouter, front: Front
) -> None:
    router.workers[-1].refuse = lambda _: to_failure(failure)
    reply = await ask(front, router, timeout_ms=30_000)
    assert reply.status == (grpc_status if front.name == "grpc" else http_status), reply
    assert reply.code == failure.error_code
    assert not reply.is_whole


async def test_s_b58_a_worker_that_is_not_there_is_waited_for_until_the_deadline_and_no_longer(
    router: RunningRouter, front: Front
) -> None:
    router.workers[-1].refuse = lambda _: to_failure(WorkerUnavailable("draining"))
    reply = await ask(front, router, timeout_ms=3000)
    assert reply.status in (503, 504, "UNAVAILABLE", "DEADLINE_EXCEEDED")
    assert reply.code in ("worker_unavailable", "no_workers_available", "deadline_exceeded"), reply


async def test_s_b58_a_code_that_nobody_knows_is_an_internal_error(router: RunningRouter, front: Front) -> None:
    router.workers[-1].refuse = lambda _: common_pb2.Failure(code="never_heard_of", message="m")
    assert (await ask(front, router)).status in (500, "INTERNAL")


async def test_s_b62_s_b48_hundreds_of_oversize_prompts_open_no_circuit_and_reach_no_worker(
    router: RunningRouter, front: Front
) -> None:
    for _ in range(8):
        replies = await asyncio.gather(*(ask(front, router, prompt="a" * MAX_MODEL_LEN) for _ in range(50)))
        assert {(reply.is_client_error, reply.code) for reply in replies} == {(True, "context_length_exceeded")}
    assert circuits(router) == {"closed"}
    assert not any(worker.submits for worker in router.workers)
    await golden(front, router)


async def test_s_b48_what_only_a_decode_worker_refuses_frees_both_bookings_at_once(
    router: RunningRouter, front: Front
) -> None:
    router.workers[-1].refuse = lambda _: common_pb2.Failure(code="invalid_request", message="no", param="prompt")
    assert (await ask(front, router)).is_client_error
    assert len(router.workers[-1].submits) == 1
    await router.until(lambda: set(router.bookings()) == {(0, 0, 0)})
    assert circuits(router) == {"closed"}


async def test_s_b63_overload_of_a_worker_is_no_failure_of_it(router: RunningRouter, front: Front) -> None:
    worker = router.workers[-1]
    worker.refuse = lambda _: to_failure(ServerOverloaded("full", retry_after_s=1.0))
    replies = await asyncio.gather(*(ask(front, router) for _ in range(30)))
    assert {reply.status for reply in replies} <= {503, "UNAVAILABLE"}
    assert all(reply.retry_after_s >= 1 for reply in replies)
    assert circuits(router) == {"closed"}
    worker.refuse = None
    await golden(front, router)
