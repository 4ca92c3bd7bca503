"""Sends planned requests open loop to one front and says where they went: times to first token, cache hits, spread."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.openai_client import Endpoint, OpenAiClient, StreamCapture
from benchmarks.statistics import percentile
from benchmarks.stream_record import events, read_stream
from benchmarks.workload import PlannedRequest

END_TIMEOUT_S = 60.0  # for what still runs when the last request was sent


@dataclass(slots=True)
class RoutedRun:
    """What one run of one workload gave. `worker_of` as far as the server's timeline says it."""

    ttft_ms: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    worker_of: dict[int, str] = field(default_factory=dict)  # request -> who prefilled
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def ttft_percentile_ms(self, share: float) -> float:
        return percentile(self.ttft_ms, share)

    def requests_by_worker(self) -> Counter[str]:
        return Counter(self.worker_of.values())

    def share_that_stayed(self, planned: Sequence[PlannedRequest]) -> float:
        """Of later turns: those prefilled where the turn before was."""
        homes: dict[int, str] = {}
        stayed = []
        for request in planned:
            worker = self.worker_of.get(request.index)
            if worker is None:
                continue
            if request.session in homes:
                stayed.append(homes[request.session] == worker)
            homes[request.session] = worker
        return sum(stayed) / len(stayed) if stayed else 0.0


def imbalance(counts: Counter[str], num_workers: int) -> float:
    """The busiest worker's requests over the mean; 1 is even."""
    return max(counts.values(), default=0) * num_workers / max(1, counts.total())


async def run_workload(endpoint: Endpoint, planned: Sequence[PlannedRequest]) -> RoutedRun:
    """Every request at its time, whatever became of those before it."""
    loop = asyncio.get_running_loop()
    captures = [StreamCapture() for _ in planned]
    async with OpenAiClient(endpoint, timeout_s=END_TIMEOUT_S) as client:
        started_s = loop.time()
        sent = []
        for request, capture in zip(planned, captures, strict=True):
            await asyncio.sleep(max(0.0, started_s + request.intended_s - loop.time()))
            sent.append(asyncio.create_task(client.send(request, capture)))
        await asyncio.gather(*sent)
    run = RoutedRun()
    for request, capture in zip(planned, captures, strict=True):
        _count(run, request, capture, started_s)
    return run


def _count(run: RoutedRun, request: PlannedRequest, capture: StreamCapture, started_s: float) -> None:
    record = read_stream(request, capture, started_s, intended_s=request.intended_s)
    if not record.is_ok or record.ttft_s is None:
        run.failures[f"{record.outcome.value}: {record.detail[:120]}"] += 1
        return
    run.ttft_ms.append(record.ttft_s * 1000)
    run.prompt_tokens += record.prompt_tokens
    run.cached_tokens += record.cached_tokens or 0
    timeline = _timeline(capture)
    if timeline:
        run.worker_of[request.index] = timeline.get("prefill_worker_id") or timeline.get("decode_worker_id", "")


def _timeline(capture: StreamCapture) -> dict[str, Any]:
    """From the last chunk that has one."""
    found: dict[str, Any] = {}
    for _, data in events(capture):
        if '"timeline"' in data:
            found = (json.loads(data).get("tandem") or {}).get("timeline") or found
    return found
