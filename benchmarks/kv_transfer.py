"""What moving KV costs on one host: bandwidth by transport, block size and group size, beside memcpy of the same run.

    python -m benchmarks.kv_transfer [--transports shm,shm-direct,tcp,ucx,nixl] [--out bench-out]
    python -m benchmarks.kv_transfer --exposed [--lengths 512,2048] [--runs 5]     see `benchmarks.exposed_transfer`

Sender and receiver are two processes. A round moves `ROUND_BYTES` in frames of one group each: gathered from blocks
that lie scattered in the sender's pool, digested, sent, landed in scattered blocks, digested again and compared. Shown
is the median of the rounds after every page was touched. Before each round the sending thread copies as many runs
between two pools of its own (memcpy: what one copy without any check could reach), and reads as many for a digest.

On a machine that is not one's own the wall clock shows the neighbours. So the CPU time of each side is shown beside it:
both sides work at once, so the slower one bounds what a quiet machine with two free cores moves.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import multiprocessing.connection
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.exposed_transfer import PROMPT_TOKENS, Exposed, exposed_table, measure_exposed, write_exposed
from benchmarks.machine import describe_machine
from cluster.identity import TransferId
from cluster.kv_layout import KvLayout
from engine.kv_memory import KvMemory
from kv_transfer.endpoints import ReceivingEnds
from kv_transfer.frame import digest_of
from kv_transfer.transport import NO_DIGEST, FrameHeader
from kv_transfer.transports.connection_gate import NONCE_BYTES
from kv_transfer.transports.registry import SENDERS

POOL_BYTES = 128 * 2**20  # more than the last cache
# Short rounds and many of them, so that the median is one that no neighbour broke into. Each takes another part of the
# pool, and what goes before it in turn yet another: nothing is read that a cache still has.
ROUND_BYTES = 16 * 2**20
NUM_PARTS = POOL_BYTES // ROUND_BYTES
NUM_ROUNDS = 40
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
    def num_blocks(self) -> int:
        return POOL_BYTES // self.layout.block_bytes

    def parts(self) -> list[list[FramePlace]]:
        """The pool's frames, part by part: spread over the pool, every cell once."""
        size, num_layers = self.blocks_per_frame, self.layout.num_layers
        blocks = [index * 7919 % self.num_blocks for index in range(self.num_blocks)]
        frames = [
            FramePlace(layer, blocks[first : first + size])
            for first in range(0, len(blocks), size)
            for layer in range(num_layers)
        ]
        return [frames[number::NUM_PARTS] for number in range(NUM_PARTS)]


class FramePlace(NamedTuple):
    layer: int
    blocks: list[int]


class Spent(NamedTuple):
    wall_s: float
    cpu_s: float  # of this thread


class Clocks(NamedTuple):
    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Clocks:
        return cls(time.perf_counter(), time.thread_time())

    def spent(self) -> Spent:
        now = Clocks.now()
        return Spent(now.wall_s - self.wall_s, now.cpu_s - self.cpu_s)


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
        self.rounds: list[Spent] = []
        self.is_done = threading.Event()
        self._parts = case.parts()
        self._memory = memory
        self._begun = Clocks.now()
        self._num_arrived = 0

    def open_frame(self, header: FrameHeader) -> Sequence[memoryview]:
        number, index = divmod(header.seq, len(self._parts[0]))
        if index == 0:
            self._begun = Clocks.now()
        place = self._parts[number % NUM_PARTS][index]
        return self._memory.runs(place.blocks, place.layer, 1)

    def close_frame(self, header: FrameHeader, arrived_digest: bytes | None) -> None:
        if arrived_digest != header.digest:
            raise RuntimeError(f"frame {header.seq} arrived wrong")
        self._num_arrived += 1
        if self._num_arrived % len(self._parts[0]) == 0:
            self.rounds.append(self._begun.spent())
            if len(self.rounds) == NUM_ROUNDS:
                self.is_done.set()

    def peer_gone(self, peer: str, reason: str) -> None:
        """The sender's process ends when it is done."""


def send(case: Case, address: str, nonce: bytes, control: multiprocessing.connection.Connection) -> None:
    """The sending process. In turns: a round of memcpy, a round of reading for a digest, a round of frames."""
    memory, target = filled_pool(case), filled_pool(case)
    sender = SENDERS[case.transport](address, nonce, 0)
    parts = case.parts()
    rounds = []
    for number in range(NUM_ROUNDS):
        copied = copy_part(parts[(number + 3) % NUM_PARTS], memory, target)
        digested = digest_part(parts[(number + 6) % NUM_PARTS], memory)
        begun = Clocks.now()
        for index, (layer, blocks) in enumerate(parts[number % NUM_PARTS]):
            payload = memory.runs(blocks, layer, 1)
            seq = number * len(parts[0]) + index
            header = FrameHeader(TRANSFER, 1, 0, seq, layer, 1, 0, len(blocks), case.frame_bytes, NO_DIGEST)
            ticket = sender.push(header, payload)
        while not ticket.done:
            sender.poll()
        rounds.append((copied, digested, begun.spent()))
    control.send(rounds)
    control.recv()
    sender.close()


def copy_part(part: Sequence[FramePlace], source: KvMemory, target: KvMemory) -> Spent:
    pairs = [
        pair
        for layer, blocks in part
        for pair in zip(source.runs(blocks, layer, 1), target.runs(blocks, layer, 1), strict=True)
    ]
    begun = Clocks.now()
    for here, there in pairs:
        there[:] = here
    return begun.spent()


def digest_part(part: Sequence[FramePlace], memory: KvMemory) -> Spent:
    runs = [run for layer, blocks in part for run in memory.runs(blocks, layer, 1)]
    begun = Clocks.now()
    digest_of(runs)
    return begun.spent()


def measure(case: Case) -> Result:
    """Raises `TimeoutError` when a round takes longer than any link of one host may."""
    # Shared only with who maps it, as in a worker: a memfd's pages are small, which costs who writes them 1.7 times.
    memory = KvMemory(case.layout, case.num_blocks, shareable=case.transport == "shm-direct")
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
            if not sink.is_done.wait(ROUND_TIMEOUT_S):
                raise TimeoutError(f"{case} did not finish")
            copied, digested, sent = zip(*here.recv(), strict=True)
            here.send("end")
        finally:
            process.join(10)
            ends.close()
    memory.close()
    return Result(
        case,
        speed_of(spent.wall_s for spent in sink.rounds),
        speed_of(spent.cpu_s for spent in sent),
        speed_of(spent.cpu_s for spent in sink.rounds),
        speed_of(spent.cpu_s for spent in copied),
        speed_of(spent.cpu_s for spent in digested),
    )


def speed_of(rounds_s: Iterable[float]) -> float:
    """GB/s: the median of the rounds but the first ones, which map pages and fill queues."""
    return statistics.median(ROUND_BYTES / seconds / 1e9 for seconds in list(rounds_s)[NUM_PARTS:])


def filled_pool(case: Case) -> KvMemory:
    memory = KvMemory(case.layout, case.num_blocks)
    memory.tensor.view(-1).fill_(1.5)
    return memory


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
    parser.add_argument("--exposed", action="store_true", help="what requests wait for, by prompt length, instead")
    parser.add_argument("--lengths", default=",".join(map(str, PROMPT_TOKENS)), help="prompt lengths for --exposed")
    parser.add_argument("--runs", type=int, default=5, help="requests of each length and way for --exposed")
    arguments = parser.parse_args()
    print(describe_machine().one_line)
    if arguments.exposed:
        lengths = [int(length) for length in arguments.lengths.split(",")]
        out: Path | None = arguments.out

        def report(rows: Sequence[Exposed]) -> None:
            if out is not None:
                write_exposed(rows, out)

        with tempfile.TemporaryDirectory() as folder:
            transport = arguments.transports.split(",")[0]
            print(exposed_table(measure_exposed(lengths, arguments.runs, transport, Path(folder), report)))
        return
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
