"""What moving KV costs on one host: bandwidth by transport, block size and group size, beside memcpy of the same run.

    python -m benchmarks.kv_transfer [--transports shm,shm-direct,tcp,ucx,nixl] [--out bench-out]

Sender and receiver are two processes. A round moves `ROUND_BYTES` in frames of one group each: gathered from blocks
that lie scattered in the sender's pool, digested, sent, landed in scattered blocks, digested again and compared. Shown
is the median of the rounds but the first. memcpy copies the same runs between two pools of this process on one thread:
what one copy without any check could reach.

On a machine that is not one's own the wall clock shows the neighbours. So the CPU time of each side is shown beside it:
both sides work at once, so the slower one bounds what a quiet machine with two free cores moves.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import multiprocessing
import multiprocessing.connection
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import describe_machine
from cluster.identity import TransferId
from cluster.kv_layout import KvLayout
from engine.kv_memory import KvMemory
from kv_transfer.endpoints import ReceivingEnds
from kv_transfer.frame import digest_of
from kv_transfer.transport import FrameHeader
from kv_transfer.transports.connection_gate import NONCE_BYTES
from kv_transfer.transports.registry import SENDERS

POOL_BYTES = 64 * 2**20  # more than a core's share of the last cache
ROUND_BYTES = 128 * 2**20
NUM_ROUNDS = 5
ROUND_TIMEOUT_S = 60.0
GROUP_BYTES = (64 * 1024, 256 * 1024, 1024 * 1024)
BLOCK_TOKENS = (16, 64)
TRANSFER = TransferId(bytes(16))


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table. `group_bytes` is what one frame carries."""

    transport: str
    block_tokens: int
    group_bytes: int

    @property
    def layout(self) -> KvLayout:
        """A model of 8 KV heads of 64 in 16 bits: a cell is 32 KiB with 16 tokens a block."""
        return KvLayout(4, 8, 64, "bfloat16", 2, self.block_tokens)

    @property
    def blocks_per_frame(self) -> int:
        return max(1, self.group_bytes // self.layout.cell_bytes)

    @property
    def frame_bytes(self) -> int:
        return self.blocks_per_frame * self.layout.cell_bytes

    @property
    def frames_per_round(self) -> int:
        return ROUND_BYTES // self.frame_bytes

    @property
    def num_blocks(self) -> int:
        return POOL_BYTES // self.layout.block_bytes

    def blocks_of(self, seq: int) -> list[int]:
        """Blocks of one frame: spread over the pool, none twice. Each round has the same."""
        return _blocks(self, seq % self.frames_per_round)


@functools.cache  # the first round, which does not count, works them out
def _blocks(case: Case, frame: int) -> list[int]:
    first = frame * case.blocks_per_frame
    return [(first + index) * 7919 % case.num_blocks for index in range(case.blocks_per_frame)]


@dataclass(frozen=True, slots=True)
class Result:
    """GB/s: by the wall clock; by the CPU time of the sending and of the receiving thread."""

    case: Case
    gb_per_s: float
    send_gb_per_s: float
    receive_gb_per_s: float
    memcpy_gb_per_s: float
    digest_gb_per_s: float  # one reading of the same runs

    @property
    def share(self) -> float:
        """What the slower side reaches of memcpy, by CPU time."""
        return min(self.send_gb_per_s, self.receive_gb_per_s) / self.memcpy_gb_per_s


class CountingSink:
    """Implements `FrameSink` over a pool: every frame may land, and must be right."""

    def __init__(self, case: Case, memory: KvMemory) -> None:
        self.arrivals: list[float] = []
        self.cpu_s: list[float] = []  # of the receiving thread, at each arrival
        self.is_done = threading.Event()
        self._case, self._memory = case, memory

    def open_frame(self, header: FrameHeader) -> list[memoryview]:
        return self._memory.runs(self._case.blocks_of(header.seq), header.first_layer, 1)

    def close_frame(self, header: FrameHeader, arrived_digest: bytes | None) -> None:
        if arrived_digest != header.digest:
            raise RuntimeError(f"frame {header.seq} arrived wrong")
        self.arrivals.append(time.perf_counter())
        self.cpu_s.append(time.thread_time())
        if len(self.arrivals) == NUM_ROUNDS * self._case.frames_per_round:
            self.is_done.set()

    def peer_gone(self, peer: str, reason: str) -> None:
        """The sender's process ends when it is done."""


def send(case: Case, address: str, nonce: bytes, control: multiprocessing.connection.Connection) -> None:
    """The sending process."""
    memory = filled_pool(case)
    sender = SENDERS[case.transport](address, nonce, 0)
    control.send("ready")
    control.recv()
    cpu_s, ticket = [time.thread_time()], None
    for seq in range(NUM_ROUNDS * case.frames_per_round):
        layer = seq % case.layout.num_layers
        payload = memory.runs(case.blocks_of(seq), layer, 1)
        digest = digest_of(payload)
        header = FrameHeader(TRANSFER, 1, 0, seq, layer, 1, 0, case.blocks_per_frame, case.frame_bytes, digest)
        ticket = sender.push(header, payload)
        if (seq + 1) % case.frames_per_round == 0:
            cpu_s.append(time.thread_time())
    while ticket is not None and not ticket.done:
        sender.poll()
    control.send(cpu_s)
    control.recv()
    sender.close()


def measure(case: Case) -> Result:
    """Raises `TimeoutError` when a round takes longer than any link of one host may."""
    memory = KvMemory(case.layout, case.num_blocks, shareable=True)
    memory.zero()
    sink = CountingSink(case, memory)
    nonce = secrets.token_bytes(NONCE_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        ends = ReceivingEnds([case.transport], Path(folder), "d0", sink, "127.0.0.1", memory)
        ends.gate.admit("p0", nonce)
        here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=send, args=(case, ends.offers()[0].address, nonce, there))
        process.start()
        try:
            here.recv()
            memcpy_gb_per_s, digest_gb_per_s = floor_speeds(case)
            here.send("go")
            if not sink.is_done.wait(ROUND_TIMEOUT_S):
                raise TimeoutError(f"{case} did not finish")
            send_cpu_s = here.recv()
            here.send("end")
        finally:
            process.join(10)
            ends.close()
    memory.close()
    return Result(
        case,
        median_speed(at_round_ends(case, sink.arrivals)),
        median_speed(send_cpu_s[1:]),
        median_speed(at_round_ends(case, sink.cpu_s)),
        memcpy_gb_per_s,
        digest_gb_per_s,
    )


def at_round_ends(case: Case, at_arrivals: Sequence[float]) -> list[float]:
    size = case.frames_per_round
    return [at_arrivals[(number + 1) * size - 1] for number in range(NUM_ROUNDS)]


def median_speed(round_ends_s: Sequence[float]) -> float:
    """GB/s of the rounds but the first, which maps pages and fills queues."""
    return statistics.median(ROUND_BYTES / (end - start) / 1e9 for start, end in itertools.pairwise(round_ends_s))


def filled_pool(case: Case) -> KvMemory:
    memory = KvMemory(case.layout, case.num_blocks)
    memory.tensor.view(-1).fill_(1.5)
    return memory


def floor_speeds(case: Case) -> tuple[float, float]:
    """GB/s by CPU time on one thread: of memcpy of the same runs from pool to pool, and of their digest alone."""
    source, target = filled_pool(case), filled_pool(case)
    frames = [(case.blocks_of(seq), seq % case.layout.num_layers, 1) for seq in range(case.frames_per_round)]
    pairs = [(source.runs(*frame), target.runs(*frame)) for frame in frames]
    copied = [time.thread_time()]
    for _ in range(NUM_ROUNDS):
        for here, there in pairs:
            for from_run, to_run in zip(here, there, strict=True):
                to_run[:] = from_run
        copied.append(time.thread_time())
    digested = [time.thread_time()]
    for _ in range(NUM_ROUNDS):
        for here, _ in pairs:
            digest_of(here)
        digested.append(time.thread_time())
    return median_speed(copied), median_speed(digested)


CSV_COLUMNS = (
    "transport", "block_tokens", "group_bytes", "gb_per_s", "send_cpu_gb_per_s", "receive_cpu_gb_per_s",
    "memcpy_cpu_gb_per_s", "digest_cpu_gb_per_s", "share_of_memcpy",
)  # fmt: skip
HEADINGS = "transport   block  group KiB   GB/s   send  receive  memcpy  digest  share"


def table(results: Sequence[Result]) -> str:
    lines = [HEADINGS]
    lines += [
        f"{one.case.transport:11} {one.case.block_tokens:5} {one.case.frame_bytes // 1024:10} {one.gb_per_s:6.2f} "
        f"{one.send_gb_per_s:6.2f} {one.receive_gb_per_s:8.2f} {one.memcpy_gb_per_s:7.2f} {one.digest_gb_per_s:7.2f} "
        f"{one.share:6.0%}"
        for one in results
    ]
    return "\n".join(lines)


def write_csv(results: Sequence[Result], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        for one in results:
            speeds = (one.gb_per_s, one.send_gb_per_s, one.receive_gb_per_s, one.memcpy_gb_per_s, one.digest_gb_per_s)
            case = one.case
            writer.writerow(
                [case.transport, case.block_tokens, case.frame_bytes, *(f"{x:.3f}" for x in (*speeds, one.share))]
            )


def plot(results: Sequence[Result], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys((one.case.transport, one.case.block_tokens) for one in results):
        line = [one for one in results if (one.case.transport, one.case.block_tokens) == name]
        axes.plot(
            [one.case.frame_bytes / 1024 for one in line],
            [one.gb_per_s for one in line],
            marker="o",
            label=f"{name[0]}, {name[1]} tokens a block",
        )
    axes.axhline(
        statistics.median(one.memcpy_gb_per_s for one in results), linestyle="--", color="grey", label="memcpy"
    )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes of one layer group [KiB]")
    axes.set_ylabel("verified KV [GB/s]")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--transports", default="shm,shm-direct,tcp")
    parser.add_argument("--out", type=Path, help="folder for kv_transfer.csv and kv_transfer.png")
    arguments = parser.parse_args()
    print(describe_machine().one_line)
    results = [
        measure(Case(transport, block_tokens, group_bytes))
        for transport in arguments.transports.split(",")
        for block_tokens in BLOCK_TOKENS
        for group_bytes in GROUP_BYTES
    ]
    print(table(results))
    if arguments.out is not None:
        write_csv(results, arguments.out / "kv_transfer.csv")
        plot(results, arguments.out / "kv_transfer.png")


if __name__ == "__main__":
    main()
