"""Traffic for as long as you like, with a fault every 10 to 30 s. `python -m benchmarks.soak --minutes 60 --seed 7`

Each fault finds the cluster whole again. `tests/integration/test_endurance.py` has a few in every run of the suite.

    faults   SIGKILL, SIGTERM or two seconds of SIGSTOP for a worker; the same for Redis, but no SIGTERM
    answers  each must come whole: all its tokens, a finish reason, the end of the stream
    ledger   every worker accounts for all its blocks when the traffic is over
    growth   memory and descriptors of supervisor and router, which live through all of it, as slopes over the run;
             a few thousand short requests come first, so that what may grow to a bound has done so

The router is not killed: its streams are cut by design (`tests/integration/test_mock_chaos.py` has that). Mock workers.
Ends with status 1 for an answer that is not whole, a block that is not accounted for, descriptors that grow, or, in
runs of an hour and more, memory that grows by 1 MiB an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.cluster_under_test import started_cluster

FLAGS = ("--engine", "mock", "--prefill", "2", "--decode", "2", "--drain-timeout-s", "3")
NUM_STREAMS = 6
POOLS = {"decode": 2, "prefill": 2}
PAUSE_S = (10.0, 30.0)
STOP_S = 2.0
SAMPLE_S = 2.0
# Allocators and thread pools settle first.
WARM_UP_SHARE = 0.25
# More than the router remembers of anything (4,096 prefixes that were asked for): at the run's own rate of three
# requests a second its tables would fill for most of an hour and look like a leak.
NUM_FILLING_REQUESTS = 6_000
FILLING_TOKENS = 2
SAY_EVERY_S = 60.0
MAX_GROWTH_BYTES_PER_H = 2**20
MIN_HOURS_FOR_GROWTH = 1.0
SETTLE_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 120.0
VOCABULARY = 40_000


@dataclass(slots=True)
class Samples:
    """One process over the run: seconds, bytes, descriptors."""

    at_s: list[float] = field(default_factory=list)
    rss_bytes: list[float] = field(default_factory=list)
    num_fds: list[float] = field(default_factory=list)

    def add(self, at_s: float, process: psutil.Process) -> None:
        self.at_s.append(at_s)
        self.rss_bytes.append(process.memory_info().rss)
        self.num_fds.append(process.num_fds())

    def slope_per_h(self, values: list[float]) -> float:
        """Least squares after the warm-up; 0 for too few samples."""
        first = int(len(values) * WARM_UP_SHARE)
        if len(values) - first < 3:
            return 0.0
        return statistics.linear_regression(self.at_s[first:], values[first:]).slope * 3600


@dataclass(slots=True)
class Soak:
    """One run against one cluster."""

    client: httpx.AsyncClient
    supervisor: psutil.Process
    seed: int
    ends_s: float
    pause_s: tuple[float, float] = PAUSE_S
    max_faults: int | None = None  # it is over after so many as well
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    samples: dict[str, Samples] = field(default_factory=lambda: {"supervisor": Samples(), "router": Samples()})

    async def fill(self, model: str) -> None:
        """Short requests, each with a prompt of its own, until the router's tables are full."""
        remaining = iter(range(NUM_FILLING_REQUESTS))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_STREAMS):
                tasks.create_task(self._fill(model, remaining))

    async def _fill(self, model: str, remaining: Iterator[int]) -> None:
        for number in remaining:
            self.outcomes[await self._ask(model, _prompt(NUM_STREAMS, number), FILLING_TOKENS)] += 1

    async def run(self, model: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            for stream in range(NUM_STREAMS):
                tasks.create_task(self._ask_for_ever(model, stream))
            tasks.create_task(self._trouble_for_ever())
            tasks.create_task(self._sample_for_ever())

    @property
    def is_over(self) -> bool:
        is_enough = self.max_faults is not None and self.faults.total() >= self.max_faults
        return is_enough or time.monotonic() >= self.ends_s

    async def _ask_for_ever(self, model: str, stream: int) -> None:
        number, chance = 0, random.Random(f"{self.seed} {stream}")
        while not self.is_over:
            number += 1
            self.outcomes[await self._ask(model, _prompt(stream, number), chance.randint(1, 200))] += 1

    async def _ask(self, model: str, prompt: list[int], num_tokens: int) -> str:
        """`whole`, or what was wrong."""
        body = {
            "model": model, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        reason, completion_tokens, line = None, 0, ""
        try:
            async with self.client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    reason = (event.get("choices") or [{}])[0].get("finish_reason") or reason
                    completion_tokens = (event.get("usage") or {}).get("completion_tokens", completion_tokens)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        if answer.status_code == httpx.codes.OK and (reason, completion_tokens) == ("length", num_tokens):
            return "whole"
        return f"{answer.status_code} {reason or line[:200]}, {completion_tokens} of {num_tokens} tokens"

    async def _trouble_for_ever(self) -> None:
        chance = random.Random(self.seed)
        while not self.is_over:
            pause_s = chance.uniform(*self.pause_s)
            if time.monotonic() + pause_s + STOP_S >= self.ends_s:
                return
            await asyncio.sleep(pause_s)
            victims = _children(self.supervisor, ("prefill_worker", "decode_worker", "valkey-server"))
            name, process = chance.choice(sorted(victims, key=lambda victim: (victim[0], victim[1].pid)))
            kinds = [signal.SIGKILL, signal.SIGSTOP, *([signal.SIGTERM] if name != "valkey-server" else [])]
            await self._trouble(name, process, chance.choice(kinds))
            await self._settled()

    async def _trouble(self, name: str, process: psutil.Process, kind: signal.Signals) -> None:
        os.kill(process.pid, kind)
        if kind is signal.SIGSTOP:
            try:
                await asyncio.sleep(STOP_S)
            finally:
                os.kill(process.pid, signal.SIGCONT)
        else:
            await asyncio.to_thread(psutil.wait_procs, [process], SETTLE_TIMEOUT_S)
        self.faults[f"{kind.name} {name}"] += 1

    async def _settled(self) -> dict[str, Any]:
        """The status once all workers are back, or the last one when they do not come."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            status: dict[str, Any] = (await self.client.get("/statusz")).json()
            if status["pools"] == POOLS or time.monotonic() > deadline_s:
                return status
            await asyncio.sleep(0.5)

    async def _sample_for_ever(self) -> None:
        router = _children(self.supervisor, ("router",))[0][1]
        started_s = time.monotonic()
        while not self.is_over:
            now_s = time.monotonic()
            self.samples["supervisor"].add(now_s - started_s, self.supervisor)
            self.samples["router"].add(now_s - started_s, router)
            await asyncio.sleep(SAMPLE_S)

    async def lost_blocks(self) -> int:
        """Of all workers, once all of them are back; each must read 0."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            status = await self._settled()
            lost = int(status["block_conservation_error"])
            if not lost or time.monotonic() > deadline_s:
                return lost if status["pools"] == POOLS else max(lost, 1)
            await asyncio.sleep(0.5)

    def growing(self) -> list[str]:
        """Processes that keep descriptors: one more or less at the end of a short run counts for nothing."""
        return [
            name
            for name, samples in self.samples.items()
            if samples.num_fds[-1] > statistics.median(samples.num_fds) + NUM_STREAMS
        ]


def main(minutes: float, seed: int) -> int:
    """The exit status."""
    with (
        tempfile.TemporaryDirectory(prefix="tandem-soak-") as name,
        started_cluster(FLAGS, Path(name) / "cluster.log") as url,
    ):
        return asyncio.run(_judged(url, minutes, seed))


async def _judged(url: str, minutes: float, seed: int) -> int:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=ANSWER_TIMEOUT_S) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        supervisor = _children(psutil.Process(), ("serve",))[0][1]
        soak = Soak(client, supervisor, seed, math.inf)
        sys.stdout.write(f"{NUM_FILLING_REQUESTS} short requests first\n")
        sys.stdout.flush()
        await soak.fill(model)
        soak.ends_s = time.monotonic() + minutes * 60
        saying = asyncio.create_task(_say_for_ever(soak, minutes))
        await soak.run(model)
        saying.cancel()
        lost = await soak.lost_blocks()
    sys.stdout.write(f"seed {seed}, {minutes:g} minutes, faults: {dict(soak.faults)}\n")
    sys.stdout.write(f"answers: {dict(soak.outcomes)}\nblocks not accounted for: {lost}\n")
    is_growing = bool(soak.growing())
    for name, samples in soak.samples.items():
        fds, rss = samples.slope_per_h(samples.num_fds), samples.slope_per_h(samples.rss_bytes)
        least, most = min(samples.num_fds, default=0), max(samples.num_fds, default=0)
        sys.stdout.write(
            f"{name}: {samples.rss_bytes[-1] / 2**20:.1f} MiB, {rss / 2**20:+.2f} MiB/h; "
            f"{least:.0f} to {most:.0f} descriptors, {fds:+.1f}/h\n"
        )
        is_growing |= minutes >= 60 * MIN_HOURS_FOR_GROWTH and rss > MAX_GROWTH_BYTES_PER_H
    is_whole = set(soak.outcomes) == {"whole"}
    return 0 if is_whole and not lost and not is_growing else 1


async def _say_for_ever(soak: Soak, minutes: float) -> None:
    """A line a minute."""
    started_s = time.monotonic()
    while True:
        await asyncio.sleep(SAY_EVERY_S)
        wrong = soak.outcomes.total() - soak.outcomes["whole"]
        sys.stdout.write(
            f"{(time.monotonic() - started_s) / 60:.0f} of {minutes:g} minutes: {soak.faults.total()} faults, "
            f"{soak.outcomes.total()} answers, {wrong} not whole, "
            f"router {soak.samples['router'].rss_bytes[-1] / 2**20:.1f} MiB\n"
        )
        sys.stdout.flush()


def _prompt(stream: int, number: int) -> list[int]:
    """200 tokens that all requests share and 200 of its own."""
    start = 7919 * stream + 104_729 * number
    return [token % VOCABULARY + 1 for token in (*range(200), *range(start, start + 200))]


def _children(parent: psutil.Process, words: tuple[str, ...]) -> list[tuple[str, psutil.Process]]:
    """Processes below `parent` that have one of the words in their command, with the word."""
    found = []
    for child in parent.children(recursive=True):
        try:
            command = [Path(part).name for part in child.cmdline()]
        except psutil.NoSuchProcess:
            continue
        found += [(word, child) for word in words if word in command]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=7, help="of the faults: whom, when, what")
    given = parser.parse_args()
    sys.exit(main(given.minutes, given.seed))
