"""How many mock workers this machine hosts: what they take to start, what they take doing nothing, how they serve.

    python -m benchmarks.mock_fleet                                     32 prefill + 32 decode
    python -m benchmarks.mock_fleet --prefill 8 --decode 8 --rate 4     smaller steps first

Every worker is a process; handoff, events, membership and routing are real, time comes from the timing model. Idle: a
figure for each kind of process, first with no pair of workers linked by a request, then after the traffic, when many
are. Traffic: documents that are asked about several times, through the HTTP API, in one stretch of Poisson arrivals.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.cluster_under_test import started_cluster
from benchmarks.openai_client import Endpoint
from benchmarks.routed_run import RoutedRun, run_workload
from benchmarks.routing_workloads import Traffic, documents, single_token_words
from benchmarks.workload import PlannedRequest
from cluster.model_files import DEFAULT_MODEL, resolve_model, served_name
from cluster.tokenizer import load_tokenizer

# What a supervised process is, by a part of its command line.
KINDS = {"prefill_worker": "prefill", "decode_worker": "decode", "router": "router", "valkey-server": "redis"}


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process since its start."""

    cpu_s: float
    switches: int  # voluntary context switches of all its threads: how often one of them went to sleep again

    @classmethod
    def of(cls, process: psutil.Process) -> Usage:
        times = process.cpu_times()
        tasks = Path(f"/proc/{process.pid}/task").glob("*/status")
        return cls(times.user + times.system, sum(_voluntary_switches(task) for task in tasks))


def _voluntary_switches(status: Path) -> int:
    try:
        lines = status.read_text().splitlines()
    except FileNotFoundError:  # the thread has ended meanwhile
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def idle_rows(processes: dict[str, list[psutil.Process]], seconds: float) -> list[str]:
    """For each kind: CPU of one process in thousandths of a core, and how often it wakes up in a second."""
    before = {process.pid: Usage.of(process) for members in processes.values() for process in members}
    time.sleep(seconds)
    rows = []
    for kind, members in processes.items():
        now = {process.pid: Usage.of(process) for process in members}
        cpu_s = sum(usage.cpu_s - before[pid].cpu_s for pid, usage in now.items())
        switches = sum(usage.switches - before[pid].switches for pid, usage in now.items())
        each, woken = 1000 * cpu_s / seconds / len(members), switches / seconds / len(members)
        rows.append(f"| {kind} | {len(members)} | {each:.1f} | {woken:.0f} | {cpu_s / seconds:.2f} |")
    return rows


def idle_table(title: str, processes: dict[str, list[psutil.Process]], seconds: float) -> str:
    head = "| process | how many | CPU of one, 1/1000 core | wake-ups/s of one | cores, all |\n|---|---|---|---|---|"
    return "\n".join([title, "", head, *idle_rows(processes, seconds), ""])


def found_processes() -> dict[str, list[psutil.Process]]:
    """Those of the cluster that this process has started, by kind."""
    found: dict[str, list[psutil.Process]] = defaultdict(list)
    for process in psutil.Process().children(recursive=True):
        for part, kind in KINDS.items():
            if any(part == Path(word).name for word in process.cmdline()):
                found[kind].append(process)
    return dict(found)


def start_cost(processes: dict[str, list[psutil.Process]]) -> str:
    """What the workers of a cluster that has just become ready have taken: memory that is theirs, and CPU time."""
    workers = [*processes.get("prefill", []), *processes.get("decode", [])]
    pss_mib = sum(process.memory_full_info().pss for process in workers) / 2**20
    cpu_s = sum(Usage.of(process).cpu_s for process in workers)
    each = f"{pss_mib / len(workers):.0f} MiB and {cpu_s / len(workers):.2f} s each"
    return f"{len(workers)} workers ready: {pss_mib:,.0f} MiB and {cpu_s:.0f} s of CPU time in all, {each}"


def plan(rate_per_s: float, num_requests: int) -> list[PlannedRequest]:
    words = single_token_words(load_tokenizer(resolve_model(DEFAULT_MODEL)))
    times_each = 5
    return documents(
        words,
        Traffic(rate_per_s),
        num_documents=max(1, num_requests // times_each),
        times_each=times_each,
        document_tokens=2000,
        own_tokens=40,
    )


def served(run: RoutedRun, took_s: float) -> str:
    prefilled = [worker for worker in run.worker_of.values() if worker.startswith("prefill")]
    spread, at_home = len(set(prefilled)), len(run.worker_of) - len(prefilled)
    return (
        f"{len(run.ttft_ms)} answers in {took_s:.0f} s, {run.failures.total()} failed: TTFT p50 "
        f"{run.ttft_percentile_ms(0.5):.0f} ms, p99 {run.ttft_percentile_ms(0.99):.0f} ms, {run.hit_rate:.0%} of the "
        f"tokens cached, prompts on {spread} prefill workers, {at_home} on decode workers"
        f"{f'; {dict(run.failures)}' if run.failures else ''}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=int, default=32, help="workers")
    parser.add_argument("--decode", type=int, default=32, help="workers")
    parser.add_argument("--idle-s", type=float, default=15.0, help="how long nothing is asked, before and after")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=250)
    parser.add_argument("--engine", choices=("mock", "real"), default="mock")
    arguments = parser.parse_args()
    planned = plan(arguments.rate, arguments.requests)
    pools = ["--prefill", str(arguments.prefill), "--decode", str(arguments.decode)]
    with tempfile.TemporaryDirectory(prefix="tdm-") as directory:
        begun_s = time.monotonic()
        with started_cluster(["--engine", arguments.engine, *pools], Path(directory) / "serve.log") as url:
            processes = found_processes()
            print(f"{start_cost(processes)}; ready after {time.monotonic() - begun_s:.0f} s\n", flush=True)
            print(idle_table("Idle, before any request", processes, arguments.idle_s), flush=True)
            begun_s = time.monotonic()
            endpoint = Endpoint(url, served_name(resolve_model(DEFAULT_MODEL)))
            run = asyncio.run(run_workload(endpoint, planned))
            print(f"{served(run, time.monotonic() - begun_s)}\n", flush=True)
            print(idle_table("Idle, after the traffic", processes, arguments.idle_s), flush=True)


if __name__ == "__main__":
    main()
