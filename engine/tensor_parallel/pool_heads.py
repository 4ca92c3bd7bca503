"""A rank's KV heads within a pool that has all of them: the ranks of one host write into one pool, each its own heads.

So whoever moves blocks (transports, prefix cache, preemption) sees one pool of the whole model, laid out alike whatever
the number of ranks is.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from cluster.kv_layout import KvLayout
from engine.dtype import POOL_DTYPES
from engine.kv_memory import pool_shape
from engine.torch_runner import PoolTensor


def layout_of_heads(layout: KvLayout, heads: slice) -> KvLayout:
    """The layout of a pool of those heads alone."""
    return replace(layout, num_kv_heads=heads.stop - heads.start)


@dataclass(frozen=True)
class PoolHeads:
    """Implements `engine.torch_runner.PoolTensor` of some heads."""

    pool: PoolTensor
    heads: slice

    @property
    def layout(self) -> KvLayout:
        return layout_of_heads(self.pool.layout, self.heads)

    @property
    def tensor(self) -> torch.Tensor:
        return self.pool.tensor[:, :, :, self.heads]


class MappedPool:
    """A pool whose memory another process made (`engine.kv_memory.KvMemory`, shareable). Implements `PoolTensor`."""

    def __init__(self, layout: KvLayout, num_blocks: int, memfd: int, mapping_offset: int) -> None:
        """Takes `memfd` over. Raises OSError when it cannot be mapped."""
        self.layout = layout
        self.num_blocks = num_blocks
        self._offset = mapping_offset
        try:
            self._mapping = mmap.mmap(memfd, os.fstat(memfd).st_size)
        finally:
            os.close(memfd)

    @cached_property
    def tensor(self) -> torch.Tensor:
        size_bytes = self.num_blocks * self.layout.block_bytes
        content = np.frombuffer(self._mapping, np.uint8, size_bytes, self._offset)
        return torch.from_numpy(content).view(POOL_DTYPES[self.layout.dtype]).view(pool_shape(self))
