"""Matrix products of the native library by themselves: what tests compare and benchmarks time.

The engine does not come through here: a step is one call (`engine.native_runner`).
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from cluster.errors import EngineFailure
from engine import native_library
from engine.native_library import NumberFormat

PANEL_OUTPUTS = 16


class NativeMatrix:
    """One packed matrix [outputs, inputs]. `multiply` runs on the calling thread."""

    def __init__(
        self,
        data: npt.NDArray[np.float32] | npt.NDArray[np.uint8],
        num_inputs: int,
        source: NumberFormat,
        kept: NumberFormat,
        *,
        isa: str = "",
    ) -> None:
        """`data` [outputs, bytes or floats of a row] in format `source`. Raises `EngineFailure` for a pair of formats
        that does not go together."""
        rows = np.ascontiguousarray(data)
        self.num_outputs, self.num_inputs = rows.shape[0], num_inputs
        self._library = native_library.load_library()
        self._matrix = ctypes.c_void_p(
            self._library.tandem_matrix_create(
                isa.encode(), self.num_outputs, num_inputs, source, kept, rows.ctypes.data
            )
        )
        if not self._matrix:
            raise EngineFailure(f"native matrix: {native_library.last_error()}")

    @property
    def packed_bytes(self) -> int:
        return int(self._library.tandem_matrix_bytes(self._matrix))

    def multiply(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """x [rows, inputs] times the transposed matrix: [rows, outputs]."""
        x = np.ascontiguousarray(x, dtype=np.float32)
        stride = -(-self.num_outputs // PANEL_OUTPUTS) * PANEL_OUTPUTS
        out = np.empty((x.shape[0], stride), np.float32)
        native_library.check(
            self._library.tandem_matrix_multiply(self._matrix, x.ctypes.data, x.shape[0], out.ctypes.data, stride)
        )
        return out[:, : self.num_outputs]

    def row(self, output: int) -> npt.NDArray[np.float32]:
        """The weights [inputs] of one output, as the matrix holds them."""
        out = np.empty(self.num_inputs, np.float32)
        native_library.check(self._library.tandem_matrix_row(self._matrix, output, out.ctypes.data))
        return out

    def __del__(self) -> None:
        if getattr(self, "_matrix", None):
            self._library.tandem_matrix_destroy(self._matrix)
