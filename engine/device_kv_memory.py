"""The KV pool in a GPU's memory: the same order as `engine.kv_memory`, out of the transports' reach.

Transports move host memory; a worker whose pool is here serves whole requests by itself (role aggregated).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cluster.errors import EngineFailure, StartupError
from cluster.kv_layout import KvLayout
from engine.dtype import TORCH_DTYPES
from engine.kv_memory import KvMemory


class DeviceKvMemory(KvMemory):
    """One worker's pool on `device`. What only host memory can do raises `EngineFailure`."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """Raises `StartupError` when the device does not give that much memory."""
        if num_blocks < 1:
            raise StartupError(f"the KV pool needs at least one block, got {num_blocks}", param="num_kv_blocks")
        self.layout = layout
        self.num_blocks = num_blocks
        self.size_bytes = num_blocks * layout.block_bytes
        self.memfd = None
        self.mapping_offset = 0
        self.huge_pages = False
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_tokens, layout.head_dim)
        try:
            self.tensor = torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=device)
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"{device} has no {self.size_bytes} bytes for the KV pool: set a smaller kv_cache_bytes",
                param="kv_cache_bytes",
            ) from error

    @property
    def address(self) -> int:
        raise EngineFailure("a KV pool in GPU memory has no address in this process")

    def run(self, block: int, first_layer: int, num_layers: int) -> memoryview:
        raise EngineFailure(f"block {block} lies in GPU memory: transports move host memory only")

    def copy_block(self, source: int, destination: int) -> None:
        """Copies one block, all layers."""
        self.tensor[destination].copy_(self.tensor[source])

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies tokens' KV, all layers, from slot to slot (block * block_tokens + offset), as if at once."""
        block_tokens = self.layout.block_tokens
        source, destination = (torch.tensor(slots, device=self.tensor.device) for slots in (sources, destinations))
        moved = self.tensor[source // block_tokens, :, :, :, source % block_tokens]
        self.tensor[destination // block_tokens, :, :, :, destination % block_tokens] = moved

    def save_blocks(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        """A copy of the blocks' bytes in host memory, `[blocks, block bytes]`."""
        content = self.tensor[list(blocks)].reshape(len(blocks), -1).cpu()
        saved: npt.NDArray[np.uint8] = content.view(torch.uint8).numpy()
        return saved

    def restore_blocks(self, blocks: Sequence[int], saved: npt.NDArray[np.uint8]) -> None:
        """Writes what `save_blocks` gave into other blocks."""
        content = torch.from_numpy(saved).view(self.tensor.dtype)
        self.tensor[list(blocks)] = content.reshape(len(blocks), *self.tensor.shape[1:]).to(self.tensor.device)

    def zero(self) -> None:
        """Fills the pool with zeros."""
        self.tensor.zero_()

    def poison(self, block: int) -> None:
        """Fills one block with NaN."""
        self.tensor[block].fill_(torch.nan)

    def close(self) -> None:
        """Gives the memory back to torch (idempotent)."""
        self.tensor = self.tensor.new_empty(0)
