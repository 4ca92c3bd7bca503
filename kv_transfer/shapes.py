"""Prefill and decode workers of different shapes: which heads go where, and cells as the receiver lays them out.

Head ranges: a rank of `tp_size` holds `num_kv_heads / tp_size` of the model's KV heads, or, where there are more ranks
than heads, a copy of one. Block sizes may differ when one divides the other. The sender gathers: what leaves it is laid
out in the receiver's blocks already, so the receiver only ever writes whole runs of heads.

    source blocks of 16 tokens   [ a | b | c | d ]            [    A    |    B    ]   source blocks of 32
    target blocks of 32 tokens   [    A    |    B    ]        [ a | b | c | d ]       target blocks of 16
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.identity import BlockRef
from cluster.kv_layout import KvLayout
from kv_transfer.coverage import CellRange
from kv_transfer.kv_memory import KvMemory

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class HeadRange:
    """KV heads [first, first + count)."""

    first: int
    count: int

    def intersection(self, other: HeadRange) -> HeadRange:
        first = max(self.first, other.first)
        return HeadRange(first, max(0, min(self.first + self.count, other.first + other.count) - first))


class HeadRoute(NamedTuple):
    """What one source rank sends to one target rank, in the model's numbering."""

    source_rank: int
    target_rank: int
    heads: HeadRange


def heads_of_rank(num_kv_heads: int, tp_size: int, rank: int) -> HeadRange:
    """The model's heads that one rank holds. Raises ValueError where neither count divides the other."""
    if num_kv_heads % tp_size == 0:
        count = num_kv_heads // tp_size
        return HeadRange(rank * count, count)
    if tp_size % num_kv_heads == 0:
        return HeadRange(rank * num_kv_heads // tp_size, 1)
    raise ValueError(f"{num_kv_heads} KV heads cannot be divided over {tp_size} ranks, nor copied evenly")


def head_routes(num_kv_heads: int, source_size: int, target_size: int) -> tuple[HeadRoute, ...]:
    """Every target rank gets each of its heads from exactly one source rank; among copies they are spread evenly.

    Raises ValueError as `heads_of_rank`.
    """
    num_copies = max(1, source_size // num_kv_heads)
    routes = []
    for target in range(target_size):
        wanted = heads_of_rank(num_kv_heads, target_size, target)
        for source in range(source_size):
            shared = heads_of_rank(num_kv_heads, source_size, source).intersection(wanted)
            if shared.count and source % num_copies == target % num_copies:
                routes.append(HeadRoute(source, target, shared))
    return tuple(routes)


def differing_field(source: KvLayout, target: KvLayout) -> str:
    """The first field in which two layouts differ in a way that cannot be planned for; empty: they fit."""
    for name in ("num_layers", "head_dim", "dtype", "order"):
        if getattr(source, name) != getattr(target, name):
            return name
    if source.has_scales:  # they lie behind each block's values: nothing regroups them
        return "" if source.block_tokens == target.block_tokens else "block_tokens"
    larger, smaller = max(source.block_tokens, target.block_tokens), min(source.block_tokens, target.block_tokens)
    return "block_tokens" if larger % smaller else ""


class CellGather:
    """Cells of a target pool, gathered from a source pool of another shape. Used by one thread.

    `source_heads` and `target_heads` name the same heads in the numbering of either pool.
    """

    def __init__(self, memory: KvMemory, target: KvLayout, source_heads: HeadRange, target_heads: HeadRange) -> None:
        """Raises ValueError when the two shapes cannot be planned for."""
        field = differing_field(memory.layout, target)
        if field or source_heads.count != target_heads.count:
            raise ValueError(f"pools differ in {field or 'heads'}: KV cannot be moved between them")
        self.target = target
        self.target_heads = target_heads
        self._memory = memory
        self._source_heads = source_heads

    @property
    def cell_bytes(self) -> int:
        """Bytes that travel for one (target block, layer)."""
        return 2 * self.target_heads.count * self.target.head_bytes

    def gather(self, blocks: Sequence[BlockRef], cells: CellRange) -> memoryview:
        """The cells' bytes in the receiver's order; `cells` counts in target blocks, `blocks` is the source's table.

        What the prompt's last source block does not reach is filled with zeros: no kernel reads it.
        """
        source, target = self._memory.layout, self.target
        first_token = cells.first_block * target.block_tokens
        end_token = (cells.first_block + cells.num_blocks) * target.block_tokens
        first, end = first_token // source.block_tokens, -(-end_token // source.block_tokens)
        part = self._read(blocks[first : min(end, len(blocks))], cells, end - first)
        part = _split(part, target.block_tokens) if source.block_tokens > target.block_tokens else part
        part = _join(part, target.block_tokens) if source.block_tokens < target.block_tokens else part
        skipped = (first_token - first * source.block_tokens) // target.block_tokens
        return np.ascontiguousarray(part[skipped : skipped + cells.num_blocks]).reshape(-1).data

    def _read(self, blocks: Sequence[BlockRef], cells: CellRange, num_blocks: int) -> ByteArray:
        """`[num_blocks, layers, 2, heads, source block_tokens, bytes of one head's token]`"""
        layout, heads = self._memory.layout, self._source_heads
        token_bytes = layout.head_dim * layout.element_bytes
        out = np.zeros((num_blocks, cells.num_layers, 2, heads.count, layout.block_tokens, token_bytes), np.uint8)
        shape = (cells.num_layers, 2, layout.num_kv_heads, layout.block_tokens, token_bytes)
        for index, ref in enumerate(blocks):
            run = np.frombuffer(self._memory.run(ref.block, cells.first_layer, cells.num_layers), np.uint8)
            out[index] = run.reshape(shape)[:, :, heads.first : heads.first + heads.count]
        return out


def _split(part: ByteArray, block_tokens: int) -> ByteArray:
    """Each block becomes several smaller ones."""
    num_blocks, layers, pair, heads, tokens, token_bytes = part.shape
    ratio = tokens // block_tokens
    split = part.reshape(num_blocks, layers, pair, heads, ratio, block_tokens, token_bytes)
    return split.transpose(0, 4, 1, 2, 3, 5, 6).reshape(-1, layers, pair, heads, block_tokens, token_bytes)


def _join(part: ByteArray, block_tokens: int) -> ByteArray:
    """Several blocks become one larger."""
    num_blocks, layers, pair, heads, tokens, token_bytes = part.shape
    ratio = block_tokens // tokens
    joined = part.reshape(num_blocks // ratio, ratio, layers, pair, heads, tokens, token_bytes)
    return joined.transpose(0, 2, 3, 4, 1, 5, 6).reshape(-1, layers, pair, heads, block_tokens, token_bytes)
