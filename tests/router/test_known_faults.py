"""Faults that other systems had at their router's edges, over HTTP and over gRPC: the names carry their numbers."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest_asyncio
from tandem.v1 import common_pb2, inference_pb2, inference_pb2_grpc, worker_pb2

from cluster.membership_state import ChangeKind
from router.cache_view import prompt_hashes
from tests.router.byte_tokenizer import MAX_MODEL_LEN
from tests.router.conftest import MODEL, RunningRouter, StartRouter, started
from tests.router.fronts import CLIENT_TIMEOUT_S, Front, Reply
from tests.router.scripted_worker import ScriptedWorker

AT_ONCE_S = 20.0


async def ask(front: Front, router: RunningRouter, **fields: Any) -> Reply:
    """A short request: what the test says of it, and what every test here means."""
    return await front.ask(router, **{"prompt": [97] * 3, "max_tokens": 4, "temperature": 0, **fields})


async def explained(router: RunningRouter, request_id: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=60) as client:
        placement: dict[str, Any] = (await client.get(f"/explain/{request_id}")).json()["placements"][0]
    return placement


def failing(code: str, stage: str, *, is_retryable: bool = False) -> Callable[[Any], common_pb2.Failure]:
    return lambda _: common_pb2.Failure(code=code, message="as it is", stage=stage, retryable=is_retryable)


async def nothing_is_held(router: RunningRouter) -> None:
    """Every booking, admission and tenant's count is back at nothing."""
    await router.until(lambda: set(router.bookings()) == {(0, 0, 0)})
    await router.until(lambda: router.core.service.admission.num_requests == 0)
    admission = router.core.service.admission.status()
    assert (admission["requests"], sum(admission["waiting"].values()), admission["tenants"]) == (0, 0, {})
    record = router.core.record()
    assert (record.running_requests, record.waiting_requests) == (0, 0)


# --- why a prefix was not found ---------------------------------------------------------------------------------------


async def test_rt10_an_explanation_says_why_no_prefix_counted(start_router: StartRouter, front: Front) -> None:
    router = await start_router()
    worker = await router.add_worker(router.new_worker("both", "aggregated"))

    async def cause(num_tokens: int, first: int) -> str:
        reply = await ask(front, router, prompt=[first, *[97] * (num_tokens - 1)])
        because: str = (await explained(router, reply.request_id))["no_match_because"]
        return because

    assert await cause(9, 1) == "its 9 tokens do not fill a block of 16"
    assert await cause(40, 2) == "no worker has told of a cached block yet: are its KV events published and read?"
    view = router.core.cache_view
    assert view is not None
    view.index.stored(worker.worker_id, prompt_hashes([1] * 16, _scope(router, worker)))  # type: ignore[arg-type]
    assert await cause(40, 3) == "no worker holds its first block"
    assert await cause(40, 3) == ""  # this one is expected where the last one went


async def test_rt10_a_policy_that_looks_at_no_cache_says_so(start_router: StartRouter, front: Front) -> None:
    router = await start_router(policy="round_robin")
    await router.add_worker(router.new_worker("both", "aggregated"))
    because = (await explained(router, (await ask(front, router)).request_id))["no_match_because"]
    assert because == "the policy round_robin does not look at caches"


def _scope(router: RunningRouter, worker: ScriptedWorker) -> Any:
    scope = router.core.registry.hash_scope(worker.submits[0].scope.scope_key)
    assert scope is not None
    return scope


async def test_s_b69_without_reports_and_events_requests_go_by_what_was_booked_and_the_explanation_says_so(
    start_router: StartRouter, front: Front
) -> None:
    """Nothing falls to chance in silence: what is not known is a term that is missing, not another policy."""
    router = await start_router()
    workers = [await router.add_worker(router.new_worker(f"both-{name}", "aggregated")) for name in "abc"]
    gate = asyncio.Event()
    for worker in workers:
        worker.pace = lambda *_: gate.wait()
    for state, _ in router.core.registry.workers:
        state.load_at_s = -1e9
    asked = [asyncio.create_task(ask(front, router, prompt=[number] * 5)) for number in range(6)]
    await router.until(lambda: sum(len(worker.submits) for worker in workers) == 6)
    assert [len(worker.submits) for worker in workers] == [2, 2, 2]
    gate.set()
    for reply in await asyncio.gather(*asked):
        placement = await explained(router, reply.request_id)
        assert placement["policy"] == "cache_aware"
        assert placement["reason"].startswith(("lowest predicted time", "near tie: the less busy"))
    async with httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=60) as client:
        metrics = (await client.get("/metrics")).text
    assert f'tandem_workers{{model="{MODEL}",role="aggregated",state="ready"}} 3.0' in metrics


# --- what cannot succeed fails at once, and holds nothing -------------------------------------------------------------


async def test_rt32_a_prompt_at_the_context_limit_is_refused_at_once_and_holds_no_slot(
    router: RunningRouter, front: Front
) -> None:
    started_s = time.monotonic()
    reply = await ask(front, router, prompt=[97] * MAX_MODEL_LEN)
    assert (reply.code, reply.text) == ("context_length_exceeded", "")
    assert time.monotonic() - started_s < AT_ONCE_S
    assert not any(worker.submits for worker in router.workers)
    await nothing_is_held(router)


async def test_rt32_what_prefill_refuses_is_the_clients_error_at_once(router: RunningRouter, front: Front) -> None:
    worker = router.workers[-1]
    worker.refuse = failing("invalid_request", "prefill")
    started_s = time.monotonic()
    reply = await ask(front, router)
    assert reply.is_client_error
    assert (reply.code, reply.stage, reply.text) == ("invalid_request", "prefill", "")
    assert time.monotonic() - started_s < AT_ONCE_S
    assert len(worker.submits) == 1
    await nothing_is_held(router)


async def test_rt33_a_decode_worker_that_breaks_off_is_replaced_and_its_prefill_is_let_go(
    start_router: StartRouter, front: Front
) -> None:
    router = await start_router()
    await router.add_worker(router.new_worker("prefill-0", "prefill"))
    workers = [await router.add_worker(router.new_worker(f"decode-{name}")) for name in "ab"]
    breaking: list[str] = []

    def break_first(worker: ScriptedWorker) -> Callable[[worker_pb2.SubmitRequest, int], Awaitable[None]]:
        async def pace(_: worker_pb2.SubmitRequest, __: int) -> None:
            if not breaking:
                breaking.append(worker.worker_id)
                worker.die_after_tokens = 0

        return pace

    for worker in workers:
        worker.pace = break_first(worker)
    started_s = time.monotonic()
    reply = await ask(front, router)
    assert len(reply.text) == 4
    assert time.monotonic() - started_s < AT_ONCE_S
    (other,) = [worker for worker in workers if worker.worker_id not in breaking]
    assert [submit.fence for submit in other.submits] == [1]
    await nothing_is_held(router)


async def test_rt34_a_failed_prefill_ends_the_request_at_once_and_says_where_it_failed(
    router: RunningRouter, front: Front
) -> None:
    worker = router.workers[-1]
    worker.refuse = failing("internal_error", "prefill")
    started_s = time.monotonic()
    reply = await ask(front, router)
    assert reply.status in (500, "INTERNAL")
    assert (reply.code, reply.stage, reply.text) == ("internal_error", "prefill", "")
    assert time.monotonic() - started_s < AT_ONCE_S
    failed = router.core.metrics_registry.get_sample_value(
        "tandem_request_failure_total", {"model": MODEL, "code": "internal_error", "stage": "prefill"}
    )
    assert failed == 1
    await nothing_is_held(router)


# --- counts that scaling and fairness read ----------------------------------------------------------------------------


async def test_rt44_s_b72_refused_requests_leave_no_count_behind(start_router: StartRouter, front: Front) -> None:
    router = await start_router(max_concurrent_requests=2)
    worker = await router.add_worker(router.new_worker("decode-a"))
    gate = asyncio.Event()
    worker.pace = lambda *_: gate.wait()
    running = [asyncio.create_task(ask(front, router)) for _ in range(2)]
    await worker.wait_for(lambda: len(worker.submits) == 2)
    refused = await asyncio.gather(*(ask(front, router) for _ in range(25)))
    assert {reply.code for reply in refused} == {"server_is_overloaded"}
    assert router.core.record().running_requests == 2  # equal to what really runs while it runs
    gate.set()
    assert all(reply.text for reply in await asyncio.gather(*running))
    await nothing_is_held(router)


async def test_s_b72_a_draining_worker_and_a_draining_router_take_nothing(
    start_router: StartRouter, front: Front
) -> None:
    router = await start_router()
    worker = await router.add_worker(router.new_worker("decode-a"))
    assert (await ask(front, router)).text
    router.announce(worker, ChangeKind.LEFT)
    assert (await ask(front, router)).code == "no_workers_available"
    assert len(worker.submits) == 1
    router.announce(worker)
    await router.until(lambda: router.is_routable(worker))
    router.core.service.is_draining = True
    assert (await ask(front, router)).code == "server_is_overloaded"
    assert len(worker.submits) == 1
    await nothing_is_held(router)


async def test_rt43_two_routers_in_one_process_share_no_index_and_no_count(
    start_router: StartRouter, other_directory_router: RunningRouter, front: Front
) -> None:
    first, second = await start_router(), other_directory_router
    for router in (first, second):
        await router.add_worker(router.new_worker("both", "aggregated"))
    prompt = [98] * 200
    await ask(front, first, prompt=prompt)
    views = [router.core.cache_view for router in (first, second)]
    assert [view is not None and view.index.status().speculative_entries for view in views] == [12, 0]
    first.announce(first.workers[0], ChangeKind.LEFT)
    assert (await ask(front, second, prompt=prompt)).text
    assert (await ask(front, first, prompt=prompt)).code == "no_workers_available"


@pytest_asyncio.fixture(loop_scope="session")
async def other_directory_router() -> AsyncIterator[RunningRouter]:
    """A second router whose workers have the same names and sockets of their own."""
    directory = Path(tempfile.mkdtemp(prefix="tdm-"))
    router = await started(directory)
    yield router
    await router.stop()
    shutil.rmtree(directory)


# --- clients that leave -----------------------------------------------------------------------------------------------


async def test_s_b71_hundreds_of_calls_that_are_cut_off_leave_no_task_and_no_sequence(router: RunningRouter) -> None:
    worker = router.workers[-1]
    gate = asyncio.Event()
    worker.pace = lambda _, num_sent: gate.wait() if num_sent >= 2 else asyncio.sleep(0)
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)

        async def cut_off(after: int) -> None:
            """Two tokens come, in one message or in two: more than one is not waited for."""
            request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]), max_tokens=8)
            call = stub.Generate(request, timeout=CLIENT_TIMEOUT_S)
            for _ in range(after):
                await call.read()
            call.cancel()

        await cut_off(1)
        await nothing_is_held(router)
        await router.until(lambda: len(worker.cancels) == len(worker.submits))
        num_tasks = len(asyncio.all_tasks())
        for _ in range(20):
            await asyncio.gather(*(cut_off(number % 2) for number in range(20)))
        await nothing_is_held(router)
    assert len(worker.submits) > 200
    session = router.core.registry.session_of(next(s for s, _ in router.core.registry.workers if s.generates))
    assert session.num_live == 0
    gate.set()
    await router.until(lambda: len(asyncio.all_tasks()) <= num_tasks)
