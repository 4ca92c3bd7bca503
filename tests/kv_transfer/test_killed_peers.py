"""Either end of a link dies by SIGKILL in the middle of a frame, or stands still: nothing is left over at the other."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.errors import KvTransferFailed
from engine.kv_memory import KvMemory
from kv_transfer.endpoints import ReceivingEnds
from kv_transfer.landing_table import LandingTable
from kv_transfer.transport import FrameHeader, Sender
from kv_transfer.transports.connection_gate import NONCE_BYTES
from kv_transfer.transports.registry import SENDERS
from tests.kv_transfer.all_transports import TRANSPORTS, needs_library
from tests.kv_transfer.oracle import LAYOUT, refs, wait_until
from tests.kv_transfer.peer_process import NUM_BLOCKS, TRANSFER

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # looked at, nothing is put there
NUM_BYTES = NUM_BLOCKS * LAYOUT.block_bytes


@dataclass(frozen=True)
class LeftOver:
    """Descriptors, threads, our names in shared memory."""

    num_descriptors: int
    num_threads: int
    names: frozenset[str]

    @classmethod
    def now(cls) -> LeftOver:
        names = frozenset(path.name for path in SHARED_MEMORY.iterdir() if "tandem" in path.name)
        return cls(len(os.listdir("/proc/self/fd")), threading.active_count(), names)

    def is_within(self, before: LeftOver) -> bool:
        """No more than before: what an earlier test held may end only now."""
        return (
            self.num_descriptors <= before.num_descriptors
            and self.num_threads <= before.num_threads
            and self.names <= before.names
        )


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kv_transfer.peer_process", *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(60)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    needs_library(request.param)
    before = LeftOver.now()
    yield request.param
    wait_until(lambda: LeftOver.now().is_within(before), f"{LeftOver.now()} is within {before}")


def test_f01_f31_s_b74_a_sender_killed_in_the_middle_of_a_frame_leaves_nothing_and_the_next_one_is_served(
    transport: str, tmp_path: Path
) -> None:
    gone: list[str] = []
    memory = KvMemory(LAYOUT, NUM_BLOCKS, shareable=True)
    table = LandingTable(memory, on_peer_gone=lambda peer, _: gone.append(peer))
    ends = ReceivingEnds([transport], tmp_path, "d0", table, "127.0.0.1", memory)
    for round_number in range(2):
        table.open(TRANSFER, 1, refs(*range(NUM_BLOCKS)), 0, lambda *_: None)
        address = ends.offers()[0].address
        process = start("send", transport, address, ends.new_session("p0").hex())
        try:
            first_line(process)
            wait_until(lambda: table.counts().frames > 3, "frames land")
        finally:
            end(process)
        wait_until(lambda expected=round_number + 1: len(gone) == expected, "the receiver hears of the death")  # type: ignore[misc]
        silent = threading.Event()
        table.fence(TRANSFER, 1, silent.set)
        assert silent.is_set(), "a dead sender's frame still holds the fence open"
    ends.close()
    memory.close()


def push_for_ever(sender: Sender, memory: KvMemory) -> None:
    payload = [memory.run(block, 0, LAYOUT.num_layers) for block in range(NUM_BLOCKS)]
    while True:
        sender.push(FrameHeader(TRANSFER, 1, 0, 0, 0, LAYOUT.num_layers, 0, NUM_BLOCKS, NUM_BYTES, bytes(16)), payload)


def test_f31_a_receiver_killed_in_the_middle_of_a_frame_is_a_typed_failure_at_once(
    transport: str, tmp_path: Path
) -> None:
    nonce = secrets.token_bytes(NONCE_BYTES)
    process = start("receive", transport, str(tmp_path), nonce.hex())
    memory = KvMemory(LAYOUT, NUM_BLOCKS, shareable=True)
    killer = threading.Timer(0.3, process.kill)
    try:
        sender = SENDERS[transport](first_line(process), nonce, 0)
        killer.start()
        with pytest.raises(KvTransferFailed, match=transport):
            push_for_ever(sender, memory)
        sender.close()
    finally:
        killer.join()
        end(process)
    memory.close()


def test_f06_s_b45_late_frames_of_a_sender_that_was_stopped_are_counted_as_stale_and_write_nothing(
    transport: str, tmp_path: Path
) -> None:
    memory = KvMemory(LAYOUT, NUM_BLOCKS, shareable=True)
    table = LandingTable(memory)
    ends = ReceivingEnds([transport], tmp_path, "d0", table, "127.0.0.1", memory)
    table.open(TRANSFER, 1, refs(*range(NUM_BLOCKS)), 0, lambda *_: None)
    process = start("send", transport, ends.offers()[0].address, ends.new_session("p0").hex())
    try:
        first_line(process)
        wait_until(lambda: table.counts().frames > 3, "frames land")
        process.send_signal(signal.SIGSTOP)
        silent = threading.Event()
        table.fence(TRANSFER, 1, silent.set)
        # Stopped in the middle of a frame, it holds the fence open until it goes on or its connection stalls out.
        process.send_signal(signal.SIGCONT)
        assert silent.wait(60)
        for block in range(NUM_BLOCKS):
            memory.poison(block)
        stale = table.counts().stale_frames
        wait_until(lambda: table.counts().stale_frames > stale + 3, "late frames arrive and are dropped")
        assert memory.tensor.isnan().all()
    finally:
        end(process)
        ends.close()
    memory.close()
