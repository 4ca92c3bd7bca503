"""How long one placement takes, for a prompt of 32k tokens: `python -m benchmarks.router_decision`

    hash      the prompt's block hashes (on a thread in the router, once for each prompt)
    match     the index's answer: who holds how much of it
    place     scores, pairs, choice

Prints medians and 99th percentiles of match and place together, in milliseconds of wall time and of this thread's CPU
time (what a machine of one's own would take), and the index's memory for each block. The process is that of a router
in one respect: its garbage collector is settled as there.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import time

import numpy as np
from tandem.v1 import worker_pb2

from cluster.block_hash import HashScope, hash_blocks
from cluster.garbage import settle_objects
from cluster.identity import BlockHash, Incarnation, WorkerId
from router.cache_view import CacheView
from router.placement import ClusterSnapshot, RequestView
from router.policies import choose_policy
from router.prefix_index import PrefixIndex
from router.worker_state import Role, WorkerState

BLOCK_TOKENS = 16
PROMPT_TOKENS = 32_768
ROUNDS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks in the index")
    parser.add_argument("--workers", type=int, nargs="*", default=[64, 1000], help="sizes of the fleet")
    arguments = parser.parse_args()
    for num_workers in arguments.workers:
        measure(num_workers, arguments.blocks)


def measure(num_workers: int, num_blocks: int) -> None:
    """One line: half of the workers prefill, half decode; a prompt's prefix lies on a tenth of them to some length."""
    chance = random.Random(1)
    workers = [_worker(index, num_workers) for index in range(num_workers)]
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    view = CacheView(PrefixIndex(2 * num_blocks), time.monotonic)
    for worker in workers:
        view.worker_joined(worker.worker_id)
    for worker in workers:
        filler = [BlockHash(chance.randbytes(16)) for _ in range(num_blocks // num_workers)]
        view.index.stored(worker.worker_id, filler)
    bytes_per_block = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024 / num_blocks
    tokens = np.array([chance.randrange(49_152) for _ in range(PROMPT_TOKENS)], dtype=np.int32)
    scope = HashScope(b"scope", "model", BLOCK_TOKENS)
    hashes = hash_blocks(tokens, scope)
    for worker in workers[:: max(1, num_workers // 10)]:
        view.index.stored(worker.worker_id, hashes[: chance.randrange(len(hashes))])
    snapshot = ClusterSnapshot(
        [worker for worker in workers if worker.role is Role.PREFILL],
        [worker for worker in workers if worker.role is Role.DECODE],
    )
    policy = choose_policy("cache_aware", 1).policy
    settle_objects()
    hash_ms: list[float] = []
    match_ms: list[float] = []
    place_ms: list[float] = []
    cpu_ms: list[float] = []
    for _ in range(ROUNDS):
        times = [time.perf_counter()]
        if len(hash_ms) < 20:
            hash_blocks(tokens, scope)
        times.append(time.perf_counter())
        cpu_s = time.thread_time()
        match = view.match(hashes, BLOCK_TOKENS, PROMPT_TOKENS)
        times.append(time.perf_counter())
        request = RequestView(PROMPT_TOKENS, 256, hashes, match.tokens, match.longest)
        policy.place(request, snapshot, time.monotonic())
        times.append(time.perf_counter())
        cpu_ms.append((time.thread_time() - cpu_s) * 1000)
        if len(hash_ms) < 20:
            hash_ms.append((times[1] - times[0]) * 1000)
        match_ms.append((times[2] - times[1]) * 1000)
        place_ms.append((times[3] - times[2]) * 1000)
    decision_ms = [match + place for match, place in zip(match_ms, place_ms, strict=True)]
    print(
        f"{num_workers} workers, {num_blocks:,} blocks ({bytes_per_block:.0f} bytes each): "
        f"hash {statistics.median(hash_ms):.2f} ms; match p50 {statistics.median(match_ms):.3f}; "
        f"place p50 {statistics.median(place_ms):.3f}; decision p50 {statistics.median(decision_ms):.3f} "
        f"p99 {statistics.quantiles(decision_ms, n=100)[98]:.3f} ms; "
        f"CPU p50 {statistics.median(cpu_ms):.3f} p99 {statistics.quantiles(cpu_ms, n=100)[98]:.3f} ms"
    )


def _worker(index: int, num_workers: int) -> WorkerState:
    role = Role.PREFILL if index < num_workers // 2 else Role.DECODE
    return WorkerState(
        worker_id=WorkerId(f"{role.value}-{index}"),
        incarnation=Incarnation(f"incarnation-{index}"),
        role=role,
        control_address="",
        block_tokens=BLOCK_TOKENS,
        kv_bytes_per_token=23_040,
        num_layers=30,
        is_ready=True,
        is_connected=True,
        load=worker_pb2.LoadReport(total_blocks=100_000, free_blocks=90_000, running_requests=index % 7),
    )


if __name__ == "__main__":
    main()
