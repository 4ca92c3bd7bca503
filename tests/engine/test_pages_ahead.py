"""`engine.pages_ahead`: pages that will be written next are there before."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from cluster.errors import StartupError
from cluster.fallbacks import Fallbacks
from cluster.kv_layout import KvLayout
from engine import native_library, pages_ahead
from engine.kv_memory import HUGE_PAGE_BYTES, KvMemory
from engine.pages_ahead import PagesAhead, open_pages_ahead

DEADLINE_S = 60.0
# A block is as large as a huge page.
LAYOUT = KvLayout(num_layers=4, num_kv_heads=8, head_dim=64, dtype="bfloat16", element_bytes=2, block_tokens=256)
NUM_BLOCKS, NUM_NOW, NUM_LATER = 8, 1, 2

pytestmark = pytest.mark.skipif(not native_library.is_available(), reason="the native library is not built")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[KvMemory]:
    assert LAYOUT.block_bytes == HUGE_PAGE_BYTES
    monkeypatch.setattr(pages_ahead, "NOW_BYTES", NUM_NOW * LAYOUT.block_bytes)
    monkeypatch.setattr(pages_ahead, "LATER_BYTES", NUM_LATER * LAYOUT.block_bytes)
    pool = KvMemory(LAYOUT, NUM_BLOCKS)
    yield pool
    pool.close()


def opened(memory: KvMemory) -> PagesAhead:
    ahead = open_pages_ahead(memory, Fallbacks())
    assert ahead is not None
    return ahead


def wait_until_touched(ahead: PagesAhead, num_blocks: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while ahead.touched_bytes < num_blocks * LAYOUT.block_bytes:
        assert time.monotonic() < deadline, f"{ahead.touched_bytes} bytes were touched"
        threading.Event().wait(0.001)


def resident_blocks(memory: KvMemory) -> list[int]:
    """Blocks of which every page is in memory, as the system says it."""
    pages = (ctypes.c_ubyte * (memory.size_bytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(memory.address), ctypes.c_size_t(memory.size_bytes), pages) == 0
    by_block = np.frombuffer(bytes(pages), np.uint8).reshape(NUM_BLOCKS, -1)
    return [block for block in range(NUM_BLOCKS) if by_block[block].all()]


def test_an_unused_pool_has_its_first_pages_and_no_more(memory: KvMemory) -> None:
    assert resident_blocks(memory) == []
    ahead = opened(memory)
    wait_until_touched(ahead, NUM_LATER)
    ahead.close()
    assert resident_blocks(memory) == [0, 1]


def test_pages_keep_their_distance_from_the_blocks_in_use_and_end_with_the_pool(memory: KvMemory) -> None:
    ahead = opened(memory)
    ahead.blocks_used(3)
    wait_until_touched(ahead, 3 + NUM_LATER)
    assert resident_blocks(memory) == [0, 1, 2, 3, 4]
    ahead.blocks_used(1)  # of an allocation that told later
    ahead.blocks_used(NUM_BLOCKS)
    wait_until_touched(ahead, NUM_BLOCKS)
    ahead.close()
    assert ahead.touched_bytes == 0
    assert resident_blocks(memory) == list(range(NUM_BLOCKS))


def test_under_a_prompt_no_more_is_touched_than_it_soon_needs(memory: KvMemory) -> None:
    ahead = opened(memory)
    wait_until_touched(ahead, NUM_LATER)
    ahead.requests_under_way(True)
    ahead.blocks_used(4)
    wait_until_touched(ahead, 4 + NUM_NOW)
    ahead.close()
    assert resident_blocks(memory) == [0, 1, 2, 3, 4]


def test_what_a_prompt_held_back_is_touched_behind_it(memory: KvMemory) -> None:
    ahead = opened(memory)
    ahead.requests_under_way(True)
    ahead.blocks_used(4)
    ahead.requests_under_way(False)
    wait_until_touched(ahead, 4 + NUM_LATER)
    ahead.close()
    assert resident_blocks(memory) == [0, 1, 2, 3, 4, 5]


def test_what_was_written_before_its_page_is_touched_stays(memory: KvMemory) -> None:
    written = np.random.default_rng(0).integers(0, 256, memory.size_bytes, dtype=np.uint8)
    memory.content[:] = written
    ahead = opened(memory)
    ahead.blocks_used(NUM_BLOCKS)
    wait_until_touched(ahead, NUM_BLOCKS)
    ahead.close()
    assert np.array_equal(memory.content, written)


def test_a_pool_that_is_closed_first_stays_mapped_under_the_thread(memory: KvMemory) -> None:
    ahead = opened(memory)
    ahead.blocks_used(NUM_BLOCKS)
    memory.close()
    wait_until_touched(ahead, NUM_BLOCKS)
    ahead.close()


def test_a_closed_one_touches_nothing_and_closes_again(memory: KvMemory) -> None:
    ahead = opened(memory)
    wait_until_touched(ahead, NUM_LATER)
    ahead.close()
    ahead.requests_under_way(False)
    ahead.blocks_used(NUM_BLOCKS)
    ahead.close()
    assert resident_blocks(memory) == [0, 1]


def test_a_pool_elsewhere_has_none(memory: KvMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "is_addressable", False)
    fallbacks = Fallbacks()
    assert open_pages_ahead(memory, fallbacks) is None
    assert fallbacks.to_messages() == []


class NoThreads:
    """What of the library opens pages, in a process that may have no thread more."""

    def tandem_pages_create(self, address: int, num_bytes: int) -> None:
        return None


@pytest.mark.parametrize("reason", ["library_missing", "no_thread"])
def test_a_worker_without_one_says_why(memory: KvMemory, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    def load_library() -> NoThreads:
        if reason == "library_missing":
            raise StartupError("it is not built")
        return NoThreads()

    monkeypatch.setattr(native_library, "load_library", load_library)
    fallbacks = Fallbacks()
    assert open_pages_ahead(memory, fallbacks) is None
    (told,) = fallbacks.to_messages()
    assert (told.component, told.wanted, told.used, told.reason) == (
        "kv pages", "touched ahead", "touched on use", reason,
    )  # fmt: skip
