"""KV whose every element says where it belongs, so that a misplaced, stale or torn block shows without a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cluster.identity import BlockId, BlockRef, TransferId
from cluster.kv_layout import KvLayout
from engine.kv_memory import KvMemory
from kv_transfer.landing_table import LandingTable
from kv_transfer.layer_groups import LinkCosts
from kv_transfer.layer_pusher import LayerPusher, PushCallbacks, PushRequest, PushSession, PushSummary
from kv_transfer.transport import Sender

LAYOUT = KvLayout(num_layers=6, num_kv_heads=2, head_dim=8, dtype="float32", element_bytes=4, block_tokens=16)
COSTS = LinkCosts(bytes_per_s=1e9, operation_s=1e-5)
WAIT_S = 60.0
POLL_S = 0.0001


def refs(*blocks: int) -> tuple[BlockRef, ...]:
    return tuple(BlockRef(BlockId(block), 1) for block in blocks)


def expected_cell(prompt: int, block_index: int, layer: int, layout: KvLayout = LAYOUT) -> np.ndarray:
    """Each element a function of (prompt, token, layer, key or value, head, position)."""
    shape = (2, layout.num_kv_heads, layout.block_tokens, layout.head_dim)
    index = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return np.asarray(index + 10_000 * layer + 1_000_000 * block_index + 0.25 * prompt, dtype=np.float32)


def write_layer(memory: KvMemory, blocks: tuple[BlockRef, ...], prompt: int, layer: int, first: int, end: int) -> None:
    for index in range(first, end):
        memory.tensor[blocks[index].block, layer].numpy()[:] = expected_cell(prompt, index, layer)


def assert_holds(memory: KvMemory, blocks: tuple[BlockRef, ...], prompt: int, first_block: int = 0) -> None:
    for offset, ref in enumerate(blocks):
        for layer in range(memory.layout.num_layers):
            expected = expected_cell(prompt, first_block + offset, layer)
            np.testing.assert_array_equal(
                memory.tensor[ref.block, layer].numpy(), expected, f"block {offset} layer {layer}"
            )


def wait_until(is_reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_reached():
        if time.monotonic() > deadline:
            raise AssertionError(f"not reached in {WAIT_S} s: {what}")
        time.sleep(POLL_S)


@dataclass
class PushOutcome:
    """What a session's callbacks said."""

    sealed: list[PushSummary] = field(default_factory=list)
    failed: list[Exception] = field(default_factory=list)

    def callbacks(self) -> PushCallbacks:
        return PushCallbacks(self.sealed.append, self.failed.append)


@dataclass
class Link:
    """A sender's pool and a receiver's, poisoned, with a pusher between them."""

    source: KvMemory
    target: KvMemory
    table: LandingTable
    pusher: LayerPusher

    @classmethod
    def over(cls, sender: Sender, source: KvMemory, target: KvMemory, table: LandingTable) -> Link:
        return cls(source, target, table, LayerPusher(sender, source, COSTS))

    def open(
        self, transfer: int, source: tuple[BlockRef, ...], target: tuple[BlockRef, ...], num_tokens: int, have: int = 0
    ) -> tuple[PushSession, PushOutcome]:
        transfer_id = TransferId(transfer.to_bytes(16, "big"))
        self.table.open(transfer_id, 1, target, have // LAYOUT.block_tokens, lambda *_: None)
        outcome = PushOutcome()
        session = self.pusher.open(PushRequest(transfer_id, 1, num_tokens, have, outcome.callbacks()))
        return session, outcome

    def prefill(
        self,
        session: PushSession,
        source: tuple[BlockRef, ...],
        num_tokens: int,
        chunk: int,
        prompt: int,
        cached: int = 0,
    ) -> None:
        """What an engine does: chunk by chunk, layer by layer, oracle KV."""
        for layer in range(LAYOUT.num_layers):
            write_layer(self.source, source, prompt, layer, 0, cached // LAYOUT.block_tokens)
        session.blocks_allocated(source, cached)
        for start in range(cached, num_tokens, chunk):
            end = min(num_tokens, start + chunk)
            session.chunk_started(start, end - start)
            for layer in range(LAYOUT.num_layers):
                first, last = start // LAYOUT.block_tokens, -(-end // LAYOUT.block_tokens)
                write_layer(self.source, source, prompt, layer, first, last)
                session.layer_written(layer)
            session.chunk_finished()


def make_pools(num_blocks: int = 64) -> tuple[KvMemory, KvMemory]:
    pools = KvMemory(LAYOUT, num_blocks), KvMemory(LAYOUT, num_blocks, shareable=True)
    for memory in pools:
        for block in range(num_blocks):
            memory.poison(block)
    return pools
