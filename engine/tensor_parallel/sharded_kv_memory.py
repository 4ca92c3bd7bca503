"""The pool of a sharded model on GPUs: each rank's device has its own heads, rank 0 gives and takes cells of all heads.

    read    own cells ─┐                               write   host memory ──> own heads of each rank
            rank 1  ───┼──> host memory, all heads
            rank 2  ───┘

So a transport sees one pool of the whole model in host memory's reach, as with one GPU (`engine.device_kv_memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.errors import EngineFailure
from cluster.kv_layout import KvLayout
from engine.device_kv_memory import DeviceKvMemory, check_cells
from engine.kv_memory import POISON_BYTE, CellWrite, KvMemory
from engine.tensor_parallel.rank_cells import Cells, CellStore, PoolCells


@dataclass(frozen=True, slots=True)
class ShardedWrite(CellWrite):
    """Cells of all heads that a transport writes into host memory first."""

    _memory: ShardedKvMemory
    _blocks: Sequence[int]
    _first_layer: int
    _cells: Cells

    def finish(self) -> None:
        """Brings each rank its heads; they are in its pool before any step that is sent afterwards."""
        self._memory.write(self._blocks, self._first_layer, self._cells)


class ShardedKvMemory(KvMemory):
    """Implements `kv_transfer.kv_memory.KvMemory` over all ranks. Owned by rank 0's worker."""

    is_addressable = False

    def __init__(self, layout: KvLayout, own: DeviceKvMemory, own_heads: slice) -> None:
        """`layout` has all heads; `own` is this rank's pool."""
        self.layout = layout
        self.own = own
        self.num_blocks = own.num_blocks
        self.size_bytes = own.num_blocks * layout.block_bytes
        self.memfd = None
        self.mapping_offset = 0
        self.huge_pages = False
        self._parts: list[tuple[slice, CellStore]] = [(own_heads, PoolCells(own))]

    def attach(self, heads: slice, cells: CellStore) -> None:
        """Another rank's heads; all of them are attached, in order of rank, before the first cell is asked for."""
        self._parts.append((heads, cells))

    @property
    def address(self) -> int:
        raise EngineFailure("a KV pool in several GPUs' memories has no address in this process")

    def run(self, block: int, first_layer: int, num_layers: int) -> memoryview:
        """A copy, to read. Raises `IndexError` outside the pool."""
        return self.runs([block], first_layer, num_layers)[0]

    def runs(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> list[memoryview]:
        """A copy of the cells as one run, to read. Raises `IndexError` outside the pool.

        This rank's own come first: their copy waits for its device, which has passed the sums behind their layers then,
        and a rank gives its part of such a sum after it has written its KV.
        """
        check_cells(self, blocks, first_layer, num_layers)
        cells = self._host_cells(len(blocks), num_layers)
        num_read = 0
        for heads, store in self._parts:
            if heads.stop > num_read:  # else another rank has the same heads
                cells[:, :, :, heads] = store.read(blocks, first_layer, num_layers)
                num_read = heads.stop
        return [cells.data.cast("B").toreadonly()] if cells.size else [memoryview(b"")]

    def begin_write(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> ShardedWrite:
        """Host memory for the cells; `finish` brings them to the ranks. Raises `IndexError` outside the pool."""
        check_cells(self, blocks, first_layer, num_layers)
        cells = self._host_cells(len(blocks), num_layers)
        run = cells.data.cast("B") if cells.size else memoryview(bytearray())
        return ShardedWrite([run], self, blocks, first_layer, cells)

    def write(self, blocks: Sequence[int], first_layer: int, cells: Cells) -> None:
        """Writes cells `[blocks, layers, 2, heads, bytes of a head]`."""
        for heads, store in self._parts:
            store.write(blocks, first_layer, cells[:, :, :, heads])

    def copy_block(self, source: int, destination: int) -> None:
        """Copies one block, all layers."""
        for _, store in self._parts:
            store.copy_block(source, destination)

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies tokens' KV, all layers, from slot to slot (block * block_tokens + offset), as if at once."""
        for _, store in self._parts:
            store.move_tokens(sources, destinations)

    def save_blocks(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        """A copy of the blocks' bytes in host memory, `[blocks, block bytes]`."""
        (run,) = self.runs(blocks, 0, self.layout.num_layers)
        return np.frombuffer(run, np.uint8).reshape(len(blocks), self.layout.block_bytes)

    def restore_blocks(self, blocks: Sequence[int], saved: npt.NDArray[np.uint8]) -> None:
        """Writes what `save_blocks` gave into other blocks."""
        shape = self._host_cells(0, self.layout.num_layers).shape[1:]
        self.write(blocks, 0, saved.reshape(len(blocks), *shape))

    def zero(self) -> None:
        """Fills the pool with zeros."""
        cells = self._host_cells(1, self.layout.num_layers)
        cells.fill(0)
        for block in range(self.num_blocks):
            self.write([block], 0, cells)

    def poison(self, block: int) -> None:
        """Fills one block with NaN."""
        cells = self._host_cells(1, self.layout.num_layers)
        cells.fill(POISON_BYTE)
        self.write([block], 0, cells)

    def close(self) -> None:
        """Gives this rank's memory back to torch (idempotent); the others' goes with their processes."""
        self.own.close()

    def _host_cells(self, num_blocks: int, num_layers: int) -> Cells:
        return np.empty((num_blocks, num_layers, 2, self.layout.num_kv_heads, self.layout.head_bytes), np.uint8)
