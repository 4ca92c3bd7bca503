"""The KV pool in a GPU's memory: the same order as `engine.kv_memory`, in a transport's reach through host memory.

    send     blocks ──gather kernel──> device buffer ──copy──> pinned host buffer ──> transport
    receive  transport ──> pinned host buffer ──copy──> device buffer ──scatter kernel──> blocks

A buffer holds one frame and lives as long as somebody holds its view. All of it runs on the device's default stream, as
the model does: a gather comes after the layers whose KV was written before it was asked for, a step after the scatters
that were finished before it began. Transports that write into a pool by its address have nothing to write into here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cluster.errors import EngineFailure, StartupError
from cluster.kv_layout import KvLayout
from engine.dtype import POOL_DTYPES
from engine.interpreter_turn import interpreter_turn
from engine.kernels.fp8_kv import split_pool
from engine.kv_memory import POISON_BYTE, CellWrite, KvMemory, SizedPool, pool_shape


@dataclass(frozen=True, slots=True)
class StagedWrite(CellWrite):
    """Cells that a transport writes into host memory first."""

    _memory: DeviceKvMemory
    _blocks: Sequence[int]
    _first_layer: int
    _host: torch.Tensor

    def finish(self) -> None:
        """Copies them into their blocks. Waits for the copy alone, not for the kernels before it."""
        self._memory.scatter(self._blocks, self._first_layer, self._host)


class DeviceKvMemory(KvMemory):
    """One worker's pool on `device`. What needs an address in this process raises `EngineFailure`.

    With a CPU for the device the kernels run in Triton's interpreter: for tests.
    """

    is_addressable = False

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
        try:
            self.tensor = torch.zeros(pool_shape(self), dtype=POOL_DTYPES[layout.dtype], device=device)
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"{device} has no {self.size_bytes} bytes for the KV pool: set a smaller kv_cache_bytes",
                param="kv_cache_bytes",
            ) from error

    @property
    def address(self) -> int:
        raise EngineFailure("a KV pool in GPU memory has no address in this process")

    def run(self, block: int, first_layer: int, num_layers: int) -> memoryview:
        """A copy, to read. Raises `IndexError` outside the pool."""
        return self.runs([block], first_layer, num_layers)[0]

    def runs(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> list[memoryview]:
        """A copy of the cells as one run, to read. Raises `IndexError` outside the pool."""
        from engine.kernels.triton.kv_cells import gather_cells  # not at the top: it needs triton

        check_cells(self, blocks, first_layer, num_layers)
        with interpreter_turn():
            gathered = gather_cells(self.tensor, self._indices(blocks), first_layer, num_layers)
        host = self._host_buffer(len(blocks), num_layers)
        host.copy_(gathered)  # blocks until the bytes are there
        return [_bytes_of(host).toreadonly()]

    def begin_write(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> StagedWrite:
        """Host memory for the cells; `finish` brings them into the pool. Raises `IndexError` outside the pool."""
        check_cells(self, blocks, first_layer, num_layers)
        host = self._host_buffer(len(blocks), num_layers)
        return StagedWrite([_bytes_of(host)], self, blocks, first_layer, host)

    def scatter(self, blocks: Sequence[int], first_layer: int, content: torch.Tensor) -> None:
        """Writes `content` `[blocks, elements of the layers]` in host memory into the blocks' layers."""
        from engine.kernels.triton.kv_cells import scatter_cells

        on_device = content.to(self.tensor.device)
        with interpreter_turn():
            scatter_cells(self.tensor, self._indices(blocks), first_layer, on_device)

    def copy_block(self, source: int, destination: int) -> None:
        """Copies one block, all layers."""
        self.tensor[destination].copy_(self.tensor[source])

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies tokens' KV, all layers, from slot to slot (block * block_tokens + offset), as if at once."""
        block_tokens = self.layout.block_tokens
        source, destination = (torch.tensor(slots, device=self.tensor.device) for slots in (sources, destinations))
        for part in split_pool(self.tensor) if self.layout.has_scales else (self.tensor,):
            moved = part[source // block_tokens, :, :, :, source % block_tokens]
            part[destination // block_tokens, :, :, :, destination % block_tokens] = moved

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
        self.tensor[block].view(torch.uint8).fill_(POISON_BYTE)

    def close(self) -> None:
        """Gives the memory back to torch (idempotent)."""
        self.tensor = self.tensor.new_empty(0)

    def _indices(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(blocks), dtype=torch.int32, device=self.tensor.device)

    def _host_buffer(self, num_blocks: int, num_layers: int) -> torch.Tensor:
        """Pinned, so that the copy is one DMA; torch keeps such memory for the next buffer of its size."""
        elements = num_layers * self.layout.cell_bytes // self.layout.element_bytes
        is_gpu = self.tensor.device.type == "cuda"
        return torch.empty((num_blocks, elements), dtype=self.tensor.dtype, pin_memory=is_gpu)


def check_cells(pool: SizedPool, blocks: Sequence[int], first_layer: int, num_layers: int) -> None:
    """Raises `IndexError` outside the pool."""
    are_blocks = all(0 <= block < pool.num_blocks for block in blocks)
    if not (are_blocks and 0 <= first_layer <= first_layer + num_layers <= pool.layout.num_layers):
        raise IndexError(
            f"blocks {list(blocks)}, layers {first_layer} to {first_layer + num_layers}: the pool has "
            f"{pool.num_blocks} blocks of {pool.layout.num_layers} layers"
        )


def _bytes_of(host: torch.Tensor) -> memoryview:
    """The tensor's memory, which the view keeps."""
    content: npt.NDArray[np.uint8] = host.view(torch.uint8).view(-1).numpy()
    return content.data
