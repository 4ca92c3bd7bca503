"""What one core of this machine can do at best, measured now: the floors that the engine's times are set against.

Times are the calling thread's own processor time, so that a busy machine's other work is not counted as ours.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.native_library import NumberFormat, load_library

READ_BYTES = 256 * 2**20  # far beyond any cache
PRODUCT_SECONDS = 0.05
REPEATS = 7


@dataclass(frozen=True, slots=True)
class Floors:
    """Best of several measurements: a floor is what the machine can do, not what it does beside other work."""

    read_bytes_per_s: float
    operations_per_s: dict[NumberFormat, float]  # F32, BF16 and (for every block format) Q8_0

    def seconds(self, num_bytes: float, operations: Sequence[tuple[NumberFormat, float]]) -> float:
        """The least time for work that reads `num_bytes` and does `operations` of each kind: the larger of the two."""
        computing = sum(count / self.operations_per_s[kind] for kind, count in operations)
        return max(num_bytes / self.read_bytes_per_s, computing)


def measure_floors(isa: str = "") -> Floors:
    """Reads and multiplies with the instructions of `isa`; empty is the engine's own choice.

    A product of bfloat16 values is exact in float32, so float32 FMAs make it too: its rate is that of the faster way.
    """
    kinds = (NumberFormat.F32, NumberFormat.BF16, NumberFormat.Q8_0)
    rates = {kind: _product_rate(isa.encode(), kind) for kind in kinds}
    rates[NumberFormat.BF16] = max(rates[NumberFormat.BF16], rates[NumberFormat.F32])
    return Floors(_read_rate(isa.encode()), rates)


def _read_rate(isa: bytes) -> float:
    library = load_library()
    mapping = mmap.mmap(-1, READ_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(mapping, dtype=np.uint8)
    data.fill(1)
    return READ_BYTES / _best(lambda: library.tandem_read_once(isa, data.ctypes.data, READ_BYTES))


def _product_rate(isa: bytes, kind: NumberFormat) -> float:
    library = load_library()
    iterations = 1000
    while True:
        started = time.thread_time()
        operations = library.tandem_multiply_in_registers(isa, kind, iterations)
        if time.thread_time() - started > PRODUCT_SECONDS / 4:
            break
        iterations *= 2
    return float(operations) / _best(lambda: library.tandem_multiply_in_registers(isa, kind, iterations))


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return min(times)
