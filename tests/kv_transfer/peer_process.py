"""The other end of a link as its own process, to be killed: `python -m tests.kv_transfer.peer_process receive|send`.

`receive transport folder nonce` lands frames for ever and prints its address; `send transport address nonce` pushes for
ever. Both print a line when they have begun.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from cluster.identity import TransferId
from engine.kv_memory import KvMemory
from kv_transfer.endpoints import ReceivingEnds
from kv_transfer.landing_table import LandingTable
from kv_transfer.transport import FrameHeader
from kv_transfer.transports.registry import SENDERS
from tests.kv_transfer.oracle import LAYOUT, refs

TRANSFER = TransferId(b"k" * 16)
NUM_BLOCKS = 64


def receive(transport: str, folder: str, nonce: str) -> None:
    memory = KvMemory(LAYOUT, NUM_BLOCKS, shareable=True)
    table = LandingTable(memory)
    table.open(TRANSFER, 1, refs(*range(NUM_BLOCKS)), 0, lambda *_: None)
    ends = ReceivingEnds([transport], Path(folder), "d0", table, "127.0.0.1", memory)
    ends.gate.admit("p0", bytes.fromhex(nonce))
    say(ends.offers()[0].address)
    sys.stdin.read()


def send(transport: str, address: str, nonce: str) -> None:
    memory = KvMemory(LAYOUT, NUM_BLOCKS)
    sender = SENDERS[transport](address, bytes.fromhex(nonce), 0)
    payload = [memory.run(block, 0, LAYOUT.num_layers) for block in range(NUM_BLOCKS)]
    num_bytes = NUM_BLOCKS * LAYOUT.block_bytes
    for seq in itertools.count():
        # Wrong on purpose: nothing ever verifies, so every frame is written again.
        header = FrameHeader(TRANSFER, 1, 0, seq, 0, LAYOUT.num_layers, 0, NUM_BLOCKS, num_bytes, bytes(16))
        sender.push(header, payload)
        sender.poll()
        if seq == 0:
            say("begun")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"receive": receive, "send": send}[sys.argv[1]](*sys.argv[2:])
