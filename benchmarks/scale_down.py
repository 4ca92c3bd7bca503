"""Pools that shrink while long streams run: how many clients notice. `python -m benchmarks.scale_down --seconds 60`

Starts `tandem serve --engine mock` with two workers of each kind, opens streams, lets the policy shrink both pools to
one in the middle, and counts answers that were cut short or failed. Drains last 3 s, so streams move.
Ends with status 1 if anybody noticed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.cluster_under_test import started_cluster

POLICY = "version: 1\nname: shrink\ntick_s: 1.0\nprefill: {{min: {0}, max: 2}}\ndecode: {{min: {0}, max: 2}}\n" + (
    "scale_down: {{window_s: 3.0, cooldown_s: 1.0, after_up_s: 1.0}}\n"
)
MOCK_TOKENS_PER_S = 80  # 12 ms a step and some
DRAIN_TIMEOUT_S = "3"
STATUS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class StreamOutcome:
    """One answer as its client saw it."""

    num_chunks: int
    is_complete: bool
    longest_gap_s: float


def main(seconds: float, num_streams: int) -> int:
    """The exit status."""
    with tempfile.TemporaryDirectory(prefix="tandem-scale-down-") as name:
        folder = Path(name)
        policy = folder / "policy.yaml"
        policy.write_text(POLICY.format(2))
        flags = ("--engine", "mock", "--prefill", "2", "--decode", "2", "--drain-timeout-s", DRAIN_TIMEOUT_S)
        with started_cluster((*flags, "--autoscale", str(policy)), folder / "cluster.log") as url:

            def let_shrink() -> None:
                policy.write_text(POLICY.format(1))

            return asyncio.run(_run(url, let_shrink, seconds, num_streams))


async def _run(url: str, let_shrink: Callable[[], None], seconds: float, num_streams: int) -> int:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=seconds * 4 + 60) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        num_tokens = int(seconds * MOCK_TOKENS_PER_S)
        streams = [asyncio.create_task(_stream(client, model, num_tokens)) for _ in range(num_streams)]
        await asyncio.sleep(seconds / 6)
        before = await _pools(client)
        let_shrink()
        started_s = time.monotonic()
        while await _pools(client) != {"decode": 1, "prefill": 1}:
            if time.monotonic() - started_s > seconds + 60:
                sys.stdout.write("the pools did not shrink\n")
                return 1
            await asyncio.sleep(1)
        shrunk_after_s = time.monotonic() - started_s
        were_running = sum(not stream.done() for stream in streams)
        outcomes = await asyncio.gather(*streams)
    failed = sum(not outcome.is_complete for outcome in outcomes)
    gap_s = max(outcome.longest_gap_s for outcome in outcomes)
    sys.stdout.write(
        f"{before} to one of each after {shrunk_after_s:.0f} s, while {were_running} of {num_streams} streams of "
        f"{num_tokens} tokens ran: {failed} noticed; longest gap between two chunks {gap_s:.2f} s\n"
    )
    return 1 if failed or not were_running else 0


async def _stream(client: httpx.AsyncClient, model: str, num_tokens: int) -> StreamOutcome:
    body = {"model": model, "prompt": "once", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    num_chunks, reason, gap_s, last_s = 0, None, 0.0, time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now_s = time.monotonic()
            gap_s, last_s = max(gap_s, now_s - last_s), now_s
            num_chunks += 1
            choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
            reason = choices[0].get("finish_reason") or reason
    return StreamOutcome(num_chunks, answer.status_code == 200 and reason == "length", gap_s)


async def _pools(client: httpx.AsyncClient) -> dict[str, int]:
    answer = await client.get("/readyz", timeout=STATUS_TIMEOUT_S)
    pools: dict[str, int] = answer.json()["pools"]
    return pools


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each stream, about")
    parser.add_argument("--streams", type=int, default=8)
    given = parser.parse_args()
    sys.exit(main(given.seconds, given.streams))
