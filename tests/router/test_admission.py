"""A real router with little room: who begins, who waits, who is refused and with what words; nothing stays counted."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from tandem.v1 import common_pb2, inference_pb2, inference_pb2_grpc, worker_pb2

from cluster.identity import RequestId, Tenant
from router.admission import PROMPTS_AHEAD, Admission, AdmissionSettings, Arrival
from router.fair_queue import Tier, Waiting
from router.placement import ClusterSnapshot
from router.policies import DEFAULT_PRIOR
from router.tenant_limits import TenantLimit, TenantLimiter
from router.tenants import ApiKeys
from router.timing_model import TimingModel, TimingPrior
from router.worker_state import Role
from tests.router.conftest import MODEL, RunningRouter, StartRouter
from tests.router.placement_simulation import worker
from tests.router.scripted_worker import ScriptedWorker

BODY: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 2, "temperature": 0}
# One worker takes two prompts ahead, whatever they cost; then requests wait in the router.
LITTLE_ROOM: dict[str, object] = {"max_worker_queue_ms": 1e-3}


class Gated:
    """A worker whose requests go on one by one."""

    def __init__(self, worker: ScriptedWorker) -> None:
        self.worker = worker
        self.gates: dict[str, asyncio.Event] = {}
        worker.pace = self._pace

    async def _pace(self, submit: worker_pb2.SubmitRequest, num_sent: int) -> None:
        await self.gates.setdefault(submit.request_id, asyncio.Event()).wait()

    def finish(self, index: int) -> None:
        self.gates.setdefault(self.worker.submits[index].request_id, asyncio.Event()).set()

    def finish_all(self) -> None:
        self.worker.pace = None
        for gate in self.gates.values():
            gate.set()

    async def has_begun(self, count: int) -> None:
        await self.worker.wait_for(lambda: len(self.worker.submits) >= count)


@pytest_asyncio.fixture(loop_scope="session")
async def full(start_router: StartRouter) -> AsyncIterator[tuple[RunningRouter, Gated]]:
    router = await start_router(**LITTLE_ROOM)
    gated = Gated(await router.add_worker(router.new_worker("decode-0")))
    yield router, gated
    gated.finish_all()


def ask(http: httpx.AsyncClient, prompt: str = "abc", **fields: Any) -> asyncio.Task[httpx.Response]:
    headers = fields.pop("headers", {})
    body = {**BODY, "prompt": prompt, **fields}
    return asyncio.create_task(http.post("/v1/completions", json=body, headers=headers, timeout=60))


async def until_waiting(router: RunningRouter, count: int) -> None:
    await router.until(lambda: router.core.service.admission.num_waiting == count)


async def test_two_go_ahead_the_third_waits_and_its_explanation_says_how_long(
    full: tuple[RunningRouter, Gated],
) -> None:
    router, gated = full
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        first, second = ask(http), ask(http)
        await gated.has_begun(2)
        third = ask(http)
        await until_waiting(router, 1)
        metrics = (await http.get("/metrics")).text
        assert 'tandem_num_requests_waiting{model="test-model"} 1.0' in metrics
        assert 'tandem_num_requests_running{model="test-model"} 2.0' in metrics
        gated.finish(0)
        await gated.has_begun(3)
        gated.finish_all()
        answers = await asyncio.gather(first, second, third)
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        explained = (await http.get(f"/explain/{answers[2].headers['x-request-id']}")).json()
        assert explained["admission"]["tier"] == "normal"
        assert explained["admission"]["waited_ms"] > 0
        explained = (await http.get(f"/explain/{answers[0].headers['x-request-id']}")).json()
        assert explained["admission"] == {"waited_ms": 0.0}
        assert (
            'tandem_admission_wait_seconds_count{model="test-model",tier="normal"} 1.0'
            in (await http.get("/metrics")).text
        )
    assert router.bookings() == [(0, 0, 0)]


async def test_a_critical_request_passes_those_that_came_before_it(full: tuple[RunningRouter, Gated]) -> None:
    router, gated = full
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        asked = [ask(http), ask(http)]
        await gated.has_begun(2)
        for waiting, (prompt, priority) in enumerate((("low", 5), ("normal", 0), ("high", -5)), 1):
            asked.append(ask(http, prompt, priority=priority))
            await until_waiting(router, waiting)
        gated.finish_all()
        await asyncio.gather(*asked)
    begun = ["".join(map(chr, submit.token_ids)) for submit in gated.worker.submits[2:]]
    assert begun == ["high", "normal", "low"]


async def test_f17_a_client_that_leaves_while_it_waits_leaves_nothing_behind(full: tuple[RunningRouter, Gated]) -> None:
    router, gated = full
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        asked = [ask(http), ask(http)]
        await gated.has_begun(2)
        leaving = ask(http, "leaving")
        await until_waiting(router, 1)
        leaving.cancel()
        await until_waiting(router, 0)
        gated.finish_all()
        await asyncio.gather(*asked)
    await router.until(lambda: router.core.service.admission.num_requests == 0)
    assert len(gated.worker.submits) == 2
    assert router.bookings() == [(0, 0, 0)]


async def test_f39_a_deadline_that_passes_in_the_queue_is_a_504_and_reaches_no_worker(
    full: tuple[RunningRouter, Gated],
) -> None:
    router, gated = full
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        asked = [ask(http), ask(http)]
        await gated.has_begun(2)
        late = await ask(http, "late", headers={"x-request-timeout-ms": "150"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        gated.finish_all()
        await asyncio.gather(*asked)
    assert len(gated.worker.submits) == 2


async def test_a_first_token_that_would_come_too_late_is_refused_at_once_unless_it_is_critical(
    start_router: StartRouter,
) -> None:
    router = await start_router(**LITTLE_ROOM, ttft_slo_ms=1000, prefill_prior_ms=(0, 10, 0))
    gated = Gated(await router.add_worker(router.new_worker("decode-0")))
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        asked = [ask(http, "a" * 70), ask(http, "b" * 70)]  # 1,400 ms of prefill
        await gated.has_begun(2)
        sheddable = await ask(http, priority=1)
        assert (sheddable.status_code, sheddable.json()["error"]["code"]) == (503, "server_is_overloaded")
        assert int(sheddable.headers["retry-after"]) >= 1
        assert "x-should-retry" not in sheddable.headers
        asked.append(ask(http, "c" * 50))  # 1.9 s: below twice the objective
        await until_waiting(router, 1)
        assert (await ask(http, "d" * 60)).status_code == 503
        asked.append(ask(http, "e" * 90, priority=-1))
        await until_waiting(router, 2)
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                inference_pb2.GenerateRequest(text="d" * 60, max_tokens=2)
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        gated.finish_all()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 4
        metrics = (await http.get("/metrics")).text
        assert 'tandem_request_refused_total{code="server_is_overloaded",model="test-model"} 3.0' in metrics


async def test_an_idle_cluster_refuses_nobody_however_long_the_prompt(start_router: StartRouter) -> None:
    router = await start_router(**LITTLE_ROOM, ttft_slo_ms=10, prefill_prior_ms=(0, 1000, 0))
    await router.add_worker(router.new_worker("decode-0"))
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        assert (await ask(http, "a" * 100, priority=1)).status_code == 200


def keys_of(**limits: TenantLimit) -> ApiKeys:
    digests = {hashlib.sha256(name.encode()).digest(): Tenant(name) for name in limits}
    return ApiKeys(digests, {Tenant(name): limit for name, limit in limits.items()})


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def test_f16_tenant_limits_are_a_429_with_retry_after_on_http_and_grpc(start_router: StartRouter) -> None:
    router = await start_router(keys=keys_of(alice=TenantLimit(requests_per_s=0.5), bob=TenantLimit()))
    await router.add_worker(router.new_worker("decode-0"))
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        assert (await ask(http, headers=bearer("alice"))).status_code == 200
        refused = await ask(http, headers=bearer("alice"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "2"
        assert (await ask(http, headers=bearer("bob"))).status_code == 200
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            inference_pb2.GenerateRequest(text="abc", max_tokens=2), metadata=(("authorization", "Bearer alice"),)
        )
        with pytest.raises(grpc.aio.AioRpcError) as over:
            await call.read()
        assert over.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_f32_a_flood_from_one_key_leaves_the_polite_one_served(start_router: StartRouter) -> None:
    router = await start_router(
        **LITTLE_ROOM,
        max_concurrent_requests=40,
        max_waiting_requests=30,
        keys=keys_of(flood=TenantLimit(), polite=TenantLimit()),
    )
    gated = Gated(await router.add_worker(router.new_worker("decode-0")))
    async with httpx.AsyncClient(base_url=router.url, limits=httpx.Limits(max_connections=200), timeout=60) as http:
        flood = [ask(http, "flood", headers=bearer("flood")) for _ in range(100)]
        await gated.has_begun(2)
        await router.until(lambda: router.core.service.admission.num_waiting == 30)
        polite = [ask(http, f"polite {number}", headers=bearer("polite")) for number in range(5)]
        await router.until(lambda: sum(task.done() for task in flood) >= 68 + 5)
        gated.finish_all()
        assert [answer.status_code for answer in await asyncio.gather(*polite)] == [200] * 5
        statuses = [answer.status_code for answer in await asyncio.gather(*flood)]
        assert 503 in statuses
        assert 200 in statuses
    begun = ["".join(map(chr, submit.token_ids)) for submit in gated.worker.submits]
    assert all(text in begun[2:14] for text in (f"polite {number}" for number in range(5)))
    await router.until(lambda: router.core.service.admission.num_requests == 0)


async def test_only_a_tenant_that_may_is_critical(start_router: StartRouter) -> None:
    router = await start_router(
        **LITTLE_ROOM, keys=keys_of(plain=TenantLimit(), important=TenantLimit(may_be_critical=True))
    )
    gated = Gated(await router.add_worker(router.new_worker("decode-0")))
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        asked = [ask(http, headers=bearer("plain")) for _ in range(2)]
        await gated.has_begun(2)
        for waiting, name in enumerate(("plain", "important"), 1):
            asked.append(ask(http, name, priority=-9, headers=bearer(name)))
            await until_waiting(router, waiting)
        assert router.core.service.admission.status()["waiting"] == {"critical": 1, "normal": 1, "sheddable": 0}
        gated.finish_all()
        await asyncio.gather(*asked)
    assert "".join(map(chr, gated.worker.submits[2].token_ids)) == "important"


async def test_f08_who_waits_when_the_last_worker_dies_begins_when_one_is_back(
    full: tuple[RunningRouter, Gated],
) -> None:
    router, gated = full
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        asked = [ask(http), ask(http)]
        await gated.has_begun(2)
        asked.append(ask(http, "waiting"))
        await until_waiting(router, 1)
        await gated.worker.stop()
        await router.until(lambda: not router.core.registry.is_ready)
        assert router.core.service.admission.num_waiting == 1
        await router.add_worker(router.new_worker("decode-1"))
        answers = await asyncio.gather(*asked)
    assert [answer.status_code for answer in answers] == [200, 200, 200]


async def test_rt63_a_worker_that_keeps_failing_is_not_asked_for_a_while(start_router: StartRouter) -> None:
    router = await start_router()
    bad = await router.add_worker(router.new_worker("decode-0"))
    bad.refuse = lambda _: common_pb2.Failure(code="worker_unavailable", message="no", retryable=True, stage="decode")
    await router.add_worker(router.new_worker("decode-1"))
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        for _ in range(20):
            assert (await ask(http)).status_code == 200
        assert len(bad.submits) == 3
        status = (await http.get("/statusz")).json()
        assert {worker["worker_id"]: worker["circuit"] for worker in status["workers"]} == {
            "decode-0": "open",
            "decode-1": "closed",
        }


class StillWorkers:
    """Workers of which nothing new is heard."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self._snapshot = snapshot

    def snapshot(self) -> ClusterSnapshot:
        return self._snapshot

    def on_change(self, listener: Callable[[], None]) -> None:
        """Nothing changes."""


@pytest.mark.parametrize(
    ("chooses_local", "allows_local", "num_computing"), [(True, True, 1.5), (True, False, 1.0), (False, True, 1.0)]
)
async def test_what_decode_workers_have_to_spare_shortens_the_predicted_wait(
    chooses_local: bool, allows_local: bool, num_computing: float
) -> None:
    prefill, decode = worker("prefill-0"), worker("decode-0", Role.DECODE)
    prefill.booked_prefills, decode.booked_prefills = PROMPTS_AHEAD, 1
    decode.prefill_share, decode.booked_requests = 0.5, 8
    snapshot = ClusterSnapshot([prefill], [decode], allows_local)
    admission = Admission(
        StillWorkers(snapshot),
        TimingModel(TimingPrior((0.0, 1.0, 0.0), DEFAULT_PRIOR.decode)),
        TenantLimiter(TenantLimit()),
        AdmissionSettings(max_requests=10, max_waiting=10, ttft_slo_ms=0.0, max_worker_queue_ms=0.0),
        may_choose_local=chooses_local,
        clock=lambda: 0.0,
    )
    tenant, priority, deadline_s = Tenant("one"), 0, 60.0
    arrival = Arrival(
        RequestId("first"), tenant, priority, deadline_s, lambda: 3000, lambda: pytest.fail("began"), lambda _: None
    )
    assert admission.submit(arrival) is not None
    newcomer = Waiting(tenant, Tier.NORMAL, 10, deadline_s, 0.0)
    assert admission.predicted_ms(newcomer, snapshot, 0.0) == pytest.approx(3000 / num_computing)
    admission.close()
