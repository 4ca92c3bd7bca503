"""The KV pool's memory: one mapping seen as a tensor, as an address and as runs of bytes.

The order is `[blocks, layers, 2, kv_heads, block_tokens, head_dim]` (`cluster.kv_layout`); of FP8 KV the last
dimension counts the bytes of a token with its scale, and `engine.kernels.fp8_kv` tells them apart. Who owns which block
is the block pool's business: this file does not know.

    mapping (anonymous, or a memfd that a peer on this host may map)
      ├── tensor   [blocks, layers, 2, kv_heads, block_tokens, head_dim]   for torch
      ├── address  first byte                                              for native kernels
      └── run()    bytes of (block, layer range)                           for transports
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from cluster.byte_runs import EqualRuns
from cluster.errors import StartupError
from cluster.kv_layout import ELEMENT_BYTES, FP8_KV, ORDER, ORDER_WITH_SCALES, SCALE_BYTES, KvLayout
from engine.model_config import ModelConfig

if TYPE_CHECKING:  # the mock engine has a pool and no torch
    import torch

# Huge pages on x86-64 and most arm64 kernels: the pool starts at a multiple, so that its first bytes are on one too.
HUGE_PAGE_BYTES = 2 * 1024 * 1024
# In every float format that a pool may have, all bits set is NaN.
POISON_BYTE = 0xFF


def layout_of(config: ModelConfig, dtype: str, block_tokens: int) -> KvLayout:
    """The pool's layout for one model. Raises `StartupError` where FP8's scales would not be aligned."""
    if dtype == FP8_KV and config.head_dim * block_tokens % SCALE_BYTES:
        raise StartupError(
            f"FP8 KV needs block_tokens times the head size ({block_tokens} x {config.head_dim}) to be a multiple of "
            f"{SCALE_BYTES}",
            param="block_tokens",
        )
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        element_bytes=ELEMENT_BYTES[dtype],
        block_tokens=block_tokens,
        order=ORDER_WITH_SCALES if dtype == FP8_KV else ORDER,
    )


@dataclass(frozen=True, slots=True)
class CellWrite:
    """Cells that a transport writes where they belong; implements `kv_transfer.kv_memory.CellWrite`."""

    runs: Sequence[memoryview]

    def finish(self) -> None:
        """They are there already."""


class SizedPool(Protocol):
    layout: KvLayout
    num_blocks: int


def pool_shape(pool: SizedPool) -> tuple[int, int, int, int, int, int]:
    """Of its tensor."""
    layout = pool.layout
    row = layout.token_bytes // layout.element_bytes
    return (pool.num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_tokens, row)


class KvMemory:
    """One worker's pool. Owned by the process that serves; implements `kv_transfer.kv_memory.KvMemory`.

    `tensor` shares the mapping's bytes. `huge_pages` says whether the kernel took the advice to back it by huge pages:
    a refusal costs speed, never correctness. `memfd` is the mapping's file descriptor when `shareable`, else None.
    """

    is_addressable = True  # whether a transport may write into it by itself

    def __init__(self, layout: KvLayout, num_blocks: int, *, shareable: bool = False) -> None:
        """Raises `StartupError` when the machine does not give that much memory."""
        if num_blocks < 1:
            raise StartupError(f"the KV pool needs at least one block, got {num_blocks}", param="num_kv_blocks")
        self.layout = layout
        self._block_bytes, self._cell_bytes = layout.block_bytes, layout.cell_bytes  # asked for with every frame
        self.num_blocks = num_blocks
        self.size_bytes = num_blocks * layout.block_bytes
        self._is_closed = False
        self.memfd: int | None = None
        self.mapping_offset = 0  # of the pool's first byte in the memfd
        mapping_bytes = self.size_bytes + HUGE_PAGE_BYTES
        try:
            if shareable:
                self.memfd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC)
                os.ftruncate(self.memfd, mapping_bytes)
                self._mapping = mmap.mmap(self.memfd, mapping_bytes)
            else:
                self._mapping = mmap.mmap(-1, mapping_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            self._close_memfd()
            raise StartupError(
                f"cannot map {mapping_bytes} bytes for the KV pool ({error.strerror}): set a smaller kv_cache_bytes",
                param="kv_cache_bytes",
            ) from error
        self.huge_pages = _advise_huge_pages(self._mapping)
        everything = np.frombuffer(self._mapping, dtype=np.uint8)
        self.mapping_offset = -everything.ctypes.data % HUGE_PAGE_BYTES
        # Array and tensor hold the mapping's buffer, so it cannot be unmapped under a kernel that still reads them.
        self._array = everything[self.mapping_offset : self.mapping_offset + self.size_bytes]
        self._address = int(self._array.ctypes.data)
        self._bytes = memoryview(self._mapping)[self.mapping_offset : self.mapping_offset + self.size_bytes]

    @cached_property
    def tensor(self) -> torch.Tensor:
        """The pool as a tensor [blocks, layers, 2, kv_heads, block_tokens, head_dim]."""
        import torch

        from engine.dtype import POOL_DTYPES

        return torch.from_numpy(self._array).view(POOL_DTYPES[self.layout.dtype]).view(pool_shape(self))

    @property
    def address(self) -> int:
        """Where the pool's first byte is in this process."""
        return self._address

    @property
    def content(self) -> npt.NDArray[np.uint8]:
        """All bytes: who holds this keeps them mapped, also behind `close`."""
        return self._array

    def run(self, block: int, first_layer: int, num_layers: int) -> memoryview:
        """The contiguous writable bytes of layers [first_layer, first_layer + num_layers) of one block.

        Raises `IndexError` outside the pool: such a range comes from a bug or from a peer that was not checked.
        """
        last_layer = first_layer + num_layers
        if not (0 <= block < self.num_blocks and 0 <= first_layer <= last_layer <= self.layout.num_layers):
            raise IndexError(
                f"block {block}, layers {first_layer} to {last_layer}: the pool has {self.num_blocks} blocks "
                f"of {self.layout.num_layers} layers"
            )
        start = block * self.layout.block_bytes + first_layer * self.layout.cell_bytes
        return self._bytes[start : start + num_layers * self.layout.cell_bytes]

    def runs(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> Sequence[memoryview]:
        """The same of several blocks, one after the other; where they touch each other they are one run.

        Raises `IndexError` as `run`.
        """
        if not 0 <= first_layer <= first_layer + num_layers <= self.layout.num_layers:
            self.run(0, first_layer, num_layers)
        stride, size = self._block_bytes, num_layers * self._cell_bytes
        if size < stride:
            return EqualRuns(self._bytes, self._address, first_layer * self._cell_bytes, blocks, stride, size)
        for block in (min(blocks, default=0), max(blocks, default=0)):
            self.run(block, first_layer, num_layers)
        ends = [index for index in range(1, len(blocks)) if blocks[index] != blocks[index - 1] + 1]
        pieces = zip((0, *ends), (*ends, len(blocks)), strict=True)
        return [self._bytes[blocks[first] * stride : (blocks[end - 1] + 1) * stride] for first, end in pieces if end]

    def begin_write(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> CellWrite:
        """The same runs, for who writes into them. Raises `IndexError` as `run`."""
        return CellWrite(self.runs(blocks, first_layer, num_layers))

    def copy_block(self, source: int, destination: int) -> None:
        """Copies one block, all layers."""
        block_bytes = self.layout.block_bytes
        blocks = self._array.reshape(self.num_blocks, block_bytes)
        blocks[destination] = blocks[source]

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies tokens' KV, all layers, from slot to slot (block * block_tokens + offset), as if at once."""
        layout = self.layout
        from_blocks, from_offsets = np.divmod(np.asarray(sources), layout.block_tokens)
        to_blocks, to_offsets = np.divmod(np.asarray(destinations), layout.block_tokens)
        planes = self._array.reshape(self.num_blocks, -1, layout.head_bytes)
        row_bytes = layout.head_dim * layout.element_bytes
        parts = [(0, row_bytes)]
        if layout.has_scales:
            parts.append((layout.block_tokens * row_bytes, SCALE_BYTES))
        for start, size in parts:
            # A view: splitting the last axis copies nothing.
            slots = planes[:, :, start : start + layout.block_tokens * size].reshape(*planes.shape[:2], -1, size)
            slots[to_blocks, :, to_offsets] = slots[from_blocks, :, from_offsets]

    def save_blocks(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        """A copy of the blocks' bytes, `[blocks, block bytes]`."""
        saved: npt.NDArray[np.uint8] = self._array.reshape(self.num_blocks, self.layout.block_bytes)[list(blocks)]
        return saved

    def restore_blocks(self, blocks: Sequence[int], saved: npt.NDArray[np.uint8]) -> None:
        """Writes what `save_blocks` gave into other blocks."""
        self._array.reshape(self.num_blocks, self.layout.block_bytes)[list(blocks)] = saved

    def zero(self) -> None:
        """Fills the pool with zeros; also makes every page resident."""
        self._array.fill(0)

    def poison(self, block: int) -> None:
        """Fills one block with NaN, so that whoever reads it after it was freed shows it."""
        start = block * self.layout.block_bytes
        self._array[start : start + self.layout.block_bytes].fill(POISON_BYTE)

    def close(self) -> None:
        """Gives the memory back (idempotent): at once, or when the last view that somebody still holds is gone."""
        if self._is_closed:
            return
        self._is_closed = True
        self._close_memfd()
        self._bytes.release()
        self.__dict__.pop("tensor", None)
        del self._array
        try:
            self._mapping.close()
        except BufferError:
            return  # a view lives: its owner's reference unmaps

    def _close_memfd(self) -> None:
        if self.memfd is not None:
            os.close(self.memfd)
            self.memfd = None


def _advise_huge_pages(mapping: mmap.mmap) -> bool:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without transparent huge pages
        return False
    return True
