"""How requests end, asked for over HTTP and over gRPC: whoever breaks off, nothing of it is left, and it is said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tandem.v1 import common_pb2, worker_pb2

from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fronts import Front, Reply
from tests.router.scripted_worker import ScriptedWorker, Step, expected_token
from tests.router.test_known_faults import nothing_is_held

MAX_TOKENS = 12


async def ask(front: Front, router: RunningRouter, **fields: Any) -> Reply:
    return await front.ask(router, **{"prompt": "abc", "max_tokens": MAX_TOKENS, "temperature": 1, "seed": 3, **fields})


def held_after(num_tokens: int) -> tuple[asyncio.Event, Callable[[worker_pb2.SubmitRequest, int], Any]]:
    """A pace that lets so many tokens through, and the rest once the event is set."""
    gate = asyncio.Event()

    async def pace(_: worker_pb2.SubmitRequest, num_sent: int) -> None:
        if num_sent >= num_tokens:
            await gate.wait()

    return gate, pace


def text_of(submit: worker_pb2.SubmitRequest) -> str:
    return "".join(chr(expected_token(submit, position)) for position in range(MAX_TOKENS))


# --- every kind of end ------------------------------------------------------------------------------------------------

ENDS = (
    "well",
    "worker fails",
    "pool is full",
    "stream breaks",
    "deadline",
    "client leaves early",
    "client leaves late",
)


async def test_rt27_counters_are_zero_after_every_kind_of_end(start_router: StartRouter, front: Front) -> None:
    """Each kind many times, in turn and at once, with one choice and with several."""
    router = await start_router()
    await router.add_worker(router.new_worker("prefill-0", "prefill"))
    worker = await router.add_worker(router.new_worker("decode-0"))
    kind_of: dict[str, str] = {}  # by the request's user

    def refuse(submit: worker_pb2.SubmitRequest) -> common_pb2.Failure | None:
        kind = _kind(submit)
        if kind == "worker fails":
            return common_pb2.Failure(code="internal_error", message="broken")
        if kind == "pool is full":
            return common_pb2.Failure(code="kv_capacity", message="full", retryable=True)
        return None

    def script(submit: worker_pb2.SubmitRequest) -> list[Step]:
        unheard_of: Any = 99
        broken = worker_pb2.RequestEvent(request_id=submit.request_id, fence=submit.fence, finish_reason=unheard_of)
        ended = worker_pb2.RequestEvent(request_id=submit.request_id, fence=submit.fence)
        ended.finish_reason = common_pb2.FINISH_REASON_LENGTH
        return [Step([97]), Step([98], broken if _kind(submit) == "stream breaks" else ended)]

    async def pace(submit: worker_pb2.SubmitRequest, num_sent: int) -> None:
        kind = _kind(submit)
        if kind in ("deadline", "client leaves early") or (kind == "client leaves late" and num_sent):
            await asyncio.Event().wait()

    worker.refuse, worker.script, worker.pace = refuse, script, pace

    async def one(number: int) -> str:
        kind = ENDS[number % len(ENDS)]
        fields = {"prompt": [ENDS.index(kind), 1, 2], "n": 1 + number % 3, "max_tokens": 2}
        num_submits = len(worker.submits)
        asking = asyncio.create_task(
            ask(front, router, **fields, **({"timeout_ms": 300} if kind == "deadline" else {}))
        )
        if kind.startswith("client leaves"):
            await worker.wait_for(lambda: len(worker.submits) > num_submits)
            asking.cancel()
        (reply,) = await asyncio.gather(asking, return_exceptions=True)
        if isinstance(reply, Reply):
            kind_of[reply.code or "well"] = kind
        return kind

    for begin in range(0, 140, 14):
        await asyncio.gather(*(one(begin + number) for number in range(14)))
    assert {"well", "internal_error", "kv_capacity", "deadline_exceeded"} <= set(kind_of), kind_of
    await nothing_is_held(router)
    worker.refuse = worker.script = worker.pace = None
    assert (await ask(front, router)).is_whole


def _kind(submit: worker_pb2.SubmitRequest) -> str:
    return ENDS[submit.token_ids[0]] if submit.token_ids[0] < len(ENDS) else "well"


@pytest.mark.parametrize("after", [0, 4])
async def test_s_b73_f17_who_leaves_is_cancelled_at_the_worker_at_once(
    after: int, router: RunningRouter, front: Front
) -> None:
    worker = router.workers[-1]
    gate, worker.pace = held_after(after)
    asking = asyncio.create_task(ask(front, router, n=2))
    await worker.wait_for(lambda: len(worker.submits) == 2 and worker.num_tokens_sent >= 2 * after)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await worker.wait_for(lambda: len(worker.cancels) == 2)
    assert {cancel.request_id for cancel in worker.cancels} == {submit.request_id for submit in worker.submits}
    await nothing_is_held(router)
    assert worker.num_tokens_sent == 2 * after, "it went on without a reader"
    gate.set()


async def test_s_b75_an_answer_that_breaks_off_never_looks_whole(start_router: StartRouter, front: Front) -> None:
    router = await start_router()
    worker = await router.add_worker(router.new_worker("decode-a"))

    def script(submit: worker_pb2.SubmitRequest) -> list[Step]:
        unheard_of: Any = 99
        broken = worker_pb2.RequestEvent(request_id=submit.request_id, finish_reason=unheard_of)
        return [Step([97]), Step([98], broken)]

    worker.script = script
    reply = await ask(front, router)
    assert not reply.is_whole
    assert reply.code == "internal_error"
    assert reply.finish_reasons == {}
    assert reply.usages == []
    await nothing_is_held(router)


# --- workers that are lost, or never there ----------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 6])
async def test_f03_s_b75_a_stream_goes_on_at_another_worker_with_the_tokens_it_would_have_had(
    after: int, start_router: StartRouter, front: Front
) -> None:
    router = await start_router()
    first = await router.add_worker(router.new_worker("decode-a"))
    gate, first.pace = held_after(after)
    asking = asyncio.create_task(ask(front, router))
    await first.wait_for(lambda: first.num_tokens_sent >= after and bool(first.submits))
    second = await router.add_worker(router.new_worker("decode-b"))
    await first.stop()
    reply = await asking
    assert (reply.text, reply.is_whole) == (text_of(first.submits[0]), True)
    (resumed,) = second.submits
    assert (resumed.fence, len(resumed.generated_token_ids)) == (1, after)
    gate.set()


async def test_s_b65_a_worker_that_refused_is_not_asked_again(start_router: StartRouter, front: Front) -> None:
    router = await start_router()
    workers = [await router.add_worker(router.new_worker(f"decode-{name}")) for name in "abc"]

    def is_full(_: worker_pb2.SubmitRequest) -> common_pb2.Failure:
        return common_pb2.Failure(code="kv_capacity", message="full", retryable=True)

    for worker in workers[:2]:
        worker.refuse = is_full
    assert (await ask(front, router)).is_whole
    assert all(len(worker.submits) <= 1 for worker in workers)
    workers[2].refuse = is_full
    refused = await ask(front, router)
    assert (refused.status in (503, "UNAVAILABLE"), refused.code) == (True, "kv_capacity")
    assert sum(len(worker.submits) for worker in workers) <= 6


async def test_s_b64_f08_without_workers_the_router_says_so_and_serves_once_one_is_there(
    start_router: StartRouter, front: Front
) -> None:
    router = await start_router()
    refused = await ask(front, router)
    assert (refused.status in (503, "UNAVAILABLE"), refused.code) == (True, "no_workers_available")
    assert refused.retry_after_s >= 1
    await router.add_worker(router.new_worker("decode-a"))
    assert (await ask(front, router)).is_whole


@pytest.mark.parametrize("fallback", ["allow", "deny"])
async def test_rt35_no_ready_prefill_worker_is_a_counted_fallback_or_a_refusal(
    fallback: str, start_router: StartRouter, front: Front
) -> None:
    router = await start_router(prefill_fallback=fallback)
    decode: ScriptedWorker = await router.add_worker(router.new_worker("decode-a"))
    reply = await ask(front, router)
    if fallback == "deny":
        assert (reply.status in (503, "UNAVAILABLE"), reply.code) == (True, "no_workers_available")
        assert not decode.submits
        return
    assert reply.is_whole
    assert not decode.submits[0].prefill
    assert decode.submits[0].allow_local_prefill
    async with httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=60) as http:
        (taken,) = (await http.get("/statusz")).json()["fallbacks"]
        metrics = (await http.get("/metrics")).text
    assert (taken["component"], taken["count"]) == ("prefill", 1)
    assert any(line.startswith("tandem_fallbacks_total") and line.endswith(" 1.0") for line in metrics.splitlines())
