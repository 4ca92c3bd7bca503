"""What connections that ask nothing cost the router. `python -m benchmarks.idle_connections --connections 10000`

Opens them, asks each once for `/livez`, leaves them open, and compares before and with them: memory of the router, and
the time to a first token of new requests. Then waits for the router to close them, 60 s after their answer. Mock
workers; the client is this process. Ends with status 1 above 40 KiB a connection, above twice the 99th percentile of
before, when they were closed early, or when one is still open 90 s later.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.cluster_under_test import started_cluster

MAX_BYTES_PER_CONNECTION = 40 * 1024
MAX_SLOWER = 2.0
CLOSED_WITHIN_S = 90.0
OPENED_AT_ONCE = 200
NUM_ASKED = 100
CALL_TIMEOUT_S = 30.0
# Descriptors beside the connections.
SPARE_DESCRIPTORS = 200


# A writer that nobody holds closes its connection.
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def open_idle(host: str, port: int) -> Connection:
    """It has had one answer; its reader sees the end when the router closes it."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET /livez HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    async with asyncio.timeout(CALL_TIMEOUT_S):
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        await reader.readexactly(int(lengths[0]) if lengths else 0)
    return reader, writer


async def first_token_ms(client: httpx.AsyncClient, model: str, number: int) -> float:
    prompt = [(31 * number + index) % 40_000 + 1 for index in range(32)]
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "stream": True}
    started_s = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                return (time.monotonic() - started_s) * 1000
    raise RuntimeError("an answer had no token")


async def _p99_ms(client: httpx.AsyncClient, model: str, first: int) -> float:
    times_ms = [await first_token_ms(client, model, first + number) for number in range(NUM_ASKED)]
    return statistics.quantiles(times_ms, n=100)[98]


async def _measured(url: str, num_connections: int) -> int:
    router = next(one for one in psutil.Process().children(recursive=True) if "router" in one.cmdline())
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 0
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=CALL_TIMEOUT_S) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await _p99_ms(client, model, 0)
        before_ms, before_bytes = await _p99_ms(client, model, 1000), router.memory_info().rss
        opened: list[Connection] = []
        while len(opened) < num_connections:
            more = min(OPENED_AT_ONCE, num_connections - len(opened))
            opened += await asyncio.gather(*(open_idle(host, port) for _ in range(more)))
        opened_s = time.monotonic()
        per_connection = (router.memory_info().rss - before_bytes) / num_connections
        with_them_ms = await _p99_ms(client, model, 2000)
        still_open = sum(not reader.at_eof() for reader, _ in opened)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSED_WITHIN_S):
                await asyncio.gather(*(reader.read() for reader, _ in opened))
        closed_s = time.monotonic() - opened_s
        left = sum(not reader.at_eof() for reader, _ in opened)
    sys.stdout.write(
        f"{num_connections} idle connections: {per_connection / 1024:.1f} KiB each; TTFT p99 {before_ms:.0f} ms, "
        f"{with_them_ms:.0f} ms with {still_open} of them; {left} left open after {closed_s:.0f} s\n"
    )
    is_cheap = per_connection <= MAX_BYTES_PER_CONNECTION and with_them_ms <= MAX_SLOWER * before_ms
    return 0 if is_cheap and still_open and not left else 1


def main(num_connections: int) -> int:
    """The exit status."""
    needed = num_connections + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        sys.stdout.write(f"{num_connections} connections need {needed} descriptors, the limit is {hard} (ulimit -Hn)\n")
        return 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    with (
        tempfile.TemporaryDirectory(prefix="tandem-idle-") as name,
        started_cluster(("--engine", "mock"), Path(name) / "cluster.log") as url,
    ):
        return asyncio.run(_measured(url, num_connections))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    sys.exit(main(parser.parse_args().connections))
