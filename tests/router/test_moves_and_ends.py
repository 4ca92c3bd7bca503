"""What happens to a request when its client, its worker or its time goes away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from tandem.v1 import common_pb2, worker_pb2

from cluster.membership_state import ChangeKind
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.scripted_worker import ScriptedWorker, Step, expected_token

BODY: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 12, "temperature": 1, "seed": 3}


def _expected(worker: ScriptedWorker, num_tokens: int = 12) -> str:
    submit = worker.submits[0]
    return "".join(chr(expected_token(submit, position)) for position in range(num_tokens))


def _gate(after: int) -> tuple[asyncio.Event, Callable[[worker_pb2.SubmitRequest, int], Any]]:
    """A pace that lets `after` tokens through and the rest only once the event is set."""
    gate = asyncio.Event()

    async def pace(_: worker_pb2.SubmitRequest, num_sent: int) -> None:
        if num_sent >= after:
            await gate.wait()

    return gate, pace


async def _two_decode_workers(router: RunningRouter) -> tuple[ScriptedWorker, ScriptedWorker]:
    """The request goes to the first; the second is there when it is lost."""
    first = await router.add_worker(router.new_worker("decode-a"))
    return first, router.new_worker("decode-b")


# --- workers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 2, 6, 11])
async def test_f03_stream_goes_on_at_another_worker_with_the_tokens_it_would_have_had(
    after: int, start_router: StartRouter
) -> None:
    router = await start_router()
    first, second = await _two_decode_workers(router)
    gate, first.pace = _gate(after)
    async with router.client() as client:
        request = asyncio.create_task(client.completions.create(**BODY, stream=True))
        await first.wait_for(lambda: first.num_tokens_sent >= after and bool(first.submits))
        await router.add_worker(second)
        await first.stop()
        text = "".join([chunk.choices[0].text async for chunk in await request])
    assert text == _expected(first)
    (resumed,) = second.submits
    assert resumed.fence == 1
    assert "".join(map(chr, resumed.generated_token_ids)) == text[: len(resumed.generated_token_ids)]
    assert len(resumed.generated_token_ids) == after
    assert list(resumed.token_ids) == list(first.submits[0].token_ids)
    assert resumed.sampling == first.submits[0].sampling
    gate.set()


async def test_f03_usage_and_logprobs_of_a_moved_stream_are_those_of_an_undisturbed_one(
    start_router: StartRouter,
) -> None:
    router = await start_router()
    first, second = await _two_decode_workers(router)
    _, first.pace = _gate(5)
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        request = asyncio.create_task(http.post("/v1/completions", json={**BODY, "logprobs": 1, "prompt": "x" * 40}))
        await first.wait_for(lambda: first.num_tokens_sent >= 5)
        await router.add_worker(second)
        await first.stop()
        answer = (await request).json()
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 12
    assert "".join(answer["choices"][0]["logprobs"]["tokens"]) == answer["choices"][0]["text"]


async def test_f03_with_no_other_worker_the_stream_waits_for_the_restarted_one(start_router: StartRouter) -> None:
    router = await start_router()
    first = await router.add_worker(router.new_worker("decode-a"))
    _, first.pace = _gate(4)
    async with router.client() as client:
        request = asyncio.create_task(client.completions.create(**BODY, stream=True))
        await first.wait_for(lambda: first.num_tokens_sent >= 4)
        await first.stop()
        restarted = router.new_worker("decode-a", incarnation="two")
        await restarted.start()
        router.workers.append(restarted)
        router.announce(restarted, ChangeKind.RESTARTED)
        text = "".join([chunk.choices[0].text async for chunk in await request])
    assert text == _expected(first)
    assert restarted.submits[0].fence == 1


async def test_f09_a_request_that_outlived_two_workers_is_not_given_to_a_third(start_router: StartRouter) -> None:
    router = await start_router()
    workers = [await router.add_worker(router.new_worker(f"decode-{name}")) for name in "abc"]
    for worker in workers:
        worker.die_after_tokens = 1
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "request_poisoned"
    assert sum(len(worker.submits) for worker in workers) == 2


async def test_f20_workers_that_stop_in_order_cost_a_request_none_of_its_attempts(start_router: StartRouter) -> None:
    router = await start_router()
    workers = [await router.add_worker(router.new_worker(f"decode-{name}")) for name in "abcdef"]
    handed_over: list[str] = []

    def refuse(submit: worker_pb2.SubmitRequest) -> common_pb2.Failure | None:
        if submit.fence == 5:
            return None
        handed_over.append(submit.request_id)
        return common_pb2.Failure(code="worker_stopping", message="the worker stops", retryable=True)

    for worker in workers:
        worker.refuse = refuse
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    assert len(handed_over) == 5


async def test_deterministic_refusals_of_a_worker_are_not_retried(start_router: StartRouter) -> None:
    router = await start_router()
    workers = [await router.add_worker(router.new_worker(f"decode-{name}")) for name in "ab"]
    for worker in workers:
        worker.refuse = lambda _: common_pb2.Failure(code="invalid_request", message="no such thing", param="prompt")
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        answer = await http.post("/v1/completions", json=BODY)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert sum(len(worker.submits) for worker in workers) == 1


async def test_s_b75_failure_in_mid_stream_is_one_error_event_and_the_client_raises(
    start_router: StartRouter,
) -> None:
    router = await start_router()
    worker = await router.add_worker(router.new_worker("decode-a"))

    def script(submit: worker_pb2.SubmitRequest) -> list[Any]:
        unheard_of: Any = 99
        broken = worker_pb2.RequestEvent(request_id=submit.request_id, finish_reason=unheard_of)
        return [Step([97]), Step([98], broken)]

    worker.script = script
    async with router.client() as client:
        stream = await client.completions.create(**BODY, stream=True)
        with pytest.raises(openai.APIError):
            _ = [chunk async for chunk in stream]
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        text = (await http.post("/v1/completions", json={**BODY, "stream": True})).text
    events = text.strip().split("\n\n")
    assert "[DONE]" not in text
    assert set(json.loads(events[-1].removeprefix("data: "))) == {"error"}
    assert '"finish_reason":"' not in text


async def test_s_b64_f08_without_workers_the_router_lives_says_503_and_serves_once_one_is_there(
    start_router: StartRouter,
) -> None:
    router = await start_router()
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        assert (await http.get("/livez")).status_code == 200
        assert (await http.get("/readyz")).status_code == 503
        answer = await http.post("/v1/completions", json=BODY)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_workers_available"
        assert int(answer.headers["retry-after"]) >= 1
        assert "x-should-retry" not in answer.headers
        await router.add_worker(router.new_worker("decode-a"))
        assert (await http.get("/readyz")).status_code == 200
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_aggregated_workers_prefill_for_themselves_which_is_no_fallback(start_router: StartRouter) -> None:
    router = await start_router(prefill_fallback="deny")
    worker = await router.add_worker(router.new_worker("both", "aggregated"))
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        assert (await http.get("/statusz")).json()["fallbacks"] == []
    assert not worker.submits[0].prefill


async def test_a_worker_that_left_the_membership_ends_what_it_runs(start_router: StartRouter) -> None:
    router = await start_router()
    worker = await router.add_worker(router.new_worker("decode-a"))
    gate, worker.pace = _gate(3)
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        request = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await worker.wait_for(lambda: worker.num_tokens_sent >= 3)
        router.announce(worker, ChangeKind.LEFT)
        assert not router.is_routable(worker)
        gate.set()
        assert (await request).json()["choices"][0]["text"] == _expected(worker)
        assert (await http.post("/v1/completions", json=BODY)).status_code == 503
        router.announce(worker)  # its heartbeat is back
        await router.until(lambda: router.is_routable(worker))
        assert worker.num_sessions == 1
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


# --- clients ----------------------------------------------------------------------------------------------------------


async def _raw_request(
    router: RunningRouter, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = router.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return reader, writer


@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_f17_s_b73_a_client_that_hangs_up_is_cancelled_at_its_worker_at_once(
    after: int, is_streamed: bool, router: RunningRouter
) -> None:
    worker = router.workers[-1]
    gate, worker.pace = _gate(after)
    reader, writer = await _raw_request(router, {**BODY, "stream": is_streamed, "n": 2})
    await worker.wait_for(lambda: len(worker.submits) == 2 and worker.num_tokens_sent >= 2 * after)
    if is_streamed and after:
        await reader.readuntil(b"data: ")
    writer.close()
    await worker.wait_for(lambda: len(worker.cancels) == 2)
    assert {cancel.request_id for cancel in worker.cancels} == {submit.request_id for submit in worker.submits}
    await router.until(lambda: router.bookings() == [(0, 0, 0)] * 2)
    await router.until(lambda: router.core.service.num_running == 0)
    gate.set()


async def test_f39_deadline_is_a_504_in_time_and_reaches_the_worker(
    router: RunningRouter, http: httpx.AsyncClient
) -> None:
    worker = router.workers[-1]
    gate, worker.pace = _gate(0)
    started_s = time.monotonic()
    answer = await http.post("/v1/completions", json=BODY, headers={"X-Request-Timeout-Ms": "1500"})
    assert 1.4 < time.monotonic() - started_s < 20.0
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    await worker.wait_for(lambda: len(worker.cancels) == 1)
    assert 0 < worker.submits[0].deadline_ms <= 1500
    gate.set()


async def test_f39_deadline_in_mid_stream_is_an_error_event(router: RunningRouter, http: httpx.AsyncClient) -> None:
    gate, router.workers[-1].pace = _gate(2)
    headers = {"X-Request-Timeout-Ms": "1500"}
    text = (await http.post("/v1/completions", json={**BODY, "stream": True}, headers=headers)).text
    assert "deadline_exceeded" in text.split("\n\n")[-2]
    assert "[DONE]" not in text
    gate.set()


@pytest.mark.parametrize("value", ["99", "600001", "abc", "-1", "1.5", "9" * 30])
async def test_f39_deadlines_outside_their_bounds_are_refused(value: str, http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json=BODY, headers={"X-Request-Timeout-Ms": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Timeout-Ms")


async def test_more_requests_than_allowed_are_503_with_retry_after(start_router: StartRouter) -> None:
    router = await start_router(max_concurrent_requests=1)
    worker = await router.add_worker(router.new_worker("decode-a"))
    gate, worker.pace = _gate(0)
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        running = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await worker.wait_for(lambda: len(worker.submits) == 1)
        refused = await http.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
        assert refused.headers["retry-after"] == "1"
        gate.set()
        assert (await running).status_code == 200
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
