"""`engine.kv_memory`: one mapping, three views of it."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest
import torch

from cluster.errors import StartupError
from cluster.kv_layout import KvLayout
from engine.kv_memory import HUGE_PAGE_BYTES, KvMemory, layout_of
from engine.model_config import ModelConfig
from kv_transfer.kv_memory import KvMemory as KvMemoryProtocol

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16", element_bytes=2, block_tokens=4)


def test_run_is_the_bytes_of_the_tensors_layers() -> None:
    memory = KvMemory(LAYOUT, num_blocks=5)
    memory.tensor.copy_(torch.arange(memory.tensor.numel()).remainder(251).view(memory.tensor.shape))
    for block, first_layer, num_layers in [(0, 0, 3), (4, 1, 2), (2, 2, 1), (3, 0, 0)]:
        expected = memory.tensor[block, first_layer : first_layer + num_layers].contiguous().view(torch.uint8)
        assert bytes(memory.run(block, first_layer, num_layers)) == bytes(expected.numpy().tobytes())
    memory.close()


def test_bytes_written_through_run_and_address_show_in_the_tensor() -> None:
    memory = KvMemory(LAYOUT, num_blocks=2)
    one = torch.ones(1, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    memory.run(1, 2, 1)[:2] = one
    ctypes.memmove(memory.address, one, 2)
    assert memory.tensor[1, 2, 0, 0, 0, 0].item() == 1.0
    assert memory.tensor[0, 0, 0, 0, 0, 0].item() == 1.0
    assert memory.tensor.sum().item() == 2.0
    memory.close()


def test_pool_starts_zeroed_on_a_huge_page_and_says_whether_the_advice_was_taken() -> None:
    memory = KvMemory(LAYOUT, num_blocks=2)
    assert memory.address % HUGE_PAGE_BYTES == 0
    assert memory.address == memory.tensor.data_ptr()
    assert isinstance(memory.huge_pages, bool)
    assert not memory.tensor.any()
    memory.close()


@pytest.mark.parametrize(
    ("block", "first_layer", "num_layers"), [(-1, 0, 1), (2, 0, 1), (0, -1, 1), (0, 2, 2), (0, 1, -1)]
)
def test_kv1_run_outside_the_pool_is_refused(block: int, first_layer: int, num_layers: int) -> None:
    memory = KvMemory(LAYOUT, num_blocks=2)
    with pytest.raises(IndexError, match="the pool has 2 blocks of 3 layers"):
        memory.run(block, first_layer, num_layers)
    memory.close()


@pytest.mark.parametrize(
    ("blocks", "num_layers", "expected_runs"),
    [
        ([2, 3, 1], 2, 3),
        ([2, 3, 1], LAYOUT.num_layers, 2),
        ([0, 1, 2, 3], LAYOUT.num_layers, 1),
        ([], 1, 0),
        ([3], 1, 1),
    ],
)
def test_runs_are_the_blocks_bytes_in_order_and_neighbours_are_one(
    blocks: list[int], num_layers: int, expected_runs: int
) -> None:
    memory = KvMemory(LAYOUT, 4)
    memory.tensor.copy_(torch.arange(memory.tensor.numel()).view(memory.tensor.shape))
    runs = memory.runs(blocks, 0, num_layers)
    assert len(runs) == expected_runs
    assert b"".join(runs) == b"".join(memory.run(block, 0, num_layers) for block in blocks)


@pytest.mark.parametrize("blocks", [[0, 4], [-1, 0]])
def test_kv1_runs_outside_the_pool_are_refused(blocks: list[int]) -> None:
    with pytest.raises(IndexError):
        KvMemory(LAYOUT, 4).runs(blocks, 0, 1)


def test_poison_turns_one_block_to_nan_and_no_other() -> None:
    for dtype, element_bytes in [("bfloat16", 2), ("float32", 4)]:
        memory = KvMemory(KvLayout(3, 2, 8, dtype, element_bytes, 4), num_blocks=3)
        memory.poison(1)
        assert memory.tensor[1].isnan().all()
        assert not memory.tensor[0].isnan().any()
        assert not memory.tensor[2].isnan().any()
        memory.zero()
        assert not memory.tensor.any()
        memory.close()


def test_a_copied_block_has_every_layer_and_leaves_the_others() -> None:
    memory = KvMemory(LAYOUT, num_blocks=3)
    memory.tensor[0] = torch.arange(memory.tensor[0].numel()).remainder(100).view(memory.tensor[0].shape)
    memory.copy_block(0, 2)
    assert torch.equal(memory.tensor[2], memory.tensor[0])
    assert not memory.tensor[1].any()
    memory.close()


def test_shareable_pool_is_seen_by_another_mapping_of_its_memfd() -> None:
    memory = KvMemory(LAYOUT, num_blocks=2, shareable=True)
    assert memory.memfd is not None
    peer = mmap.mmap(memory.memfd, 0)
    memory.run(1, 0, 1)[0] = 77
    assert peer[memory.mapping_offset + LAYOUT.block_bytes] == 77
    peer.close()
    memory.close()
    assert memory.memfd is None


def test_close_is_idempotent_and_keeps_bytes_that_are_still_viewed() -> None:
    memory = KvMemory(LAYOUT, num_blocks=2)
    view, tensor = memory.run(0, 0, 1), memory.tensor
    memory.close()
    memory.close()
    view[0] = 5
    assert tensor.view(torch.uint8).flatten()[0].item() == 5


def test_close_leaves_no_file_descriptor_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        KvMemory(LAYOUT, num_blocks=2, shareable=True).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_pool_that_does_not_fit_says_what_to_set() -> None:
    for num_blocks, shareable in [(2**50, False), (2**50, True), (0, False)]:
        with pytest.raises(StartupError) as caught:
            KvMemory(LAYOUT, num_blocks, shareable=shareable)
        assert caught.value.param in ("kv_cache_bytes", "num_kv_blocks")
        assert "\n" not in caught.value.message


def test_layout_follows_the_model_config() -> None:
    config = ModelConfig("llama", "m", 100, 576, 1536, 30, 9, 3, 64, 1e5, 1e-5, 8192, True)
    layout = layout_of(config, "bfloat16", 16)
    assert layout.block_bytes == 16 * config.kv_bytes_per_token(2) == 16 * 23040


def test_kv_memory_keeps_the_transports_protocol() -> None:
    memory: KvMemoryProtocol = KvMemory(LAYOUT, num_blocks=1)
    assert len(memory.run(0, 0, 3)) == memory.layout.block_bytes
