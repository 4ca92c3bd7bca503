"""KV of a pool in a device's memory travels like any other; Triton's interpreter on the CPU stands for the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from cluster.errors import StartupError
from cluster.identity import TransferId
from engine.device_kv_memory import DeviceKvMemory
from engine.kv_memory import KvMemory
from kv_transfer.endpoints import ReceivingEnds
from kv_transfer.frame import digest_of
from kv_transfer.landing_table import LandingTable
from kv_transfer.transport import FrameHeader
from kv_transfer.transports.registry import SENDERS, resolve
from tests.kv_transfer.oracle import LAYOUT, Link, assert_holds, refs, wait_until

NUM_BLOCKS = 6
NUM_TOKENS = 2 * LAYOUT.block_tokens + 5
FIRST = TransferId((1).to_bytes(16, "big"))


def make_pool(*, on_device: bool) -> KvMemory:
    pool = DeviceKvMemory(LAYOUT, NUM_BLOCKS, torch.device("cpu")) if on_device else KvMemory(LAYOUT, NUM_BLOCKS)
    for block in range(NUM_BLOCKS):
        pool.poison(block)
    return pool


@pytest.fixture
def target() -> Iterator[KvMemory]:
    pool = make_pool(on_device=True)
    yield pool
    pool.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("places", ["device to device", "device to host", "host to device"])
def test_oracle_kv_arrives_in_its_place(transport: str, places: str, tmp_path: Path) -> None:
    source, target = (make_pool(on_device=place == "device") for place in places.split(" to "))
    table = LandingTable(target)
    ends = ReceivingEnds([transport], tmp_path, "d0", table, "127.0.0.1", None)
    (offer,) = ends.offers()
    link = Link.over(SENDERS[transport](offer.address, ends.new_session("p0"), 0), source, target, table)
    try:
        from_blocks, to_blocks = refs(0, 1, 2), refs(5, 3, 4)
        session, outcome = link.open(1, from_blocks, to_blocks, NUM_TOKENS)
        link.prefill(session, from_blocks, NUM_TOKENS, chunk=20, prompt=7)
        wait_until(lambda: bool(outcome.sealed), "sealed")
        wait_until(lambda: is_complete(table), "all cells arrived")
        assert_holds(target, to_blocks, 7)
        assert all(target.tensor[block].isnan().all() for block in (0, 1, 2))
    finally:
        link.pusher.close()
        ends.close()
        target.close()
        source.close()


def is_complete(table: LandingTable) -> bool:
    arrived = table.arrived(FIRST, 1)
    return arrived is not None and arrived.is_complete


def frame(payload: bytes, seq: int = 0) -> FrameHeader:
    """The first layer of the first block."""
    return FrameHeader(FIRST, 1, 0, seq, 0, 1, 0, 1, len(payload), digest_of([memoryview(payload)]))


def test_bytes_that_did_not_verify_or_came_after_the_fence_never_reach_the_pool(target: KvMemory) -> None:
    table, payload, silent = LandingTable(target), bytes(LAYOUT.cell_bytes), []
    table.open(FIRST, 1, refs(2), 0, lambda *_: None)
    for arrived in (None, b"x" * 16):  # a broken connection; another digest
        runs = table.open_frame(frame(payload))
        assert runs is not None
        runs[0][:] = payload
        table.close_frame(frame(payload), arrived)
    assert table.open_frame(frame(payload)) is not None
    table.fence(FIRST, 1, lambda: silent.append(True))
    assert not silent
    table.close_frame(frame(payload), frame(payload).digest)
    assert silent
    assert target.tensor[2].isnan().all()


def test_a_frame_is_not_received_twice_at_once(target: KvMemory) -> None:
    """Each copy would have room of its own, and the torn one could be the one that is kept."""
    table, payload = LandingTable(target), bytes(LAYOUT.cell_bytes)
    table.open(FIRST, 1, refs(2), 0, lambda *_: None)
    runs = table.open_frame(frame(payload))
    assert runs is not None
    assert table.open_frame(frame(payload)) is None
    runs[0][:] = payload
    table.close_frame(frame(payload), frame(payload).digest)
    assert not target.tensor[2, 0].any()
    assert table.counts().refused_frames == 1


def test_transports_that_write_into_a_pool_are_not_offered_for_one_without_an_address(
    target: KvMemory, tmp_path: Path
) -> None:
    assert "nixl" not in resolve(["auto"], can_write_into_pool=False)
    with pytest.raises(StartupError, match="needs the KV pool that it writes into"):
        ReceivingEnds(["shm-direct"], tmp_path, "d0", LandingTable(target), "127.0.0.1", None)
