"""Cells of a pool that another rank has in its device's memory: read and written over a socket of their own.

    rank 0, any thread ──RankCells──> socket ──CellServer's thread──> the rank's pool

Apart from the socket for steps, so that a prompt's cells can leave while its later layers are still being computed.
Whoever reads must know that the rank has written: rank 0 does once its own device has passed the sum behind the layer.
"""

from __future__ import annotations

import enum
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from cluster.errors import EngineFailure
from cluster.kv_layout import KvLayout
from engine.device_kv_memory import DeviceKvMemory

# What to do, first layer, layers, block or slot numbers that follow; behind those come a write's bytes.
_HEADER = struct.Struct("=4I")
_DONE = b"D"
# Bytes of cells `[blocks, layers, 2, heads, bytes of a head]`.
Cells = npt.NDArray[np.uint8]

logger = logging.getLogger(__name__)


def end_rank() -> NoReturn:
    """Ends this process: its main thread waits for steps and would never know that rank 0 waits for cells."""
    os._exit(1)


class _Order(enum.IntEnum):
    READ = 1
    WRITE = 2
    COPY_BLOCK = 3
    MOVE_TOKENS = 4


class CellStore(Protocol):
    """Cells of some heads."""

    def read(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> Cells: ...

    def write(self, blocks: Sequence[int], first_layer: int, cells: Cells) -> None: ...

    def copy_block(self, source: int, destination: int) -> None: ...

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int]) -> None: ...


class PoolCells:
    """Implements `CellStore` on a pool of this process."""

    def __init__(self, pool: DeviceKvMemory) -> None:
        self._pool = pool

    def read(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> Cells:
        (run,) = self._pool.runs(blocks, first_layer, num_layers)
        return np.frombuffer(run, np.uint8).reshape(_cells_shape(self._pool.layout, len(blocks), num_layers))

    def write(self, blocks: Sequence[int], first_layer: int, cells: Cells) -> None:
        write = self._pool.begin_write(blocks, first_layer, cells.shape[1])
        (run,) = write.runs
        run[:] = _bytes_of(np.ascontiguousarray(cells))
        write.finish()

    def copy_block(self, source: int, destination: int) -> None:
        self._pool.copy_block(source, destination)

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._pool.move_tokens(sources, destinations)


class RankCells:
    """Implements `CellStore` on another rank's pool, from any thread. Raises `EngineFailure` when the rank is gone."""

    def __init__(self, connection: socket.socket, layout: KvLayout) -> None:
        """`layout` is the rank's own."""
        self._connection = connection
        self._layout = layout
        self._turn = threading.Lock()

    def read(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> Cells:
        cells = np.empty(_cells_shape(self._layout, len(blocks), num_layers), np.uint8)
        if cells.size:
            self._ask(_Order.READ, first_layer, num_layers, blocks, b"", _bytes_of(cells))
        return cells

    def write(self, blocks: Sequence[int], first_layer: int, cells: Cells) -> None:
        self._do(_Order.WRITE, first_layer, cells.shape[1], blocks, cells.tobytes())

    def copy_block(self, source: int, destination: int) -> None:
        self._do(_Order.COPY_BLOCK, 0, 0, (source, destination))

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._do(_Order.MOVE_TOKENS, 0, 0, (*sources, *destinations))

    def _do(
        self, order: _Order, first_layer: int, num_layers: int, numbers: Sequence[int], content: bytes = b""
    ) -> None:
        self._ask(order, first_layer, num_layers, numbers, content, memoryview(bytearray(_DONE)))

    def _ask(
        self,
        order: _Order,
        first_layer: int,
        num_layers: int,
        numbers: Sequence[int],
        content: bytes,
        answer: memoryview,
    ) -> None:
        header = _HEADER.pack(order, first_layer, num_layers, len(numbers))
        with self._turn:
            try:
                self._connection.sendall(header + np.asarray(numbers, np.int32).tobytes() + content)
                is_complete = _read_into(self._connection, answer)
            except OSError as error:
                raise EngineFailure(f"a rank's cells cannot be reached: {error}") from error
        if not is_complete:
            raise EngineFailure("a rank ended before it gave its cells")


class CellServer:
    """A rank's side: one thread that carries out what rank 0 asks for, in order. Owned by the follower."""

    def __init__(
        self, connection: socket.socket, pool: DeviceKvMemory, on_failure: Callable[[], None] = end_rank
    ) -> None:
        self._connection = connection
        self._pool = pool
        self._on_failure = on_failure
        self._cells = PoolCells(pool)
        self._thread = threading.Thread(target=self._serve, name="rank-cells", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Once rank 0 has closed its end, or to make an end of it."""
        self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _serve(self) -> None:
        header = bytearray(_HEADER.size)
        try:
            while _read_into(self._connection, memoryview(header)):
                self._carry_out(*_HEADER.unpack(header))
        except Exception:
            logger.exception("a rank's cells cannot be served")
            self._on_failure()

    def _carry_out(self, order: int, first_layer: int, num_layers: int, num_numbers: int) -> None:
        array = np.empty(num_numbers, np.int32)
        if not _read_into(self._connection, _bytes_of(array)):
            raise EOFError("an order ends within its numbers")
        numbers = array.tolist()
        half = num_numbers // 2
        match order:
            case _Order.READ:
                self._connection.sendall(_bytes_of(self._cells.read(numbers, first_layer, num_layers)))
                return
            case _Order.WRITE:
                cells = np.empty(_cells_shape(self._pool.layout, num_numbers, num_layers), np.uint8)
                if not _read_into(self._connection, _bytes_of(cells)):
                    raise EOFError("an order ends within its cells")
                self._cells.write(numbers, first_layer, cells)
            case _Order.COPY_BLOCK:
                self._cells.copy_block(*numbers)
            case _Order.MOVE_TOKENS:
                self._cells.move_tokens(numbers[:half], numbers[half:])
            case _:
                raise ValueError(f"order {order} is none")
        self._connection.sendall(_DONE)


def _cells_shape(layout: KvLayout, num_blocks: int, num_layers: int) -> tuple[int, ...]:
    return (num_blocks, num_layers, 2, layout.num_kv_heads, layout.head_bytes)


def _bytes_of(array: npt.NDArray[np.generic]) -> memoryview:
    return array.data.cast("B") if array.size else memoryview(b"")


def _read_into(connection: socket.socket, left: memoryview) -> bool:
    """Whether all of it came before the other end was closed."""
    while left:
        num_bytes = connection.recv_into(left)
        if not num_bytes:
            return False
        left = left[num_bytes:]
    return True
