"""Copies blocks below before the pool evicts them: a thread that takes each one up when its last user has left.

Sooner or later all of them would have to be copied, but whoever needs their room next may need it at once. No block is
pinned for it, so nobody ever waits for a copy. A published block does not change while its entry lives, and an entry
that left the cache never comes back: a copy whose entry is live afterwards is whole, any other is thrown away. What is
in the cache was written and verified before it got there (`BlockPool.publish`), so nothing else is ever stored.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from cluster.kv_layout import KvLayout
from engine.block_pool import BlockPool
from engine.block_store import BlockStore
from engine.prefix_cache import CacheEntry

BATCH_BLOCKS = 16

logger = logging.getLogger(__name__)


class ReadableBlocks(Protocol):
    """What of a KV pool's memory is read (`engine.kv_memory.KvMemory`)."""

    layout: KvLayout

    def run(self, block: int, first_layer: int, num_layers: int) -> memoryview: ...


class KvSaver:
    """Owned by `KvTiering`: `start`, later `stop`."""

    def __init__(self, pool: BlockPool, memory: ReadableBlocks, store: BlockStore) -> None:
        self._pool = pool
        self._memory = memory
        self._store = store
        self._wanted = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-saver", daemon=True)
        self.num_saved = 0
        self.num_spoilt = 0  # copies whose block was evicted meanwhile

    def start(self) -> None:
        self._pool.save_below(self._wanted.set)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._is_stopping = True
        self._wanted.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("the thread that saves KV blocks did not stop", extra={"timeout_s": timeout_s})

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            while not self._is_stopping and (entries := self._pool.oldest_unsaved(BATCH_BLOCKS)):
                self._save(entries)
            if self._is_stopping:
                return

    def _save(self, entries: Sequence[CacheEntry]) -> None:
        for entry in entries:
            if self._is_stopping:
                return
            try:
                is_kept = self._store.keeps(entry.block_hash) or self._copy(entry)
            except Exception:  # our own bug: the pool must not ask for this block again and again
                logger.exception("a KV block could not be saved")
                is_kept = False
            self._pool.was_saved(entry, is_kept=is_kept)

    def _copy(self, entry: CacheEntry) -> bool:
        is_kept = self._store.put(
            entry.block_hash,
            entry.proof,
            self._memory.run(entry.block, 0, self._memory.layout.num_layers),
            lambda: entry.is_live,
        )
        self.num_saved += is_kept
        self.num_spoilt += not entry.is_live
        return is_kept
