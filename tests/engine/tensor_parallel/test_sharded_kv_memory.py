"""A pool over several devices does what one pool in host memory does, byte for byte; torch's CPU stands for devices."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from cluster.errors import EngineFailure
from cluster.kv_layout import KvLayout
from engine.device_kv_memory import DeviceKvMemory
from engine.kv_memory import KvMemory
from engine.tensor_parallel.pool_heads import layout_of_heads
from engine.tensor_parallel.rank_cells import CellServer, RankCells
from engine.tensor_parallel.shard import Shard
from engine.tensor_parallel.sharded_kv_memory import ShardedKvMemory

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16", element_bytes=2, block_tokens=4)
FP8_LAYOUT = replace(LAYOUT, dtype="fp8_e4m3", element_bytes=1)
NUM_BLOCKS = 5
CPU = torch.device("cpu")


@dataclass
class Pools:
    host: KvMemory
    sharded: ShardedKvMemory
    connections: list[socket.socket]  # rank 0's ends

    def assert_same(self) -> None:
        blocks = range(NUM_BLOCKS)
        assert b"".join(self.sharded.runs(blocks, 0, 2)) == b"".join(self.host.runs(blocks, 0, 2))


@pytest.fixture(params=[(LAYOUT, 2), (FP8_LAYOUT, 2), (LAYOUT, 4)], ids=["bf16", "fp8", "more ranks than heads"])
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    """A host pool and one over ranks, behind sockets as in their processes, with the same content."""
    layout, size = request.param
    heads = [Shard(rank, size).kv_heads(layout.num_kv_heads) for rank in range(size)]
    devices = [DeviceKvMemory(layout_of_heads(layout, part), NUM_BLOCKS, CPU) for part in heads]
    sharded = ShardedKvMemory(layout, devices[0], heads[0])
    pairs = [socket.socketpair() for _ in heads[1:]]
    servers: list[CellServer] = []
    failures: list[int] = []
    for (ours, theirs), part, device in zip(pairs, heads[1:], devices[1:], strict=True):
        servers.append(CellServer(theirs, device, lambda: failures.append(1)))
        sharded.attach(part, RankCells(ours, device.layout))
    host = KvMemory(layout, NUM_BLOCKS)
    content = torch.randint(0, 256, (host.size_bytes,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    host.tensor.copy_(content.view(host.tensor.dtype).view(host.tensor.shape))
    for part, device in zip(heads, devices, strict=True):
        device.tensor.copy_(host.tensor[:, :, :, part])
    yield Pools(host, sharded, [ours for ours, _ in pairs])
    for ours, _ in pairs:
        ours.close()
    for server in servers:
        server.close()
    assert failures == []
    sharded.close()
    host.close()


@pytest.mark.parametrize(("blocks", "first_layer", "num_layers"), [([3], 0, 2), ([4, 0, 1], 1, 1), ([2], 1, 0)])
def test_cells_of_all_heads_are_read_as_from_one_pool(
    pools: Pools, blocks: list[int], first_layer: int, num_layers: int
) -> None:
    runs = pools.sharded.runs(blocks, first_layer, num_layers)
    assert b"".join(runs) == b"".join(pools.host.runs(blocks, first_layer, num_layers))
    assert all(run.readonly for run in runs if run.nbytes)


def test_written_cells_are_at_every_rank_once_they_are_finished(pools: Pools) -> None:
    payload = np.random.default_rng(0).bytes(2 * pools.host.layout.cell_bytes)
    before = b"".join(pools.sharded.runs([4, 1], 1, 1))
    for pool in (pools.host, pools.sharded):
        write = pool.begin_write([4, 1], 1, 1)
        position = 0
        for run in write.runs:
            run[:] = payload[position : position + run.nbytes]
            position += run.nbytes
        if pool is pools.sharded:
            assert b"".join(pool.runs([4, 1], 1, 1)) == before
        write.finish()
    pools.assert_same()
    assert b"".join(pools.sharded.runs([4, 1], 1, 1)) == payload


def test_blocks_are_copied_and_tokens_move_as_if_at_once(pools: Pools) -> None:
    for pool in (pools.host, pools.sharded):
        pool.copy_block(0, 3)
        pool.move_tokens([5, 6, 17], [6, 5, 2])  # two change places
    pools.assert_same()


def test_saved_blocks_come_back_and_poison_and_zeros_reach_every_rank(pools: Pools) -> None:
    saved = pools.sharded.save_blocks([1, 4])
    assert np.array_equal(saved, pools.host.save_blocks([1, 4]))
    for pool in (pools.host, pools.sharded):
        pool.restore_blocks([0, 2], saved)
        pool.poison(3)
    pools.assert_same()
    pools.sharded.zero()
    assert not any(b"".join(pools.sharded.runs(range(NUM_BLOCKS), 0, 2)))


def test_cells_outside_the_pool_are_refused_before_any_rank_is_asked(pools: Pools) -> None:
    for blocks, first_layer, num_layers in (([NUM_BLOCKS], 0, 1), ([-1], 0, 1), ([0], 1, 2)):
        with pytest.raises(IndexError):
            pools.sharded.runs(blocks, first_layer, num_layers)
        with pytest.raises(IndexError):
            pools.sharded.begin_write(blocks, first_layer, num_layers)


def test_rank_that_is_gone_fails_the_call(pools: Pools) -> None:
    for connection in pools.connections:
        connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(EngineFailure, match="rank"):
        pools.sharded.copy_block(0, 1)
    with pytest.raises(EngineFailure, match="no address"):
        _ = pools.sharded.address
