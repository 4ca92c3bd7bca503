"""Our routing policies against each other on mock workers, same traffic, one after the other in one run.

    python -m benchmarks.router_policies                      documents and chats on 4 prefill + 4 decode workers
    python -m benchmarks.router_policies --workload system    one shared system prompt on 8 + 4
    python -m benchmarks.router_policies --prefill 32 --decode 32 --workload documents --policy cache_aware --rate 20

Time to first token, cache hits, spread over the prefill workers (the busiest one's requests over the mean), least share
of one, prompts that a decode worker computed itself, and for chats how many turns stayed with the worker of the turn
before. A quiet machine gives the workers' own times; a busy one
adds to every policy alike.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.cluster_under_test import started_cluster
from benchmarks.mock_fleet import found_processes, start_cost
from benchmarks.openai_client import Endpoint
from benchmarks.routed_run import RoutedRun, imbalance, run_workload
from benchmarks.routing_workloads import Traffic, chats, documents, shared_system_prompt, single_token_words
from benchmarks.workload import PlannedRequest
from cluster.model_files import DEFAULT_MODEL, resolve_model, served_name
from cluster.tokenizer import load_tokenizer

POLICIES = ("round_robin", "power_of_two", "session", "least_loaded", "cache_aware")
WORKLOADS = ("documents", "chats", "system")
NUM_PREFILL = {"documents": 4, "chats": 4, "system": 8}


def plan(workload: str, words: list[str], rate_per_s: float, scale: float) -> list[PlannedRequest]:
    """`scale` 1 is some 40 s of traffic at 9 requests a second."""
    traffic = Traffic(rate_per_s)
    if workload == "documents":
        return documents(
            words, traffic, num_documents=int(60 * scale), times_each=6, document_tokens=2000, own_tokens=40
        )
    if workload == "chats":
        return chats(words, traffic, num_chats=int(40 * scale), num_turns=9, first_tokens=600, turn_tokens=60)
    return shared_system_prompt(words, traffic, num_requests=int(360 * scale), system_tokens=2000, own_tokens=200)


def row(policy: str, workload: str, num_workers: int, run: RoutedRun, planned: list[PlannedRequest]) -> str:
    counts = run.requests_by_worker()
    prefills = Counter({worker: count for worker, count in counts.items() if worker.startswith("prefill")})
    least = min(prefills.values(), default=0) / max(1, prefills.total()) if len(prefills) == num_workers else 0.0
    stayed = f"{run.share_that_stayed(planned):.0%}" if workload == "chats" else "-"
    local = sum(count for worker, count in counts.items() if worker.startswith("decode"))
    failed = f"; FAILED {dict(run.failures)}" if run.failures else ""
    return (
        f"| {workload} | {policy} | {run.ttft_percentile_ms(0.5):.0f} | {run.ttft_percentile_ms(0.99):.0f} | "
        f"{run.hit_rate:.0%} | {imbalance(prefills, num_workers):.2f} | {least:.0%} | {local} | {stayed} |{failed}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", choices=POLICIES, help="may be repeated; default: all")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="may be repeated; default: all")
    parser.add_argument("--rate", type=float, default=9.0, help="requests a second")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--prefill", type=int, help="workers; default: 8 for the system prompt, else 4")
    parser.add_argument("--decode", type=int, default=4, help="workers")
    arguments = parser.parse_args()
    model = resolve_model(DEFAULT_MODEL)
    words = single_token_words(load_tokenizer(model))
    print("| workload | policy | TTFT p50 ms | p99 ms | cached | max/mean | least | local | stayed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for workload in arguments.workload or WORKLOADS:
        planned = plan(workload, words, arguments.rate, arguments.scale)
        for policy in arguments.policy or POLICIES:
            num_prefill = arguments.prefill or NUM_PREFILL[workload]
            pools = ["--prefill", str(num_prefill), "--decode", str(arguments.decode)]
            with (
                tempfile.TemporaryDirectory(prefix="tdm-") as directory,
                started_cluster(["--engine", "mock", *pools, "--policy", policy], Path(directory) / "serve.log") as url,
            ):
                print(f"<!-- {start_cost(found_processes())} -->", file=sys.stderr)
                run = asyncio.run(run_workload(Endpoint(url, served_name(model)), planned))
            print(row(policy, workload, num_prefill, run, planned), flush=True)


if __name__ == "__main__":
    main()
