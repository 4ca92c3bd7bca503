"""Brings a prompt's prefix back from a lower tier into the pool, block by block, on a thread of its own.

    begin ──> waiting ──> blocks taken ──fetch, verify──> published in the prefix cache ──> done
                 └── cancelled, no room ─────────────────────────────────────────────────> done, with what there is

Whoever asked finds the blocks in the prefix cache, like any other. The thread holds references to the prefix and to the
blocks that it fills, and drops them when it is done, whatever happened.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from cluster.block_hash import CHAIN_START
from cluster.identity import BlockRef
from cluster.kv_layout import KvLayout
from engine.block_pool import BlockPool
from engine.block_store import BlockStore
from engine.prefix_cache import PrefixChain, TokenIds, proof_of
from engine.restore_costs import RestoreCosts

MAX_QUEUED = 64
# Nobody waits longer for a fetch: a prompt is computed then. A disk that hangs is not asked by others meanwhile.
FETCH_TIMEOUT_S = 5.0
# Blocks that running sequences may need while a fetch holds its own: at most, and of a small pool at most a share.
SPARE_BLOCKS, SPARE_SHARE = 64, 1 / 8

logger = logging.getLogger(__name__)


class BlockWrite(Protocol):
    """Memory for what is written; `finish` brings it into the pool."""

    @property
    def runs(self) -> Sequence[memoryview]: ...

    def finish(self) -> None: ...


class WritableBlocks(Protocol):
    """What of a KV pool's memory is written (`engine.kv_memory.KvMemory`)."""

    layout: KvLayout

    def begin_write(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> BlockWrite: ...


@dataclass(eq=False, slots=True)
class Restore:
    """One prefix on its way. `done` holds how many blocks were fetched; who cancels it is not told."""

    chain: PrefixChain
    token_ids: TokenIds  # as far as the last block to fetch, and one more token
    num_blocks: int  # the prefix, with what the pool has already
    deadline_s: float
    done: Future[int] = field(default_factory=Future)


class KvRestorer:
    """Owned by `KvTiering`: `start`, later `stop`."""

    def __init__(
        self,
        pool: BlockPool,
        memory: WritableBlocks,
        store: BlockStore,
        costs: RestoreCosts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._store = store
        self._costs = costs
        self._clock = clock
        self._spare_blocks = min(SPARE_BLOCKS, int(pool.num_blocks * SPARE_SHARE))
        self._queue: queue.Queue[Restore | None] = queue.Queue(MAX_QUEUED)
        self._current: Restore | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-restorer", daemon=True)
        self.num_restores = 0
        self.num_without_room = 0
        self.num_overdue = 0
        self.num_blocks_from: Counter[str] = Counter()  # by tier
        self.busy_s = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread. Whoever still waits is told that nothing came."""
        self._is_stopping = True
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("the thread that restores prefixes did not stop", extra={"timeout_s": timeout_s})
        while True:
            try:
                restore = self._queue.get_nowait()
            except queue.Empty:
                return
            if restore is not None:
                _tell(restore, 0)

    def begin(self, chain: PrefixChain, token_ids: TokenIds, num_blocks: int) -> Restore | None:
        """Asks for the first `num_blocks` blocks of a sequence. None: too much is asked for, or a fetch hangs."""
        current = self._current
        if self._is_stopping or (current is not None and self._clock() > current.deadline_s):
            self.num_overdue += 1
            return None
        end = num_blocks * self._pool.block_tokens + 1
        restore = Restore(chain.fork(), token_ids[:end].copy(), num_blocks, self._clock() + FETCH_TIMEOUT_S)
        try:
            self._queue.put_nowait(restore)
        except queue.Full:
            return None
        return restore

    def _run(self) -> None:
        while not self._is_stopping:
            restore = self._queue.get()
            if restore is None:
                return
            num_fetched = 0
            self._current = restore
            try:
                if not restore.done.cancelled():
                    num_fetched = self._restore(restore)
            except Exception:  # our own bug: who waits must not hang on it
                logger.exception("a prefix could not be restored")
            finally:
                self._current = None
                _tell(restore, num_fetched)

    def _restore(self, restore: Restore) -> int:
        """Gives how many blocks were fetched and published."""
        pool, chain = self._pool, restore.chain
        refs = pool.reserve(chain, restore.token_ids, restore.num_blocks, spare_blocks=self._spare_blocks)
        if refs is None:
            self.num_without_room += 1
            return 0
        try:
            first = chain.num_blocks
            end = first
            while end < restore.num_blocks and not restore.done.cancelled() and self._fetch(restore, refs[end], end):
                end += 1
            pool.publish(chain, restore.token_ids, refs, end * pool.block_tokens)
        finally:
            pool.release(refs)
        self.num_restores += end > first
        return end - first

    def _fetch(self, restore: Restore, ref: BlockRef, index: int) -> bool:
        hashes, block_tokens = restore.chain.hash_chain.hashes, self._pool.block_tokens
        parent = hashes[index - 1] if index else CHAIN_START
        tokens = restore.token_ids[index * block_tokens : (index + 1) * block_tokens].tobytes()
        started_s = self._clock()
        write = self._memory.begin_write([ref.block], 0, self._memory.layout.num_layers)
        tier = self._store.get(hashes[index], proof_of(parent, tokens), write.runs[0])
        if tier is None:
            return False
        write.finish()
        took_s = self._clock() - started_s
        self.busy_s += took_s
        self.num_blocks_from[tier] += 1
        self._costs.saw_fetch(tier, 1, took_s)
        return True


def _tell(restore: Restore, num_fetched: int) -> None:
    with suppress(InvalidStateError):  # cancelled meanwhile
        restore.done.set_result(num_fetched)
