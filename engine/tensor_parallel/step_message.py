"""One step on its way from rank 0 to another rank: a fixed header, then the arrays as they lie in memory.

Both ends are this program on this host, so bytes have the host's order and the receiver checks no more than it needs to
read. Taps stay at rank 0: hidden states are whole there.
"""

from __future__ import annotations

import socket
import struct
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine.step import StepInput

# Tokens, sequences, width of the block tables, logit rows, width of `inputs` (0: there are none), whether masks come.
_HEADER = struct.Struct("=6I")
Element = TypeVar("Element", bound=np.generic)


def send_step(to: socket.socket, step: StepInput) -> None:
    """Raises OSError when the other end is gone or does not take it within the socket's timeout."""
    inputs, masks = step.inputs, step.tree_masks
    header = _HEADER.pack(
        step.num_tokens,
        step.num_sequences,
        step.block_tables.shape[1],
        len(step.logit_rows),
        0 if inputs is None else inputs.shape[1],
        masks is not None,
    )
    arrays: list[npt.NDArray[np.generic]] = [
        step.token_ids,
        step.positions,
        step.slots,
        step.query_starts,
        step.context_lens,
        step.block_tables,
        step.logit_rows,
        *(array for array in (inputs, masks) if array is not None),
    ]
    to.sendall(b"".join((header, *(np.ascontiguousarray(array).tobytes() for array in arrays))))


def receive_step(source: socket.socket) -> StepInput | None:
    """The next step; None once the other end is closed. Raises EOFError in the middle of one."""
    header = source.recv(_HEADER.size, socket.MSG_WAITALL)
    if not header:
        return None
    num_tokens, num_sequences, width, num_rows, hidden, has_masks = _HEADER.unpack(_complete(header, _HEADER.size))

    return StepInput(
        token_ids=_read(source, (num_tokens,), np.int32),
        positions=_read(source, (num_tokens,), np.int32),
        slots=_read(source, (num_tokens,), np.int64),
        query_starts=_read(source, (num_sequences + 1,), np.int32),
        context_lens=_read(source, (num_sequences,), np.int32),
        block_tables=_read(source, (num_sequences, width), np.int32),
        logit_rows=_read(source, (num_rows,), np.int32),
        inputs=_read(source, (num_tokens, hidden), np.float32) if hidden else None,
        tree_masks=_read(source, (num_tokens,), np.int32) if has_masks else None,
    )


def _read(source: socket.socket, shape: tuple[int, ...], dtype: type[Element]) -> npt.NDArray[Element]:
    array = np.empty(shape, dtype)
    left = array.data.cast("B") if array.size else memoryview(b"")
    while left:
        num_bytes = source.recv_into(left)
        if not num_bytes:
            raise EOFError("the step ends before its arrays do")
        left = left[num_bytes:]
    return array


def _complete(message: bytes, size: int) -> bytes:
    if len(message) != size:
        raise EOFError(f"{len(message)} bytes of a header of {size}")
    return message
