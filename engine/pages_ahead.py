"""Keeps the pages of a KV pool that will be written next resident, so that nobody waits for their first touch.

    pool  |== used once ==|-- NOW_BYTES --|-- LATER_BYTES, touched while no request is under way --|.. not resident ..|

A new page is cleared by the system when it is first written: 4 ms for the KV of a 2,048-token prompt (45 MiB), 130 ms
where a hypervisor has yet to get the memory from its host. That would be the engine's time, or a frame's on arrival;
and done by a thread beside them it takes a processor that they need, however low that thread's priority: Linux weighs
processes before their threads. So most of it is done between requests. The whole pool at the start would cost each
worker seconds, and a gigabyte that it may never need.
"""

from __future__ import annotations

import ctypes

from cluster.errors import StartupError
from cluster.fallbacks import Fallbacks
from engine import native_library
from engine.kv_memory import HUGE_PAGE_BYTES, KvMemory

# While a prompt is computed the thread is faster than whoever fills the pages: it needs no long start.
NOW_BYTES = 32 * 1024 * 1024
# Five long prompts of a small model may follow each other without a pause.
LATER_BYTES = 256 * 1024 * 1024


class PagesAhead:
    """Of one pool. Owned by its worker, which closes it before the pool's memory. Its methods wait for nothing and may
    be called from any thread."""

    def __init__(self, library: ctypes.CDLL, memory: KvMemory) -> None:
        self._library = library
        self._content = memory.content  # mapped for as long as the thread may touch it
        self._block_bytes = memory.layout.block_bytes
        self._told_bytes = -HUGE_PAGE_BYTES
        self._pages = ctypes.c_void_p(library.tandem_pages_create(memory.address, memory.size_bytes))
        self.blocks_used(0)

    def blocks_used(self, num_blocks: int) -> None:
        """So many blocks, the pool's first ones, have been given out so far."""
        used_bytes = num_blocks * self._block_bytes
        if self._pages and used_bytes >= self._told_bytes + HUGE_PAGE_BYTES:
            self._told_bytes = used_bytes
            self._library.tandem_pages_reach(self._pages, used_bytes + NOW_BYTES, used_bytes + LATER_BYTES)

    def requests_under_way(self, are_any: bool) -> None:
        """Whether this worker computes for any, or waits for one's KV."""
        if self._pages:
            self._library.tandem_pages_make_way(self._pages, are_any)

    @property
    def has_thread(self) -> bool:
        return bool(self._pages)

    @property
    def touched_bytes(self) -> int:
        """So far; those that were used without waiting for this are among them."""
        return int(self._library.tandem_pages_touched(self._pages)) if self._pages else 0

    def close(self) -> None:
        """Ends the thread (idempotent). The pool must not give blocks out any more."""
        pages, self._pages = self._pages, ctypes.c_void_p()
        if pages:
            self._library.tandem_pages_destroy(pages)

    def __del__(self) -> None:
        if getattr(self, "_pages", None):
            self.close()


def open_pages_ahead(memory: KvMemory, fallbacks: Fallbacks) -> PagesAhead | None:
    """None for a pool that is not in this process's memory. None, too, without the library or where the system gives no
    thread: first touches are waited for, and `fallbacks` says so."""
    if not memory.is_addressable:
        return None
    try:
        ahead = PagesAhead(native_library.load_library(), memory)
    except StartupError:
        reason = "library_missing"
    else:
        if ahead.has_thread:
            return ahead
        reason = "no_thread"
    fallbacks.took("kv pages", wanted="touched ahead", used="touched on use", reason=reason)
    return None
