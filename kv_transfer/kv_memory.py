"""What a transport needs of a KV pool: its layout and where a cell's bytes are. `engine.kv_memory` has the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cluster.kv_layout import ORDER, KvLayout

__all__ = ["ORDER", "CellWrite", "KvLayout", "KvMemory"]


class CellWrite(Protocol):
    """Cells that are being received: where their bytes go, and what brings them into the pool."""

    @property
    def runs(self) -> Sequence[memoryview]:
        """Writable, in the order of a frame's payload."""
        ...

    def finish(self) -> None:
        """All bytes are there and right: whatever reads the pool from now on sees them."""
        ...


class KvMemory(Protocol):
    """A pool as bytes."""

    layout: KvLayout
    num_blocks: int

    def run(self, block: int, first_layer: int, num_layers: int) -> memoryview:
        """The contiguous bytes of layers [first_layer, first_layer + num_layers) of one block.

        Writable where the pool is in host memory; else a copy for who reads.
        """
        ...

    def runs(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> Sequence[memoryview]:
        """The same of several blocks, one after the other; where they touch each other they are one run."""
        ...

    def begin_write(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> CellWrite:
        """Room for the same cells, to be written by a transport. Nothing reads them before `finish`."""
        ...
