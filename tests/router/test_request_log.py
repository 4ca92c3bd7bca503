"""Log lines of requests that ended: failures of the server always, every request where it was asked for."""

from __future__ import annotations

import logging

import grpc.aio
import httpx
import pytest
from tandem.v1 import common_pb2, inference_pb2, inference_pb2_grpc

from tests.router.conftest import MODEL, StartRouter

BODY = {"model": MODEL, "prompt": "a secret thing", "max_tokens": 3}
NAMED = {"x-request-id": "mine-1"}


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [{**vars(record)} for record in caplog.records if record.name == "router.request_log"]


async def test_each_request_has_a_line_with_its_ids_and_numbers_where_it_is_asked_for(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    router = await start_router(log_requests=True)
    await router.add_worker(router.new_worker("decode-a"))
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        answer = await http.post("/v1/completions", json=BODY, headers=NAMED)
        too_long = await http.post("/v1/completions", json={**BODY, "prompt": "x" * 510})
    answered, refused = lines(caplog)
    assert (answered["message"], answered["levelname"], answered["status"]) == ("answered", "INFO", 200)
    assert (answered["request_id"], answered["client_request_id"]) == (answer.headers["x-request-id"], "mine-1")
    assert (answered["prompt_tokens"], answered["completion_tokens"], answered["finish_reason"]) == (14, 3, "length")
    total, first = answered["total_ms"], answered["first_token_ms"]
    assert isinstance(total, float)
    assert isinstance(first, float)
    assert total >= first > 0
    assert (refused["message"], refused["status"], refused["code"]) == ("not answered", 400, "context_length_exceeded")
    assert refused["request_id"] == too_long.headers["x-request-id"], "a refused client can say which one it was"
    assert "secret" not in str([record.__dict__ for record in caplog.records])


async def test_a_failure_of_the_server_has_a_line_anyhow_and_nothing_else_has(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    router = await start_router()
    worker = await router.add_worker(router.new_worker("decode-a"))
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        await http.post("/v1/completions", json=BODY)
        await http.post("/v1/completions", json={**BODY, "prompt": "x" * 510})
        assert not lines(caplog)
        worker.refuse = lambda _: common_pb2.Failure(code="engine_failure", message="broken", retryable=False)
        answer = await http.post("/v1/completions", json=BODY, headers=NAMED)
    assert answer.status_code == 500
    (line,) = lines(caplog)
    assert (line["message"], line["levelname"], line["status"]) == ("not answered", "WARNING", 500)
    assert (line["request_id"], line["client_request_id"]) == (answer.headers["x-request-id"], "mine-1")
    assert line["was_placed"] is True


async def test_requests_over_grpc_have_the_same_lines(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    router = await start_router(log_requests=True)
    await router.add_worker(router.new_worker("decode-a"))
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        request = inference_pb2.GenerateRequest(text="abc", max_tokens=2)
        stub = inference_pb2_grpc.InferenceStub(channel)
        last = [response async for response in stub.Generate(request, timeout=60, metadata=(("x-request-id", "g"),))][
            -1
        ]
    (line,) = lines(caplog)
    assert (line["request_id"], line["client_request_id"], line["status"]) == (last.request_id, "g", 200)
