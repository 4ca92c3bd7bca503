"""Our router beside two written in Rust, each in front of eight mock workers with one timing model, cache and traffic.

    ours           tandem serve --engine mock --aggregated 8          client ─HTTP─> router ─gRPC─> mock workers
    vllm-router    8 x benchmarks.mock_server behind it               client ─HTTP─> router ─HTTP─> mock servers
    sglang-router  the same

    routing   documents asked about several times: TTFT, cache hits, the most hits that any routing could have (each
              document computed once), the busiest worker's requests over the mean; first a line of what no routing
              is better than: nobody waits, each document is computed once, each worker gets as many requests
    crowded   prefixes that are more than one worker's cache holds (`crowded_traffic`: conversations behind tenants'
              system prompts, questions about a library): the same, and the hits of one cache as large as all eight
    cost      engines that take no time, one-token answers: added latency of a request alone over asking a mock server
              directly, requests/s at 64 in flight, and requests for each second of the router's own CPU time

Ours tokenises each prompt and hashes its blocks, the others forward text: that is most of what ours costs more.
`python -m benchmarks.router_peers --routers PATH` with the folder of their executables (`pip install
'vllm-router==0.1.*' 'sglang-router==0.3.*'` into an environment of its own).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cluster_under_test import started_cluster
from benchmarks.crowded_traffic import SHAPES, as_planned
from benchmarks.hit_ceiling import Prompt, most_hits, num_distinct_blocks, prompts_of, quickest_ms
from benchmarks.openai_client import Dialect, Endpoint, OpenAiClient, StreamCapture
from benchmarks.peer_servers import PeerServer, started_peer
from benchmarks.routed_run import RoutedRun, imbalance, run_workload
from benchmarks.routing_workloads import Traffic, documents, single_token_words
from benchmarks.statistics import percentile
from benchmarks.workload import ChatMessage, PlannedRequest
from cluster.free_port import free_port
from cluster.model_files import DEFAULT_MODEL, resolve_model, served_name
from cluster.tokenizer import load_tokenizer
from engine.mock_worker import DEFAULT_NUM_BLOCKS

NUM_WORKERS = 8
NO_TIME = "0,0,0"
MOCK_READY_TIMEOUT_S = 60.0
IN_FLIGHT = 64
NUM_ALONE = 300
THROUGHPUT_S = 8.0
# Their defaults would send everybody to one worker until it is 64 requests ahead; these are both projects' own advice
# for small fleets.
PEER_FLAGS = ("--policy", "cache_aware", "--balance-abs-threshold", "4", "--balance-rel-threshold", "1.1")
# About a model of 8 billion parameters on one data-centre GPU: coefficients of prefill and of decode.
ROUTED_TIMING = ("8,0.1,0.000001", "12,0.15,0.00001")
# Twice as slow: as much load from half as many requests, so that a small machine is in nobody's way.
CROWDED_TIMING = ("16,0.2,0.000002", "24,0.3,0.00002")
CROWDED_BLOCKS = 1536  # of each worker: some 12 prompts
ROUTERS = ("tandem", "vllm-router", "sglang-router")
PARTS = ("routing", "crowded", "cost")


@dataclass(frozen=True, slots=True)
class Front:
    """A router that answers, and what belongs to it."""

    endpoint: Endpoint
    processes: Sequence[psutil.Process]
    worker_urls: Sequence[str]  # of mock servers; ours tells in its timeline where a request went


@dataclass(frozen=True, slots=True)
class OwnRouter:
    """How ours is run."""

    policy: str
    num_processes: int


@dataclass(frozen=True, slots=True)
class MockWorkers:
    """What stands behind every router. Coefficients as flags have them."""

    prefill_ms: str
    decode_ms: str
    num_blocks: int = DEFAULT_NUM_BLOCKS


@contextlib.contextmanager
def mock_servers(count: int, workers: MockWorkers, directory: Path) -> Iterator[list[str]]:
    """URLs of mock servers that answer."""
    with contextlib.ExitStack() as stack:
        urls = []
        processes = []
        for number in range(count):
            port = free_port()
            flags = [f"--port={port}", f"--prefill-ms={workers.prefill_ms}", f"--decode-ms={workers.decode_ms}"]
            flags += [f"--num-blocks={workers.num_blocks}"]
            log = stack.enter_context((directory / f"mock-{number}.log").open("w"))
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.mock_server", *flags], stdout=log, stderr=log, env=dict(os.environ)
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            processes.append(process)
            urls.append(f"http://127.0.0.1:{port}")
        asyncio.run(_until_all_answer(urls))
        yield urls


async def _until_all_answer(urls: Sequence[str]) -> None:
    deadline_s = time.monotonic() + MOCK_READY_TIMEOUT_S
    for url in urls:
        async with OpenAiClient(Endpoint(url, "", "openai")) as client:
            while True:
                try:
                    await client.get_json("/v1/models")
                    break
                except ConnectionError:
                    if time.monotonic() > deadline_s:
                        raise
                    await asyncio.sleep(0.1)


@contextlib.contextmanager
def started_front(name: str, routers: Path, workers: MockWorkers, own: OwnRouter) -> Iterator[Front]:
    """The router with its eight workers."""
    model_name = served_name(resolve_model(DEFAULT_MODEL))
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tdm-")))
        if name == "tandem":
            config = directory / "cluster.yaml"
            config.write_text(_cluster_yaml(workers, own))
            url = stack.enter_context(started_cluster(["--config", str(config)], directory / "serve.log"))
            yield Front(Endpoint(url, model_name), _router_processes(url), ())
            return
        urls = stack.enter_context(mock_servers(NUM_WORKERS, workers, directory))
        command = [str(routers / name), *(["launch"] if name == "sglang-router" else [])]
        command += ["--host", "127.0.0.1", "--port", "{port}", "--worker-urls", *urls, *PEER_FLAGS]
        command += ["--prometheus-port", str(free_port())]
        dialect: Dialect = "openai"
        url = stack.enter_context(started_peer(PeerServer(name, tuple(command), dialect), directory / "router.log"))
        yield Front(Endpoint(url, DEFAULT_MODEL, dialect), _router_processes(url), urls)


def _cluster_yaml(workers: MockWorkers, own: OwnRouter) -> str:
    return (
        f"engine: mock\nmock_prefill_ms: [{workers.prefill_ms}]\nmock_decode_ms: [{workers.decode_ms}]\n"
        f"prefill: {{workers: 0}}\ndecode: {{workers: 0}}\n"
        f"aggregated: {{workers: {NUM_WORKERS}, num_kv_blocks: {workers.num_blocks}}}\n"
        f"router: {{policy: {own.policy}, processes: {own.num_processes}}}\n"
    )


def _router_processes(url: str) -> list[psutil.Process]:
    """Who listens there."""
    port = int(url.rpartition(":")[2])
    listening = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
    }
    return [psutil.Process(pid) for pid in listening if pid is not None]


# --- routing ----------------------------------------------------------------------------------------------------------


def routing_row(name: str, run: RoutedRun, spread: Counter[str]) -> str:
    failed = f"; FAILED {dict(run.failures)}" if run.failures else ""
    return (
        f"| {name} | {run.ttft_percentile_ms(0.5):.0f} | {run.ttft_percentile_ms(0.99):.0f} | {run.hit_rate:.1%} | "
        f"{imbalance(spread, NUM_WORKERS):.2f} |{failed}"
    )


def best_row(prompts: Sequence[Prompt], workers: MockWorkers) -> str:
    """What no routing is better than, in the columns of `routing_row`."""
    c0, c1, c2 = map(float, workers.prefill_ms.split(","))
    num_blocks = NUM_WORKERS * workers.num_blocks
    times_ms = quickest_ms(prompts, (c0, c1, c2), num_blocks)
    hits = most_hits(prompts, num_blocks)
    p50_ms, p99_ms = (percentile(times_ms, share) for share in (0.5, 0.99))
    return f"| (the best there is) | {p50_ms:.0f} | {p99_ms:.0f} | {hits:.1%} | 1.00 |"


async def measure_routing(front: Front, planned: list[PlannedRequest]) -> tuple[RoutedRun, Counter[str]]:
    run = await run_workload(front.endpoint, planned)
    if not front.worker_urls:
        return run, run.requests_by_worker()
    return run, Counter({url: (await _counts(url))["requests"] for url in front.worker_urls})


async def _counts(url: str) -> dict[str, Any]:
    async with OpenAiClient(Endpoint(url, "", "openai")) as client:
        counts: dict[str, Any] = await client.get_json("/counts")
        return counts


# --- cost -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """What a front costs when its workers cost nothing."""

    alone_ms: list[float]
    requests_per_s: float
    cpu_us_per_request: float


def alike(endpoint: Endpoint) -> Endpoint:
    """Asked in the same words as the others: no timeline, no usage in every chunk."""
    return dataclasses.replace(endpoint, dialect="openai")


async def measure_cost(endpoint: Endpoint, processes: Sequence[psutil.Process], text: str) -> Cost:
    """Requests one after the other, then `IN_FLIGHT` at a time for some seconds."""
    async with OpenAiClient(endpoint) as client:
        request = PlannedRequest(0, 0.0, 1, messages=(ChatMessage("user", text),), shareable_tokens=None)
        for _ in range(20):
            await _ask(client, request)
        alone_ms = [await _ask(client, request) for _ in range(NUM_ALONE)]
        before_s = _cpu_s(processes)
        started_s = time.perf_counter()
        num_done = sum(await asyncio.gather(*(_ask_until(client, request, started_s) for _ in range(IN_FLIGHT))))
        wall_s = time.perf_counter() - started_s
    return Cost(alone_ms, num_done / wall_s, (_cpu_s(processes) - before_s) / num_done * 1e6)


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


async def _ask(client: OpenAiClient, request: PlannedRequest) -> float:
    """Milliseconds. Raises RuntimeError for an answer that is none."""
    capture = StreamCapture()
    await client.send(request, capture)
    if capture.failure or capture.http_status != 200:
        raise RuntimeError(f"status {capture.http_status} {capture.failure} {capture.detail}")
    return (capture.ended_s - capture.sent_s) * 1000


async def _ask_until(client: OpenAiClient, request: PlannedRequest, started_s: float) -> int:
    num_done = 0
    while time.perf_counter() - started_s < THROUGHPUT_S:
        await _ask(client, request)
        num_done += 1
    return num_done


def cost_row(name: str, cost: Cost, direct: Cost) -> str:
    def quantile(values: Sequence[float], percent: int) -> float:
        return statistics.quantiles(values, n=100)[percent - 1]

    added = [quantile(cost.alone_ms, share) - quantile(direct.alone_ms, share) for share in (50, 99)]
    per_core = f"{1e6 / cost.cpu_us_per_request:,.0f}" if cost.cpu_us_per_request else "-"
    return (
        f"| {name} | {added[0]:.2f} | {added[1]:.2f} | {cost.requests_per_s:,.0f} | {cost.cpu_us_per_request:.0f} | "
        f"{per_core} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", type=Path, required=True, help="folder with vllm-router and sglang-router")
    parser.add_argument("--only", action="append", choices=ROUTERS, help="may be repeated; default: all")
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated; default: all")
    parser.add_argument("--rate", type=float, default=14.0, help="requests a second of the routing part")
    parser.add_argument("--documents", type=int, default=50)
    parser.add_argument("--shape", action="append", choices=tuple(SHAPES), help="of the crowded part; default: all")
    parser.add_argument("--seed", action="append", type=int, help="of the crowded part; may be repeated; default: 1")
    parser.add_argument("--crowded-rate", type=float, default=11.0, help="requests a second of the crowded part")
    parser.add_argument("--crowded-s", type=float, default=60.0, help="how long its traffic lasts")
    parser.add_argument("--prompt-words", type=int, default=200, help="of the cost part")
    parser.add_argument("--policy", default="cache_aware", help="of our router")
    parser.add_argument("--processes", type=int, default=1, help="of our router, on one port")
    arguments = parser.parse_args()
    names = arguments.only or ROUTERS
    words = single_token_words(load_tokenizer(resolve_model(DEFAULT_MODEL)))
    parts = arguments.part or PARTS
    if "routing" in parts:
        compare_routing(names, arguments, words)
    if "crowded" in parts:
        compare_crowded(names, arguments, words)
    if "cost" in parts:
        compare_cost(names, arguments, " ".join(words[: arguments.prompt_words]))


def compare_routing(names: Sequence[str], arguments: argparse.Namespace, words: list[str]) -> None:
    planned = documents(
        words,
        Traffic(arguments.rate),
        num_documents=arguments.documents,
        times_each=6,
        document_tokens=2000,
        own_tokens=40,
    )
    prompts = prompts_of(planned, load_tokenizer(resolve_model(DEFAULT_MODEL)))
    print(f"every document computed once: {most_hits(prompts):.1%} cached")
    _compare(names, arguments, planned, prompts, MockWorkers(*ROUTED_TIMING))


def compare_crowded(names: Sequence[str], arguments: argparse.Namespace, words: list[str]) -> None:
    tokenizer = load_tokenizer(resolve_model(DEFAULT_MODEL))
    workers = MockWorkers(*CROWDED_TIMING, CROWDED_BLOCKS)
    for shape in arguments.shape or SHAPES:
        for seed in arguments.seed or (1,):
            planned = as_planned(SHAPES[shape](arguments.crowded_rate, arguments.crowded_s, seed), words)
            prompts = prompts_of(planned, tokenizer)
            print(
                f"{shape}, seed {seed}: {len(planned)} requests, {num_distinct_blocks(prompts):,} blocks of KV for "
                f"eight caches of {CROWDED_BLOCKS:,}; cached if every prefix were computed once "
                f"{most_hits(prompts):.1%}, with one cache as large as all "
                f"{most_hits(prompts, NUM_WORKERS * CROWDED_BLOCKS):.1%}"
            )
            _compare(names, arguments, planned, prompts, workers)


def _compare(
    names: Sequence[str],
    arguments: argparse.Namespace,
    planned: list[PlannedRequest],
    prompts: Sequence[Prompt],
    workers: MockWorkers,
) -> None:
    own = OwnRouter(arguments.policy, arguments.processes)
    print("| router | TTFT p50 ms | p99 ms | cached | max/mean |\n|---|---|---|---|---|")
    print(best_row(prompts, workers))
    for name in names:
        with started_front(name, arguments.routers, workers, own) as front:
            run, spread = asyncio.run(measure_routing(front, planned))
        print(routing_row(name, run, spread), flush=True)


def compare_cost(names: Sequence[str], arguments: argparse.Namespace, text: str) -> None:
    own = OwnRouter(arguments.policy, arguments.processes)
    print("| router | added p50 ms | added p99 ms | requests/s | CPU us/request | requests/s/core |")
    print("|---|---|---|---|---|---|")
    with (
        tempfile.TemporaryDirectory(prefix="tdm-") as directory,
        mock_servers(1, MockWorkers(NO_TIME, NO_TIME), Path(directory)) as urls,
    ):
        direct = asyncio.run(measure_cost(Endpoint(urls[0], DEFAULT_MODEL, "openai"), (), text))
    print(
        f"| (a mock server alone) | {json.dumps(round(statistics.median(direct.alone_ms), 2))} in all | "
        f"| {direct.requests_per_s:,.0f} | | |"
    )
    for name in names:
        with started_front(name, arguments.routers, MockWorkers(NO_TIME, NO_TIME), own) as front:
            cost = asyncio.run(measure_cost(alike(front.endpoint), front.processes, text))
        print(cost_row(name, cost, direct), flush=True)


if __name__ == "__main__":
    main()
