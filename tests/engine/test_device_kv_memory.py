"""A pool in a device's memory does what the host's does, byte for byte; torch's CPU stands for the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from cluster.errors import EngineFailure, StartupError
from cluster.kv_layout import KvLayout
from engine.device_kv_memory import DeviceKvMemory
from engine.kv_memory import POISON_BYTE, KvMemory

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16", element_bytes=2, block_tokens=4)


FP8_LAYOUT = replace(LAYOUT, dtype="fp8_e4m3", element_bytes=1)


@pytest.fixture(params=[LAYOUT, FP8_LAYOUT], ids=["bf16", "fp8"])
def pools(request: pytest.FixtureRequest) -> tuple[KvMemory, DeviceKvMemory]:
    """A host pool and a device pool with the same content."""
    layout: KvLayout = request.param
    host, device = KvMemory(layout, 5), DeviceKvMemory(layout, 5, torch.device("cpu"))
    content = torch.randint(0, 256, (host.size_bytes,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    host.tensor.copy_(content.view(host.tensor.dtype).view(host.tensor.shape))
    device.tensor.copy_(host.tensor)
    assert device.tensor.shape == host.tensor.shape
    return host, device


def assert_same(host: KvMemory, device: DeviceKvMemory) -> None:
    assert torch.equal(host.tensor.view(torch.uint8), device.tensor.view(torch.uint8))


def test_blocks_are_copied_and_tokens_move_as_if_at_once(pools: tuple[KvMemory, DeviceKvMemory]) -> None:
    for pool in pools:
        pool.copy_block(0, 3)
        pool.move_tokens([5, 6, 17], [6, 5, 2])  # two change places
    assert_same(*pools)


def test_saved_blocks_come_back_into_others_and_between_both_kinds(pools: tuple[KvMemory, DeviceKvMemory]) -> None:
    host, device = pools
    saved = device.save_blocks([1, 4])
    assert np.array_equal(saved, host.save_blocks([1, 4]))
    for pool in pools:
        pool.restore_blocks([0, 2], saved)
    assert_same(host, device)


def test_zero_and_poison(pools: tuple[KvMemory, DeviceKvMemory]) -> None:
    _, device = pools
    before = device.tensor[1].view(torch.uint8).clone()
    device.poison(2)
    assert (device.tensor[2].view(torch.uint8) == POISON_BYTE).all()
    assert torch.equal(device.tensor[1].view(torch.uint8), before)
    device.zero()
    assert not device.tensor.any()


@pytest.mark.parametrize(("blocks", "first_layer", "num_layers"), [([3], 0, 2), ([4, 0, 1], 1, 1), ([2], 1, 0)])
def test_cells_are_read_as_the_hosts_and_are_no_place_to_write(
    pools: tuple[KvMemory, DeviceKvMemory], blocks: list[int], first_layer: int, num_layers: int
) -> None:
    host, device = pools
    runs = device.runs(blocks, first_layer, num_layers)
    assert b"".join(runs) == b"".join(host.runs(blocks, first_layer, num_layers))
    assert device.run(blocks[0], first_layer, num_layers) == host.run(blocks[0], first_layer, num_layers)
    assert all(run.readonly for run in runs)


def test_written_cells_are_in_the_pool_once_they_are_finished(pools: tuple[KvMemory, DeviceKvMemory]) -> None:
    before = pools[1].tensor.clone()
    payload = bytes(range(32)) * (2 * pools[0].layout.cell_bytes // 32)
    writes = [pool.begin_write([4, 1], 1, 1) for pool in pools]
    for write in writes:
        place = 0
        for run in write.runs:
            run[:] = payload[place : place + run.nbytes]
            place += run.nbytes
        assert place == len(payload)
    assert torch.equal(before.view(torch.uint8), pools[1].tensor.view(torch.uint8))
    for write in writes:
        write.finish()
    assert_same(*pools)


def test_what_is_outside_the_pool_is_refused(pools: tuple[KvMemory, DeviceKvMemory]) -> None:
    for pool in pools:
        for blocks, first_layer, num_layers in (([5], 0, 1), ([0, -1], 0, 1), ([0], 1, 2), ([0], -1, 1)):
            with pytest.raises(IndexError, match=r"the pool has|outside of a buffer"):
                pool.begin_write(blocks, first_layer, num_layers)
            with pytest.raises(IndexError, match=r"the pool has|outside of a buffer"):
                pool.runs(blocks, first_layer, num_layers)


def test_it_has_no_address(pools: tuple[KvMemory, DeviceKvMemory]) -> None:
    host, device = pools
    assert host.is_addressable
    assert not device.is_addressable
    with pytest.raises(EngineFailure, match="GPU memory"):
        _ = device.address
    assert device.memfd is None


def test_an_empty_pool_is_refused_and_closing_twice_is_fine() -> None:
    with pytest.raises(StartupError, match="at least one block"):
        DeviceKvMemory(LAYOUT, 0, torch.device("cpu"))
    device = DeviceKvMemory(LAYOUT, 1, torch.device("cpu"))
    device.close()
    device.close()
