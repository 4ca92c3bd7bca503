"""What a transport needs of a KV pool: its layout and where a cell's bytes are. `engine.kv_memory` has the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cluster.kv_layout import ORDER, KvLayout

__all__ = ["ORDER", "KvLayout", "KvMemory"]


class KvMemory(Protocol):
    """A pool as bytes."""

    layout: KvLayout
    num_blocks: int

    def run(self, block: int, first_layer: int, num_layers: int) -> memoryview:
        """The contiguous writable bytes of layers [first_layer, first_layer + num_layers) of one block."""
        ...

    def runs(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> list[memoryview]:
        """The same of several blocks, one after the other; where they touch each other they are one run."""
        ...
