"""The client over real sockets, against the scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import numpy as np
import pytest

from benchmarks.arrivals import ArrivalProcess, arrival_times
from benchmarks.load_run import run_closed_loop, run_open_loop
from benchmarks.openai_client import DIALECTS, Dialect, Endpoint, OpenAiClient, StreamCapture, request_body
from benchmarks.request_record import Outcome
from benchmarks.run_summary import Flag, summarise
from benchmarks.scripted_server import (
    Answer,
    PrefixCachedPrompts,
    ScriptedServer,
    SingleServerQueue,
    chunk,
    token_stream,
)
from benchmarks.stream_record import read_stream
from benchmarks.workload import ChatMessage, LengthLaw, PlannedRequest, Workload, plan_synthetic

PLANNED = PlannedRequest(index=0, intended_s=0.0, output_tokens=3, token_ids=(5, 6, 7))
SHAPE = Workload(LengthLaw(32, 32), LengthLaw(1, 1))


def _endpoint(server: ScriptedServer) -> Endpoint:
    return Endpoint(server.url, "scripted")


async def test_a_stream_arrives_with_its_times_and_counts() -> None:
    def script(number: int, body: dict[str, Any], now_s: float) -> Answer:
        assert body["prompt"] == [5, 6, 7]
        return token_stream(now_s + 0.03 * (place + 1) for place in range(3))

    async with ScriptedServer(script) as server, OpenAiClient(_endpoint(server)) as client:
        capture = StreamCapture()
        await client.send(PLANNED, capture)
    record = read_stream(PLANNED, capture, capture.sent_s, intended_s=0.0)
    assert record.is_ok
    assert record.chunk_tokens == (1, 1, 1)
    assert record.ttft_s is not None
    assert record.ttft_s >= 0.03
    assert record.tpot_s == pytest.approx(0.03, abs=0.02)


async def test_connections_are_kept_and_errors_keep_them() -> None:
    def script(number: int, body: dict[str, Any], now_s: float) -> Answer:
        return Answer(status=500, body='{"error": {}}') if number == 0 else token_stream([now_s])

    async with ScriptedServer(script) as server, OpenAiClient(_endpoint(server)) as client:
        captures = [StreamCapture() for _ in range(3)]
        for capture in captures:
            await client.send(PLANNED, capture)
        assert len(server._connections) == 1
    assert [capture.http_status for capture in captures] == [500, 200, 200]


async def test_a_kept_connection_that_the_server_gave_up_is_replaced_once() -> None:
    """Servers close what lies idle at a moment of their own: the request that finds it closed was never seen."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    requests: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = len(requests)
        with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
            while await reader.readuntil(b"\r\n\r\n"):
                requests.append(connection)
                if requests.count(connection) > 1:
                    break
                writer.write(answer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, OpenAiClient(Endpoint(f"http://127.0.0.1:{port}", "none")) as client:
        assert [await client.get_json("/v1/models") for _ in range(2)] == [{}, {}]
    assert requests == [0, 0, 2]  # the second one came to the first connection, then to a new one


async def test_no_server_and_no_end_are_failures_with_names() -> None:
    async with OpenAiClient(Endpoint("http://127.0.0.1:1", "none")) as client:
        refused = StreamCapture()
        await client.send(PLANNED, refused)
    assert refused.failure == "connection"

    async with (
        ScriptedServer(lambda number, body, now_s: Answer(((now_s + 60.0, chunk("late", 1)),))) as server,
        OpenAiClient(_endpoint(server), timeout_s=1.0) as client,
    ):
        endless = StreamCapture()
        await client.send(PLANNED, endless)
    assert endless.failure == "timeout"
    assert endless.http_status == 200


async def test_a_server_that_hangs_up_in_mid_stream_is_a_stream_error() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        event = f"data: {chunk('a', 1)}\n\n".encode()
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(event), event))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with OpenAiClient(Endpoint(f"http://127.0.0.1:{port}/v1", "none")) as client:
            capture = StreamCapture()
            await client.send(PLANNED, capture)
    record = read_stream(PLANNED, capture, 0.0, intended_s=0.0)
    assert record.outcome is Outcome.STREAM_ERROR
    assert record.num_output_tokens == 1


async def test_get_json_reads_small_answers_and_names_what_failed() -> None:
    async with (
        ScriptedServer(lambda number, body, now_s: Answer(status=404, body="none")) as server,
        OpenAiClient(_endpoint(server)) as client,
    ):
        with pytest.raises(ConnectionError, match=r"/v1/models: status 404"):
            await client.get_json("/v1/models")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_dialect_asks_for_what_its_server_knows(dialect: Dialect) -> None:
    body = json.loads(request_body(PLANNED, Endpoint("http://h", "m", dialect)))
    assert body["stream_options"]["include_usage"] is True
    assert ("ignore_eos" in body) == (dialect != "openai")
    assert ("continuous_usage_stats" in body["stream_options"]) == (dialect in ("tandem", "vllm"))
    assert ("timings_per_token" in body) == (dialect == "llamacpp")


def test_chat_prompts_are_messages() -> None:
    planned = PlannedRequest(0, 0.0, 3, messages=(ChatMessage("user", "hi"),))
    body = json.loads(request_body(planned, Endpoint("http://h", "m")))
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert "prompt" not in body


def test_a_wrong_base_url_is_refused() -> None:
    with pytest.raises(ValueError, match="base URL"):
        OpenAiClient(Endpoint("localhost:8000", "m"))


async def test_b8_failed_requests_do_not_drag_the_latencies() -> None:
    def script(number: int, body: dict[str, Any], now_s: float) -> Answer:
        return Answer(status=500, body="{}") if number % 10 == 0 else token_stream([now_s + 0.05])

    plan = plan_synthetic(SHAPE, arrival_times(ArrivalProcess("constant", 100.0), 1.0, seed=0), seed=0)
    async with ScriptedServer(script) as server, OpenAiClient(_endpoint(server)) as client:
        summary = summarise(await run_open_loop(plan, client, 1.0))
    assert Flag.ERRORS in summary.flags
    assert summary.outcomes["http_error"] == pytest.approx(0.1 * summary.num_offered, abs=2)
    assert summary.latency_ms.count == summary.num_ok
    assert summary.latency_ms.p50.low >= 50.0


async def test_b12_a_second_run_of_the_same_seed_is_flagged_with_its_extra_hits() -> None:
    plan = plan_synthetic(
        Workload(LengthLaw(64, 64), LengthLaw(1, 1), hit_rate=0.5, num_prefixes=1),
        arrival_times(ArrivalProcess("constant", 200.0), 0.3, seed=0),
        seed=4,
    )
    async with (
        ScriptedServer(PrefixCachedPrompts(delay_s=0.002)) as server,
        OpenAiClient(_endpoint(server)) as client,
    ):
        cold = summarise(await run_open_loop(plan, client, 0.3))
        warm = summarise(await run_open_loop(plan, client, 0.3))
    assert Flag.CACHE_WARM not in cold.flags
    assert cold.extra_hit_rate == pytest.approx(0.0, abs=0.02)
    assert Flag.CACHE_WARM in warm.flags
    assert warm.extra_hit_rate == pytest.approx(0.5, abs=0.05)


async def test_open_loop_over_sockets_follows_the_queue_it_drives() -> None:
    """Each request's latency is Lindley's recursion over the arrivals that were planned, but for the client's own
    delays."""
    mean_s, duration_s = 0.004, 1.5
    times = arrival_times(ArrivalProcess("poisson", 100.0), duration_s, seed=2)
    async with (
        ScriptedServer(SingleServerQueue("deterministic", mean_s, seed=0)) as server,
        OpenAiClient(_endpoint(server)) as client,
    ):
        run = await run_open_loop(plan_synthetic(SHAPE, times, seed=0), client, duration_s)
    free_s, expected = 0.0, []
    for time_s in times:
        free_s = max(free_s, time_s) + mean_s
        expected.append(free_s - time_s)
    measured = np.array([record.latency_s for record in run.records])
    assert all(record.is_ok for record in run.records)
    # Never faster than the theory; the median is slower by the client's and the server's own work alone.
    assert (measured > np.array(expected) - 0.001).all()
    assert np.median(measured - np.array(expected)) < 0.02


async def test_b11_closed_loop_over_sockets_is_seen_capped_by_the_server() -> None:
    plan = plan_synthetic(SHAPE, np.arange(60.0), seed=0)
    async with (
        ScriptedServer(lambda number, body, now_s: token_stream([now_s + 0.005])) as server,
        OpenAiClient(_endpoint(server)) as client,
    ):
        await run_closed_loop(plan, client, concurrency=8, num_warmup=20, timeout_s=30.0)
        assert server.peak_in_flight == 8
