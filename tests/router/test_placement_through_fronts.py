"""Faults of other routers' placement, asked for over HTTP and over gRPC: both fronts book, match and count alike."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tandem.v1 import common_pb2, worker_pb2

from cluster.membership_state import ChangeKind
from router.cache_view import UNSEEN_HITS_ALERT, prompt_hashes
from router.worker_state import WorkerState
from tests.router.conftest import RunningRouter, StartRouter, started
from tests.router.fronts import Front, Reply
from tests.router.scripted_worker import BLOCK_TOKENS, TOTAL_BLOCKS, ScriptedWorker

PROMPT = [98] * 64
MAX_TOKENS = 4


async def ask(front: Front, router: RunningRouter, **fields: Any) -> Reply:
    return await front.ask(router, **{"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, **fields})


async def placement_of(router: RunningRouter, reply: Reply) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=60) as client:
        placement: dict[str, Any] = (await client.get(f"/explain/{reply.request_id}")).json()["placements"][0]
    return placement


def state_of(router: RunningRouter, worker: ScriptedWorker) -> WorkerState:
    return next(state for state, _ in router.core.registry.workers if state.worker_id == worker.worker_id)


def stored(router: RunningRouter, worker: ScriptedWorker, tokens: list[int], scope_key: bytes) -> None:
    """As the worker's KV events would say it."""
    view, scope = router.core.cache_view, router.core.registry.hash_scope(scope_key)
    assert view is not None
    assert scope is not None
    view.index.stored(state_of(router, worker).worker_id, prompt_hashes(tokens, scope))


async def submitted(workers: list[ScriptedWorker], count: int) -> None:
    async with asyncio.timeout(60):
        while sum(len(worker.submits) for worker in workers) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# --- load -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded", "round_robin"])
async def test_rt28_a_burst_spreads_over_whichever_front_it_comes(
    policy: str, start_router: StartRouter, front: Front
) -> None:
    router = await start_router(policy=policy)
    workers = [await router.add_worker(router.new_worker(f"decode-{name}")) for name in "abcd"]
    gate = asyncio.Event()
    for worker in workers:
        worker.pace = lambda *_: gate.wait()
    asked = [asyncio.create_task(ask(front, router, prompt=f"prompt {number}")) for number in range(8)]
    await submitted(workers, 8)
    assert [len(worker.submits) for worker in workers] == [2, 2, 2, 2]
    assert sum(state.booked_requests for state, _ in router.core.registry.workers) == 8
    gate.set()
    assert all(reply.is_whole for reply in await asyncio.gather(*asked))
    await router.until(lambda: set(router.bookings()) == {(0, 0, 0)})


async def test_rt7_each_of_eight_workers_is_served_in_turn_also_those_that_came_late(
    start_router: StartRouter, front: Front
) -> None:
    router = await start_router(policy="round_robin")
    workers = [await router.add_worker(router.new_worker(f"both-{number}", "aggregated")) for number in range(6)]
    for _ in range(7):
        assert (await ask(front, router)).is_whole
    workers += [await router.add_worker(router.new_worker(f"late-{number}", "aggregated")) for number in range(2)]
    for worker in workers:
        worker.submits.clear()
    for state, _ in router.core.registry.workers:
        state.joined_s = -1e9  # a new worker's share grows over its first seconds
    for _ in range(80):
        assert (await ask(front, router)).is_whole
    assert all(abs(len(worker.submits) - 10) <= 1 for worker in workers)


async def test_rt8_three_full_workers_get_nothing_and_nobody_is_refused_before_all_four_are_full(
    start_router: StartRouter, front: Front
) -> None:
    router = await start_router()
    workers = [await router.add_worker(router.new_worker(f"decode-{name}")) for name in "abcd"]

    def is_full(_: worker_pb2.SubmitRequest) -> common_pb2.Failure:
        return common_pb2.Failure(code="kv_capacity", message="full", retryable=True)

    full = worker_pb2.LoadReport(total_blocks=TOTAL_BLOCKS, free_blocks=1)
    for worker in workers[:3]:
        worker.refuse = is_full
        state_of(router, worker).take_report(full, 0.0)
    for _ in range(6):
        assert (await ask(front, router)).is_whole
    assert [len(worker.submits) for worker in workers] == [0, 0, 0, 6]
    workers[3].refuse = is_full
    refused = await ask(front, router)
    assert (refused.code, refused.status in (503, "UNAVAILABLE")) == ("kv_capacity", True)
    assert all(worker.submits for worker in workers), "one of them was not asked"


async def test_rt37_prefill_is_charged_what_it_computes_and_decode_what_it_holds(
    start_router: StartRouter, front: Front
) -> None:
    router = await start_router(prefill_fallback="deny")  # so that the prefill worker computes it
    prefill = await router.add_worker(router.new_worker("prefill-0", "prefill"))
    decode = await router.add_worker(router.new_worker("decode-0"))
    assert (await ask(front, router, prompt=[1] * 64)).is_whole  # tells the scope
    stored(router, prefill, PROMPT[:48], decode.submits[0].scope.scope_key)
    first, rest = asyncio.Event(), asyncio.Event()
    decode.pace = lambda _, num_sent: (first if num_sent == 0 else rest).wait()
    asked = asyncio.create_task(ask(front, router))
    await submitted([decode], 2)

    def charged() -> list[tuple[int, int]]:
        states = (state_of(router, prefill), state_of(router, decode))
        return [(state.booked_prefill_tokens, state.booked_kv_tokens) for state in states]

    assert charged() == [(len(PROMPT) - 48, 0), (0, len(PROMPT) + MAX_TOKENS)]
    first.set()
    await router.until(lambda: charged() == [(0, 0), (0, len(PROMPT) + MAX_TOKENS)])
    rest.set()
    assert (await asked).is_whole
    await router.until(lambda: set(router.bookings()) == {(0, 0, 0)})


async def test_rt38_no_count_falls_below_nothing_when_a_worker_comes_back_under_way(
    start_router: StartRouter, front: Front
) -> None:
    router = await start_router()
    worker = await router.add_worker(router.new_worker("decode-a"))
    gate = asyncio.Event()
    worker.pace = lambda *_: gate.wait()
    asked = [asyncio.create_task(ask(front, router)) for _ in range(2)]
    await submitted([worker], 2)
    router.announce(worker, ChangeKind.LEFT)  # not ready, and ready again
    router.announce(worker)
    await router.until(lambda: router.is_routable(worker))
    assert [booked for booked, _, _ in router.bookings()] == [2]
    await worker.stop()
    restarted = router.new_worker("decode-a", incarnation="two")
    await restarted.start()
    router.workers.append(restarted)
    router.announce(restarted, ChangeKind.RESTARTED)
    assert all(reply.is_whole for reply in await asyncio.gather(*asked))
    await router.until(lambda: not any(booked for booked, _, _ in router.bookings()))
    assert router.bookings() == [(0, 0, 0)]
    assert (await ask(front, router)).is_whole
    await router.until(lambda: router.bookings() == [(0, 0, 0)])
    gate.set()


async def test_rt40_the_only_worker_is_asked_however_old_its_report_is(router: RunningRouter, front: Front) -> None:
    for state, _ in router.core.registry.workers:
        state.load_at_s = -1e9
    assert (await ask(front, router)).is_whole


@pytest_asyncio.fixture(loop_scope="session")
async def other_router() -> AsyncIterator[RunningRouter]:
    directory = Path(tempfile.mkdtemp(prefix="tdm-"))
    router = await started(directory, router_id="router-1")
    yield router
    await router.stop()
    shutil.rmtree(directory)


async def test_rt61_what_one_router_tracks_of_its_answers_is_no_load_to_another(
    start_router: StartRouter, other_router: RunningRouter, front: Front
) -> None:
    """Bookings stay with their router; of what others do it sees the worker's report, which nothing writes over."""
    first = await start_router()
    worker = await first.add_worker(first.new_worker("both", "aggregated"))
    other_router.announce(worker)
    await other_router.until(lambda: other_router.is_routable(worker))
    report = worker_pb2.LoadReport(total_blocks=TOTAL_BLOCKS, free_blocks=40, running_requests=1, waiting_tokens=7)
    worker.load = lambda: report  # type: ignore[method-assign]
    gate = asyncio.Event()
    worker.pace = lambda submit, num_sent: gate.wait() if submit.sampling.max_tokens == 9 and num_sent > 5 else _now()
    running = asyncio.create_task(ask(front, first, max_tokens=9))
    await worker.wait_for(lambda: worker.num_tokens_sent > 5)
    assert other_router.bookings() == [(0, 0, 0)]
    assert (await ask(front, other_router)).is_whole
    assert other_router.bookings() == [(0, 0, 0)]
    for router in (first, other_router):
        assert state_of(router, worker).load == report
    assert [booked for booked, _, _ in first.bookings()] == [1]
    gate.set()
    assert (await running).is_whole


async def _now() -> None:
    """At once."""


# --- caches -----------------------------------------------------------------------------------------------------------


async def test_rt17_hits_that_nobody_predicted_are_said_once(
    router: RunningRouter, front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    """The scripted worker reports 16 cached tokens of each prompt; no event ever told of them."""
    with caplog.at_level(logging.WARNING):
        for number in range(UNSEEN_HITS_ALERT + 2):
            assert (await ask(front, router, prompt=[number + 1] * 64)).usage.cached_tokens == 16
    assert len([record for record in caplog.records if "KV events" in record.message]) == 1, caplog.messages


async def test_rt18_a_restarted_worker_is_expected_to_hold_nothing(start_router: StartRouter, front: Front) -> None:
    router = await start_router()
    worker = await router.add_worker(router.new_worker("both", "aggregated"))
    await ask(front, router, prompt=[1] * 64)
    stored(router, worker, PROMPT, worker.submits[0].scope.scope_key)
    assert (await placement_of(router, await ask(front, router)))["expected_cached_tokens"] == 63
    await worker.stop()
    restarted = router.new_worker("both", "aggregated", incarnation="two")
    restarted.address = worker.address
    await restarted.start()
    router.workers.append(restarted)
    router.announce(restarted, ChangeKind.RESTARTED)
    await router.until(lambda: router.is_routable(restarted))
    assert (await placement_of(router, await ask(front, router)))["expected_cached_tokens"] == 0


async def test_rt22_s_b41_the_same_prompt_under_another_salt_has_no_credit(
    start_router: StartRouter, front: Front
) -> None:
    router = await start_router()
    worker = await router.add_worker(router.new_worker("both", "aggregated"))
    expected = []
    for salt in ("x", "x", "y", "y"):
        reply = await ask(front, router, cache_salt=salt)
        expected.append((await placement_of(router, reply))["expected_cached_tokens"])
    assert expected[0] == expected[2] == 0
    assert min(expected[1], expected[3]) >= 3 * BLOCK_TOKENS, expected
    assert len({submit.scope.scope_key for submit in worker.submits}) == 2


async def test_rt42_cached_tokens_are_those_the_workers_reported(router: RunningRouter, front: Front) -> None:
    usage = (await ask(front, router, prompt="x" * 40, n=2)).usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (40, BLOCK_TOKENS)


async def test_rt63_prefixes_are_followed_when_one_of_four_workers_is_dead(
    start_router: StartRouter, front: Front
) -> None:
    """A dead worker has no load: it must not make the others look unequal."""
    router = await start_router()
    workers = [await router.add_worker(router.new_worker(f"both-{name}", "aggregated")) for name in "abcd"]
    await ask(front, router, prompt=[1] * 64)
    (first,) = [submit for worker in workers for submit in worker.submits]
    long_prompt = [99] * 400
    stored(router, workers[2], long_prompt, first.scope.scope_key)
    dead = workers.pop(0)
    await dead.stop()
    await router.until(lambda: not router.is_routable(dead))
    for worker in workers:
        worker.submits.clear()
    for _ in range(5):
        assert (await ask(front, router, prompt=long_prompt)).is_whole
    assert [len(worker.submits) for worker in workers] == [0, 5, 0]
