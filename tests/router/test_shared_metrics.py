"""`/metrics` of several router processes on one port: sums, and what a process that is gone does to them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.telemetry import RouterMetrics, new_registry
from router import router_siblings
from router.router_siblings import RouterSiblings
from router.shared_metrics import SharedMetrics, added_up
from tests.router.conftest import MODEL, StartRouter


def value(text: bytes, name: str, **labels: str) -> float:
    samples = (s for family in text_string_to_metric_families(text.decode()) for s in family.samples)
    return next(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


def process(directory: Path, number: int) -> tuple[SharedMetrics, RouterMetrics, RouterSiblings]:
    registry, siblings = new_registry(), RouterSiblings(directory, f"router-{number}")
    return SharedMetrics(registry, siblings), RouterMetrics(registry), siblings


async def test_counters_and_histograms_are_added_up_and_what_all_see_alike_is_not(socket_directory: Path) -> None:
    async with AsyncExitStack() as stack:
        processes = [process(socket_directory, number) for number in range(3)]
        for number, (_, series, siblings) in enumerate(processes):
            await siblings.start()
            stack.push_async_callback(siblings.stop)
            series.prompt_tokens.labels("m").inc(10 * (number + 1))
            series.requests_ended.labels("m", f"reason-{number}").inc()
            series.time_to_first_token.labels("m").observe(0.03)
            series.workers.labels("m", "decode", "ready").set(4 - number)
            series.redis_up.set(number != 1)
        for shared, _, _ in processes:  # whichever is asked
            text = await shared.exposition()
            assert value(text, "tandem_prompt_tokens_total", model="m") == 60
            assert value(text, "tandem_request_success_total", finished_reason="reason-2") == 1
            assert value(text, "tandem_time_to_first_token_seconds_count") == 3
            assert value(text, "tandem_time_to_first_token_seconds_bucket", le="0.04") == 3
            assert value(text, "tandem_workers", role="decode", state="ready") == 4
            assert value(text, "tandem_redis_up") == 0
            assert value(text, "tandem_router_processes") == 3
        await processes[0][2].stop()
        assert value(await processes[1][0].exposition(), "tandem_prompt_tokens_total") == 50


@contextmanager
def silent_socket(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        yield


async def test_a_killed_or_silent_process_is_left_out_and_keeps_nobody_waiting(
    socket_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_siblings, "ANSWER_TIMEOUT_S", 0.2)
    shared, series, siblings = process(socket_directory, 0)
    series.prompt_tokens.labels("m").inc(7)
    with silent_socket(socket_directory / "router-1.router"):
        pass  # its file stays, nobody listens
    with silent_socket(socket_directory / "router-2.router"):
        await siblings.start()
        text = await shared.exposition()
        await siblings.stop()
    assert value(text, "tandem_prompt_tokens_total") == 7
    assert value(text, "tandem_router_processes") == 1


def test_one_text_alone_stays_as_it_is() -> None:
    shared_text = added_up(["# HELP tandem_x_total x\n# TYPE tandem_x_total counter\ntandem_x_total 3.0\n"])
    assert b"# TYPE tandem_x_total counter\ntandem_x_total 3.0\n" in shared_text


async def test_a_router_alone_on_its_port_answers_for_itself(start_router: StartRouter) -> None:
    router = await start_router()
    await router.add_worker(router.new_worker("both", "aggregated"))
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
        assert (await http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})).status_code == 200
        text = (await http.get("/metrics")).content
    assert value(text, "tandem_request_success_total") == 1
    assert b"tandem_router_processes" not in text
