"""What is lost between the engine's step and the client's socket: the engine alone beside the same steps through HTTP.

    python -m benchmarks.through_http                                   one stream and 16, two pools
    python -m benchmarks.through_http --serve-flag=--prefill --serve-flag=0 --serve-flag=--decode --serve-flag=0 \\
        --serve-flag=--aggregated --serve-flag=1                         one process for both

In each round a cluster answers the load of `benchmarks.peers`, then the engine alone, in this process, computes steps
of as many sequences behind as long a context, while the cluster waits. Only the time in which all streams decode
counts. Beside it stands what the scheduler counted meanwhile for each step: the processor time of the engine's thread
(the busiest of the decode worker), of that process's other threads, of the router and of this client, and how long the
engine's thread was ready and had no processor.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from benchmarks.cluster_under_test import ClusterError, started_cluster
from benchmarks.engine import BLOCK_TOKENS, EngineUnderTest, decode
from benchmarks.measurement import RunFailed
from benchmarks.measurement_stages import common_decode_window, rate_while_all_decode
from benchmarks.mock_fleet import found_processes
from benchmarks.openai_client import Endpoint, OpenAiClient, StreamCapture
from benchmarks.option_types import counts
from benchmarks.request_record import RequestRecord
from benchmarks.stream_record import read_stream
from benchmarks.workload import LengthLaw, Workload, plan_synthetic
from cluster.model_files import DEFAULT_MODEL, resolve_model, served_name

REQUEST_TIMEOUT_S = 300.0
POLL_S = 0.02
CLIENT = "client"
ENGINE_THREAD = "engine's thread"
# Of one engine alone in one turn: as long as a window through HTTP, or so.
ALONE_STEPS = 40


@dataclass(frozen=True, slots=True)
class ThreadTime:
    """What the scheduler counted of a thread, or of several, in seconds."""

    on_cpu_s: float = 0.0
    waited_s: float = 0.0  # ready, without a processor

    def __add__(self, other: ThreadTime) -> ThreadTime:
        return ThreadTime(self.on_cpu_s + other.on_cpu_s, self.waited_s + other.waited_s)

    def __sub__(self, other: ThreadTime) -> ThreadTime:
        return ThreadTime(self.on_cpu_s - other.on_cpu_s, self.waited_s - other.waited_s)


ThreadTimes = dict[tuple[str, int], ThreadTime]  # by kind of process and thread id


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of one number of streams. Times are of a step, in seconds."""

    alone_s: float
    alone_cpu_s: float
    served_s: float
    context: int  # tokens behind each stream in the middle of the window
    parts: Mapping[str, ThreadTime]

    @property
    def lost(self) -> float:
        """The share of the engine's own rate that does not reach the client."""
        return 1 - self.alone_s / self.served_s


def read_threads(processes: Mapping[str, Sequence[int]]) -> ThreadTimes:
    """Of every thread of these processes, by kind."""
    found: ThreadTimes = {}
    for kind, pids in processes.items():
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                try:
                    on_cpu_ns, waited_ns, _ = (task / "schedstat").read_text().split()
                except FileNotFoundError:  # the thread has ended meanwhile
                    continue
                found[kind, int(task.name)] = ThreadTime(int(on_cpu_ns) / 1e9, int(waited_ns) / 1e9)
    return found


def parts_between(before: ThreadTimes, after: ThreadTimes) -> dict[str, ThreadTime]:
    """What each kind of process took in between, the engine's thread apart from its process."""
    spent = {thread: total - before.get(thread, ThreadTime()) for thread, total in after.items()}
    of_decode = [thread for thread in spent if thread[0] == "decode"]
    parts: dict[str, ThreadTime] = {}
    if of_decode:
        busiest = max(of_decode, key=lambda thread: spent[thread].on_cpu_s)
        parts[ENGINE_THREAD] = spent.pop(busiest)
    for (kind, _), time_spent in spent.items():
        parts[kind] = parts.get(kind, ThreadTime()) + time_spent
    return parts


@dataclass(frozen=True, slots=True)
class Served:
    """One load through HTTP: what the client saw, and what the threads took from `started_s` to `ended_s`."""

    records: list[RequestRecord]
    started_s: float
    ended_s: float
    parts: Mapping[str, ThreadTime]


async def serve_load(
    endpoint: Endpoint, processes: Mapping[str, Sequence[int]], streams: int, prompt: int, tokens: int, seed: int
) -> Served:
    """`streams` requests at once; threads are read once all have begun, and when the first is nearly through.

    Raises `RunFailed` when a request fails, or the first ended before the last began.
    """
    plan = plan_synthetic(Workload(LengthLaw(prompt, prompt), LengthLaw(tokens, tokens)), np.zeros(streams), seed)
    captures = [StreamCapture() for _ in plan]
    loop = asyncio.get_running_loop()
    async with OpenAiClient(endpoint, REQUEST_TIMEOUT_S) as client:
        sending = [
            asyncio.create_task(client.send(planned, capture)) for planned, capture in zip(plan, captures, strict=True)
        ]
        await _until(lambda: all(capture.pieces or capture.ended_s for capture in captures))
        before, started_s = read_threads(processes), loop.time()
        await _until(lambda: any(len(capture.pieces) >= tokens - 1 or capture.ended_s for capture in captures))
        after, ended_s = read_threads(processes), loop.time()
        await asyncio.gather(*sending)
    records = [
        read_stream(planned, capture, 0.0, intended_s=capture.sent_s)
        for planned, capture in zip(plan, captures, strict=True)
    ]
    for record in records:
        if not record.is_ok or record.num_output_tokens != tokens:
            raise RunFailed(f"a request failed: {record.outcome.value} {record.http_status} {record.detail}")
    return Served(records, started_s, ended_s, parts_between(before, after))


async def _until(is_so: Callable[[], bool]) -> None:
    while True:
        if is_so():
            return
        await asyncio.sleep(POLL_S)


def steps_between(records: Sequence[RequestRecord], start_s: float, end_s: float) -> float:
    """Tokens of a stream, on average, that came in that time."""
    tokens = [
        sum(
            count
            for time_s, count in zip(record.chunk_times_s, record.chunk_tokens, strict=True)
            if start_s < time_s <= end_s
        )
        for record in records
    ]
    return statistics.mean(tokens)


def mean_context(records: Sequence[RequestRecord], prompt: int) -> int:
    """Tokens behind a stream in the middle of the time in which all decode."""
    window = common_decode_window(records)
    if window is None:
        raise RunFailed("the first stream ended before the last began: ask for more tokens with --tokens")
    start_s, end_s = window
    before = steps_between(records, float("-inf"), start_s)
    return prompt + round(before + steps_between(records, start_s, end_s) / 2)


def time_alone(engine: EngineUnderTest, streams: int, context: int) -> tuple[float, float]:
    """Median seconds of a step of the engine by itself, and of this thread's processor time for it."""
    step = engine.step(streams, context - 1, 1)
    decode(engine, step)
    times, cpu_times = [], []
    for _ in range(ALONE_STEPS):
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        decode(engine, step)
        times.append(time.perf_counter() - begun_s)
        cpu_times.append(time.thread_time() - begun_cpu_s)
    return statistics.median(times), statistics.median(cpu_times)


def take_turn(
    engine: EngineUnderTest,
    endpoint: Endpoint,
    processes: Mapping[str, Sequence[int]],
    streams: int,
    options: argparse.Namespace,
    seed: int,
) -> Turn:
    served = asyncio.run(serve_load(endpoint, processes, streams, options.prompt, options.tokens, seed))
    context = mean_context(served.records, options.prompt)
    alone_s, alone_cpu_s = time_alone(engine, streams, context)
    steps = steps_between(served.records, served.started_s, served.ended_s) or float("nan")
    return Turn(
        alone_s=alone_s,
        alone_cpu_s=alone_cpu_s,
        served_s=streams / rate_while_all_decode(served.records),
        context=context,
        parts={
            part: ThreadTime(spent.on_cpu_s / steps, spent.waited_s / steps) for part, spent in served.parts.items()
        },
    )


def table(turns: Mapping[int, Sequence[Turn]]) -> str:
    """Medians of the rounds, and the least and the greatest in brackets."""
    lines = [
        "| streams | context | engine alone, ms a step | through HTTP | lost |",
        "|---|---|---|---|---|",
    ]
    for streams, of_streams in turns.items():
        alone_ms = [1e3 * turn.alone_s for turn in of_streams]
        served_ms = [1e3 * turn.served_s for turn in of_streams]
        lost = [100 * turn.lost for turn in of_streams]
        context = round(statistics.median(turn.context for turn in of_streams))
        lines.append(
            f"| {streams} | {context} | {_spread(alone_ms, 2)} | {_spread(served_ms, 2)} | {_spread(lost, 1)} % |"
        )
    lines += ["", "| streams | CPU us a step: " + " | ".join(_parts(turns)) + " | alone | engine's thread waited |"]
    lines.append("|---" * (len(_parts(turns)) + 3) + "|")
    for streams, of_streams in turns.items():
        cells = [
            f"{1e6 * statistics.median(turn.parts.get(part, ThreadTime()).on_cpu_s for turn in of_streams):,.0f}"
            for part in _parts(turns)
        ]
        alone_us = 1e6 * statistics.median(turn.alone_cpu_s for turn in of_streams)
        waited_us = 1e6 * statistics.median(turn.parts.get(ENGINE_THREAD, ThreadTime()).waited_s for turn in of_streams)
        lines.append(f"| {streams} | " + " | ".join(cells) + f" | {alone_us:,.0f} | {waited_us:,.0f} |")
    return "\n".join(lines)


def _parts(turns: Mapping[int, Sequence[Turn]]) -> list[str]:
    found = {part for of_streams in turns.values() for turn in of_streams for part in turn.parts}
    return sorted(found, key=lambda part: (part != ENGINE_THREAD, part))


def _spread(values: Sequence[float], digits: int) -> str:
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:.{digits}f} [{low:.{digits}f} - {high:.{digits}f}]"


def measure(options: argparse.Namespace) -> dict[int, list[Turn]]:
    """All rounds. Raises `ClusterError` or `RunFailed`."""
    num_tokens = max(options.streams) * (options.prompt + options.tokens + BLOCK_TOKENS)
    engine = EngineUnderTest(options, num_tokens)
    turns: dict[int, list[Turn]] = {streams: [] for streams in options.streams}
    with tempfile.TemporaryDirectory(prefix="tdm-") as directory:
        flags = ["--model", options.model, *options.serve_flag]
        with started_cluster(flags, Path(directory) / "serve.log") as url:
            processes = {kind: [process.pid for process in found] for kind, found in found_processes().items()}
            processes[CLIENT] = [psutil.Process().pid]
            endpoint = Endpoint(url, served_name(resolve_model(options.model)))
            for number in range(options.rounds + 1):
                for streams in options.streams:
                    turn = take_turn(engine, endpoint, processes, streams, options, 1000 * streams + number)
                    if number:  # the first round warms up
                        turns[streams].append(turn)
    engine.runner.close()
    return turns


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.through_http",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=counts, default=[1, 16])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve-flag", action="append", default=[], help="passed on to `tandem serve`; repeatable")
    options = parser.parse_args(arguments)
    # Of the engine alone: what `tandem serve` takes by default.
    options.dtype, options.quantization, options.weight_compression, options.isa = "bfloat16", "none", "auto", ""
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    try:
        turns = measure(options)
    except (ClusterError, ConnectionError, RunFailed) as error:
        print(f"through http: {error}", file=sys.stderr)
        return 2
    print(table(turns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
