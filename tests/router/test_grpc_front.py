"""`tandem.v1.Inference`: the same answers, checks, limits and errors as over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import common_pb2, inference_pb2, inference_pb2_grpc, worker_pb2

from cluster.identity import Tenant
from router.tenants import ApiKeys
from tests.router.byte_tokenizer import VOCAB_SIZE
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.requests_table import WRONG_VALUES
from tests.router.scripted_worker import expected_token

CODES = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND"}


@pytest_asyncio.fixture(loop_scope="session")
async def stub(router: RunningRouter) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def _generate(stub: Any, **fields: Any) -> list[inference_pb2.GenerateResponse]:
    values = {"text": "abc", "max_tokens": 5, "temperature": 0.0, **fields}
    if "chat" in fields or "token_ids" in fields:
        del values["text"]
    request = inference_pb2.GenerateRequest(**values)
    return [response async for response in stub.Generate(request, timeout=60)]


async def _refusal(stub: Any, **fields: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await _generate(stub, **fields)
    return raised.value


async def test_text_ids_usage_and_timeline(router: RunningRouter, stub: Any) -> None:
    responses = await _generate(stub, return_timeline=True, ignore_eos=True)
    submit = router.workers[-1].submits[0]
    expected = [expected_token(submit, position) for position in range(5)]
    assert [t for r in responses for c in r.choices for t in c.token_ids] == expected
    assert "".join(c.text for r in responses for c in r.choices) == "".join(map(chr, expected))
    last = responses[-1]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (3, 5, 8)
    assert last.timeline.decode_worker_id == "decode-0"
    assert last.timeline.placed_us > 0
    reasons = [c.finish_reason for r in responses for c in r.choices if c.finish_reason]
    assert reasons == [common_pb2.FINISH_REASON_LENGTH]


async def test_prompts_as_ids_and_as_chat(router: RunningRouter, stub: Any) -> None:
    await _generate(stub, token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]))
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    await _generate(stub, chat=chat, model=MODEL)
    ids, messages = router.workers[-1].submits
    assert list(ids.token_ids) == [1, 2, 3]
    assert list(messages.token_ids) == [257, *b"user\nhi", 258, 10, 257, *b"assistant\n"]


async def test_choices_logprobs_and_stop_strings(stub: Any) -> None:
    responses = await _generate(stub, n=3, temperature=1.0, seed=4, logprobs=2)
    for index in range(3):
        choices = [c for r in responses for c in r.choices if c.index == index]
        assert all(len(c.token_ids) == len(c.logprobs) == len(c.text) for c in choices)
        assert sum(len(c.token_ids) for c in choices) == 5
        assert len(choices[0].logprobs[0].top) == 2
    first = [c.text for r in await _generate(stub) for c in r.choices]
    stopped = await _generate(stub, stop=["".join(first)[2]])
    assert "".join(c.text for r in stopped for c in r.choices) == "".join(first)[:2]


def _as_fields(field: str, value: Any) -> dict[str, Any] | None:
    """The row's value in protobuf's fields; None when protobuf's own types cannot carry it."""
    if field == "prompt":
        if isinstance(value, str):
            return {"text": value}
        if not (isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)):
            return None
        field, value = "token_ids", {"ids": value}
    described = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name.get(field)
    if isinstance(value, bool) or described is None or described.type == described.TYPE_BOOL:
        return None
    if field in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words") and not isinstance(value, list):
        return None  # protobuf would take a string's letters, or an object's keys, for a list
    if field == "logit_bias" and isinstance(value, dict):
        if any(isinstance(bias, bool) or not key.removeprefix("-").isdigit() for key, bias in value.items()):
            return None  # protobuf takes true for 1.0, and has no keys but numbers
        value = {int(key): bias for key, bias in value.items()}
    try:
        inference_pb2.GenerateRequest(**{field: value})
    except (TypeError, ValueError):
        return None
    return {field: value}


async def test_s_b26_the_table_of_wrong_values_is_refused_over_grpc_too(router: RunningRouter, stub: Any) -> None:
    golden = "".join(c.text for r in await _generate(stub) for c in r.choices)
    num_checked = 0
    for row in WRONG_VALUES:
        fields = _as_fields(row.field, row.value)
        # Absent and empty are one in protobuf; a number between two floats rounds to the bound.
        if not fields or row.value in ("", [], {}, None) or (row.field in ("model", "user") and not row.value):
            continue
        num_submits = len(router.workers[-1].submits)
        error = await _refusal(stub, **fields)
        assert error.code().name == CODES[row.status], (row, error.details())
        assert row.named in str(error.details()), (row, error.details())
        assert len(router.workers[-1].submits) == num_submits
        num_checked += 1
    assert num_checked > 50
    assert "".join(c.text for r in await _generate(stub) for c in r.choices) == golden


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {VOCAB_SIZE: 1.0}},
        {"temperature": float("nan")},
        {"top_p": float("inf")},
        {"stop_token_ids": [-1]},
        {"json_schema": "{"},
        {"regex": "(a"},
        {"speculation": "made up"},
        {"chat": inference_pb2.ChatPrompt()},
        {"token_ids": inference_pb2.TokenIds()},
        {"max_tokens": 0},
    ],
)
async def test_wrong_values_of_protobufs_own_kind(fields: dict[str, Any], stub: Any) -> None:
    assert (await _refusal(stub, **fields)).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_prompt_is_needed(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        _ = [r async for r in stub.Generate(inference_pb2.GenerateRequest(), timeout=60)]
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt" in str(raised.value.details())


async def test_s_b26_a_message_above_the_body_limit_is_resource_exhausted(stub: Any) -> None:
    error = await _refusal(stub, text="a" * 5_000_000)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await _generate(stub)


async def test_failures_have_their_statuses(start_router: StartRouter) -> None:
    router = await start_router()
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert (await _refusal(stub)).code() is grpc.StatusCode.UNAVAILABLE
        worker = await router.add_worker(router.new_worker("decode-a"))
        worker.refuse = lambda _: common_pb2.Failure(code="kv_transfer_failed", message="bad bytes")
        assert (await _refusal(stub)).code() is grpc.StatusCode.DATA_LOSS
        worker.refuse = None
        gate = asyncio.Event()

        async def pace(_: worker_pb2.SubmitRequest, __: int) -> None:
            await gate.wait()

        worker.pace = pace
        request = inference_pb2.GenerateRequest(text="x")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            _ = [r async for r in stub.Generate(request, timeout=1.5)]
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await worker.wait_for(lambda: len(worker.cancels) == 1)
        call = stub.Generate(request, timeout=60)
        await worker.wait_for(lambda: len(worker.submits) == 3)
        call.cancel()
        await worker.wait_for(lambda: len(worker.cancels) == 2)
        await router.until(lambda: router.core.service.num_running == 0)
        assert router.bookings() == [(0, 0, 0)]
        gate.set()


async def test_s_b37_keys_are_needed_over_grpc_too(start_router: StartRouter) -> None:
    keys = ApiKeys({hashlib.sha256(b"k").digest(): Tenant("alice")})
    router = await start_router(keys=keys)
    worker = await router.add_worker(router.new_worker("decode-a"))
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert (await _refusal(stub)).code() is grpc.StatusCode.UNAUTHENTICATED
        request = inference_pb2.GenerateRequest(text="x", max_tokens=1)
        call = stub.Generate(request, metadata=(("authorization", "Bearer k"),), timeout=60)
        assert [r async for r in call]
    assert worker.submits[0].tenant == "alice"


async def test_health_answers(router: RunningRouter) -> None:
    await router.grpc_front.set_ready(True)
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        reflection: Any = channel.unary_stream(path, request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            _ = [answer async for answer in reflection(b"", timeout=60)]
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
