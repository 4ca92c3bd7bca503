"""The Session stream: multiplexing, one message a step, limits checked again, aborts that give everything back."""

from __future__ import annotations

import asyncio
import math
import time

import grpc
import pytest
from tandem.v1 import common_pb2, worker_pb2

from cluster.sampling_params import SamplingParams
from tests.decode_worker.conftest import RouterClient
from tests.decode_worker.counting_engine import UNLIMITED_STEPS, expected_tokens
from tests.decode_worker.polling import DEADLINE_S, until
from tests.decode_worker.session_node import SessionNode


async def test_requests_of_one_router_share_a_stream(router: RouterClient) -> None:
    prompts = {f"r{index}": [index, index + 1, index + 2] for index in range(8)}
    for request_id, prompt in prompts.items():
        await router.submit(request_id, prompt, 20)
    tokens = await router.read_until_end(*prompts)
    assert tokens == {request_id: expected_tokens(prompt, 20) for request_id, prompt in prompts.items()}


async def test_tokens_of_one_step_travel_in_one_message(router: RouterClient, node: SessionNode) -> None:
    node.engine.permit(-(10**9))  # no step yet
    for index in range(4):
        await router.submit(f"r{index}", [index], 1)
    await until(lambda: len(node.engine.submitted) == 4, "all four are in the engine")
    node.engine.permit(1)
    step = (await router.read()).step
    assert sorted(step.request_ids) == ["r0", "r1", "r2", "r3"]
    assert list(step.token_counts) == [1, 1, 1, 1]
    assert step.load.running_requests == 4


async def test_first_and_last_events_carry_usage_and_timeline(router: RouterClient) -> None:
    await router.submit("r", [1, 2, 3], 2)
    first = (await router.read()).step.events[0]
    assert (first.prompt_tokens, first.finish_reason) == (3, common_pb2.FINISH_REASON_UNSPECIFIED)
    assert first.timeline.decode_worker_id == "decode-0"
    assert first.timeline.prefill_worker_id == ""
    last = (await router.read()).step.events[0]
    assert (last.completion_tokens, last.finish_reason) == (2, common_pb2.FINISH_REASON_LENGTH)
    assert last.timeline.first_token_us == first.timeline.first_token_us > 0


@pytest.mark.parametrize(
    ("sampling", "token_ids", "code", "param"),
    [
        (SamplingParams(max_tokens=0), [1], "invalid_request", "max_tokens"),
        (SamplingParams(max_tokens=1, temperature=2.5), [1], "invalid_request", "temperature"),
        (SamplingParams(max_tokens=1, temperature=math.nan), [1], "invalid_request", "temperature"),
        (SamplingParams(max_tokens=1, top_k=0), [1], "invalid_request", "top_k"),
        (SamplingParams(max_tokens=1, stop_token_ids=(1000,)), [1], "invalid_token_id", "stop_token_ids"),
        (SamplingParams(max_tokens=1, allowed_token_ids=(1000,)), [1], "invalid_token_id", "allowed_token_ids"),
        (SamplingParams(max_tokens=1, bad_words=((1, 1000),)), [1], "invalid_token_id", "bad_words"),
        (SamplingParams(max_tokens=1, bad_words=((),)), [1], "invalid_request", "bad_words"),
        (SamplingParams(max_tokens=1), [1000], "invalid_token_id", "prompt"),
        (SamplingParams(max_tokens=1), [-1], "invalid_token_id", "prompt"),
        (SamplingParams(max_tokens=1), [], "invalid_request", "prompt"),
        (SamplingParams(max_tokens=512), [1], "context_length_exceeded", "max_tokens"),
    ],
)
async def test_f37_limits_are_enforced_again(
    router: RouterClient, sampling: SamplingParams, token_ids: list[int], code: str, param: str, node: SessionNode
) -> None:
    await router.submit("bad", token_ids, 1, sampling=sampling.to_proto())
    failed = (await router.read()).failed
    assert (failed.request_id, failed.failure.code, failed.failure.param) == ("bad", code, param)
    assert node.engine.submitted == []
    # S-B36: the stream and the engine serve on.
    await router.submit("good", [1, 2], 3)
    assert (await router.read_until_end("good"))["good"] == expected_tokens([1, 2], 3)


async def test_cancel_ends_one_request_and_spares_the_others(router: RouterClient, node: SessionNode) -> None:
    node.engine.permit(-(10**9))
    await router.submit("stays", [1], 400)
    await router.submit("goes", [2], 400)
    await until(lambda: len(node.engine.submitted) == 2, "both run")
    node.engine.permit(5)
    await router.cancel("goes")
    await until(lambda: "goes/1" in node.engine.cancelled, "the engine stopped one")
    node.engine.permit(400)
    tokens = await router.read_until_end("stays", "goes")
    assert tokens["stays"] == expected_tokens([1], 400)
    assert "goes/1" in node.engine.cancelled


async def test_kv11_cancelling_twice_or_after_the_end_changes_nothing(router: RouterClient) -> None:
    await router.submit("r", [1], 1)
    await router.read_until_end("r")
    for _ in range(3):
        await router.cancel("r")
    await router.cancel("never seen")
    await router.submit("next", [5], 2)
    assert (await router.read_until_end("next"))["next"] == expected_tokens([5], 2)


async def test_broken_stream_aborts_all_requests_of_it_only(
    router: RouterClient, target: str, node: SessionNode
) -> None:
    other = RouterClient(target, "router-1")
    await other.hello()
    node.engine.permit(-(10**9))
    await router.submit("survives", [1], 3)
    for index in range(5):
        await other.submit(f"dies-{index}", [index], 3)
    await until(lambda: len(node.live) == 6 and len(node.engine.submitted) == 6, "all run")
    await other.close()
    await until(lambda: len(node.live) == 1, "the broken stream's requests are gone")
    assert sorted(node.engine.cancelled) == [f"dies-{index}/1" for index in range(5)]
    node.engine.permit(100)
    assert (await router.read_until_end("survives"))["survives"] == expected_tokens([1], 3)


async def test_older_fence_is_a_zombie(router: RouterClient, node: SessionNode) -> None:
    node.engine.permit(-(10**9))
    await router.submit("r", [1], 3, fence=2)
    await until(lambda: len(node.engine.submitted) == 1, "the first placement runs")
    await router.submit("r", [1], 3, fence=1)
    failed = (await router.read()).failed
    assert (failed.fence, failed.failure.code) == (1, "stale_fence")
    await router.cancel("r", fence=1)  # speaks of the zombie
    await router.submit("r", [1], 3, fence=3)
    await until(lambda: "r/2" in node.engine.cancelled, "the older placement is aborted")
    node.engine.permit(100)
    step = (await router.read()).step
    assert (step.events[0].fence, step.events[0].finish_reason) == (2, common_pb2.FINISH_REASON_CANCELLED)
    assert (await router.read_until_end("r"))["r"] == expected_tokens([1], 3)


async def test_f39_deadline_ends_the_request(router: RouterClient, node: SessionNode) -> None:
    node.engine.permit(-(10**9))
    started = time.monotonic()
    await router.submit("r", [1], 3, deadline_ms=1000)
    failed = (await router.read()).failed
    assert failed.failure.code == "deadline_exceeded"
    assert 0.9 <= time.monotonic() - started < 20.0
    await until(lambda: "r/1" in node.engine.cancelled, "the engine stopped it")


async def test_draining_worker_refuses_new_requests_and_finishes_the_running(
    router: RouterClient, node: SessionNode
) -> None:
    node.engine.permit(-(10**9))
    await router.submit("running", [1], 3)
    await until(lambda: len(node.engine.submitted) == 1, "it runs")
    node.is_draining = True
    await router.submit("late", [1], 3)
    failed = (await router.read()).failed
    assert (failed.request_id, failed.failure.retryable) == ("late", True)
    node.engine.permit(100)
    assert (await router.read_until_end("running"))["running"] == expected_tokens([1], 3)
    await asyncio.wait_for(node.live.wait_until_idle(), DEADLINE_S)


async def test_f18_router_that_never_reads_is_cut_off(target: str, node: SessionNode) -> None:
    node.engine.permit(-UNLIMITED_STEPS)  # all eight are there before the first token is
    slow = RouterClient(target, "slow")
    await slow.hello()
    for index in range(8):
        await slow.submit(f"r{index}", [index], 400, sampling=SamplingParams(max_tokens=400, logprobs=0).to_proto())
    await until(lambda: len(node.engine.submitted) == 8, "submitted")
    sessions = list(node.service.sessions)
    sessions[0].outbox._max_messages = 0  # as if as much had piled up as may
    node.engine.permit(1)
    await until(lambda: len(node.live) == 0, "its requests are aborted")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await slow.read_until_broken()
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    await slow.close()


async def test_first_message_must_be_hello(target: str) -> None:
    client = RouterClient(target, "rude")
    await client.cancel("x")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.read()
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    await client.close()


async def test_other_protocol_version_is_refused(target: str) -> None:
    client = RouterClient(target, "old")
    hello = worker_pb2.RouterHello(router_id="old", incarnation="1", protocol_version=99)
    await client.stream.write(worker_pb2.RouterMessage(hello=hello))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.read()
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    await client.close()


async def test_f20_a_worker_whose_drain_is_over_hands_its_requests_over_and_has_nothing_left(
    router: RouterClient, node: SessionNode
) -> None:
    node.engine.permit(-(10**9))
    await router.submit("running", [1], 3)
    await until(lambda: len(node.engine.submitted) == 1, "it runs")
    (flow,) = node.live.all()
    flow.hand_over()
    failed = (await router.read()).failed
    assert (failed.request_id, failed.failure.code, failed.failure.retryable) == ("running", "worker_stopping", True)
    await asyncio.wait_for(node.live.wait_until_idle(), DEADLINE_S)
    assert "running/1" in node.engine.cancelled
    flow.hand_over()  # once it has ended it changes nothing
