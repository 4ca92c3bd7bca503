"""`/explain/{request_id}`: why a request went where it went, and what then happened."""

from __future__ import annotations

import httpx
from tandem.v1 import common_pb2, worker_pb2

from router.decision_log import DecisionLog
from router.router_siblings import RouterSiblings
from tests.router.conftest import MODEL, RunningRouter, StartRouter

BODY = {"model": MODEL, "prompt": "x" * 40, "max_tokens": 2}


async def test_a_placement_is_explained_with_candidates_terms_and_outcome(
    router: RunningRouter, http: httpx.AsyncClient
) -> None:
    await router.add_worker(router.new_worker("prefill-1", "prefill"))
    answer = (await http.post("/v1/completions", json={**BODY, "n": 2})).json()
    explained = (await http.get(f"/explain/{answer['id']}")).json()
    first, second = explained["placements"]
    assert (first["choice"], second["choice"]) == (0, 1)
    assert first["policy"] == "cache_aware"
    assert first["decode_worker_id"] == "decode-0"
    ranked = first["candidates"]["prefill"]
    assert {one["worker_id"] for one in ranked} == set(first["prefill_worker_ids"]) == {"prefill-0", "prefill-1"}
    assert first["reason"] == "near tie: the less busy, then the one chosen least recently"
    assert ranked[0]["total_ms"] <= ranked[1]["total_ms"]
    assert set(ranked[0]["terms_ms"]) == {"queue", "prefill", "work", "evict", "spread", "restore"}
    assert first["outcome"]["cached_tokens"] == 16
    assert first["outcome"]["first_token_ms"] == 1.234


async def test_a_request_is_found_by_what_its_client_calls_it(router: RunningRouter, http: httpx.AsyncClient) -> None:
    name = {"x-request-id": "chat/7:retry"}
    answers = [(await http.post("/v1/completions", json=BODY, headers=name)).json() for _ in range(2)]
    explained = (await http.get("/explain/chat%2F7%3Aretry")).json()
    assert explained["request_id"] == answers[1]["id"], "the last one of that name"
    # Nobody hides a request by calling another one like it.
    await http.post("/v1/completions", json=BODY, headers={"x-request-id": answers[0]["id"]})
    assert (await http.get(f"/explain/{answers[0]['id']}")).json()["request_id"] == answers[0]["id"]


async def test_a_move_shows_in_the_explanation(start_router: StartRouter) -> None:
    router = await start_router()
    workers = [await router.add_worker(router.new_worker(f"decode-{name}")) for name in "ab"]
    workers[0].refuse = lambda _: common_pb2.Failure(code="kv_capacity", message="full", retryable=True)
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        ids: list[str] = []
        # Near ties fall to either; a prompt of its own each time, for who has seen one before gets it again.
        while len(workers[0].submits) == 0 and len(ids) < 100:
            body = BODY | {"prompt": [100 + len(ids)] * 20}
            ids.append((await http.post("/v1/completions", json=body)).json()["id"])
        explained = [(await http.get(f"/explain/{request_id}")).json()["placements"] for request_id in ids]
    moved = next(placements for placements in explained if len(placements) == 2)
    assert moved[0]["outcome"]["moved_because"] == "kv_capacity"
    assert (moved[0]["decode_worker_id"], moved[1]["decode_worker_id"]) == ("decode-a", "decode-b")
    assert (moved[0]["attempt"], moved[1]["attempt"]) == (0, 1)


async def test_unknown_requests_are_404(http: httpx.AsyncClient) -> None:
    answer = await http.get("/explain/cmpl-nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_the_log_is_bounded(router: RunningRouter, http: httpx.AsyncClient) -> None:
    log = DecisionLog(RouterSiblings(router.directory, "router-0"), max_requests=2)
    dispatcher = router.core.service._dispatcher
    dispatcher._listeners = (*dispatcher._listeners[:1], log)
    ids = [(await http.post("/v1/completions", json=BODY)).json()["id"] for _ in range(3)]
    assert await log.explain(ids[0]) is None
    assert await log.explain(ids[1]) is not None
    assert await log.explain(ids[2]) is not None


async def test_a_prompt_that_was_prefilled_elsewhere_is_a_counted_fallback(
    router: RunningRouter, http: httpx.AsyncClient
) -> None:
    worker = router.workers[-1]
    honest = worker.event

    def elsewhere(submit: worker_pb2.SubmitRequest, position: int, token_id: int) -> worker_pb2.RequestEvent:
        event = honest(submit, position, token_id)
        event.timeline.prefill_worker_id = ""
        return event

    worker.event = elsewhere  # type: ignore[method-assign]
    await http.post("/v1/completions", json=BODY)
    fallbacks = (await http.get("/statusz")).json()["fallbacks"]
    assert [(one["component"], one["used"], one["count"]) for one in fallbacks] == [("prefill", "the decode worker", 1)]
