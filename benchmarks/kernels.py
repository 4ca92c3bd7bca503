"""Each operation of the CPU engine against plain torch and against its floor, on one core.

    python -m benchmarks.kernels [--rows 1,4,16,64,512] [--formats BF16,Q4_1] [--isa avx2]

Matrix products have the shapes of the default model's layers. Each call meets weights that are not in any cache, as in
a step: copies of the matrix, together larger than the last cache, take turns. A call of ours includes bringing the
activations into the kernel's form; torch multiplies float32 or bfloat16 tensors of the same values. Sampling is one
row of the default model's vocabulary, against the NumPy definition. Attention is timed within whole steps
(`benchmarks.engine`: contexts of 128 and 2,048).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np
import torch

from benchmarks.native_floors import Floors, measure_floors
from benchmarks.option_types import counts, instruction_set, names_of
from engine import native_sampler, sampler
from engine.kernels.native import NativeMatrix
from engine.native_library import NumberFormat
from engine.noise import NoiseKeys

SHAPES = {
    "qkv": (960, 576),
    "attention output": (576, 576),
    "gate and up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
}
# What floats can be kept as, and whose rate is the floor of its products.
PRODUCT_KINDS = {
    "F32": NumberFormat.F32,
    "BF16": NumberFormat.BF16,
    "BF16_COMPRESSED": NumberFormat.BF16,
    "Q4_1": NumberFormat.Q8_0,
    "Q8_0": NumberFormat.Q8_0,
}
COLD_BYTES = 96 * 2**20  # of copies: more than the last cache of a core's share
MAX_COPIES = 128
VOCAB_SIZE = 49152


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians of one operation in microseconds."""

    operation: str
    kind: str
    rows: int
    ours_us: float
    reference_us: float
    floor_us: float  # 0: no floor is defined

    @property
    def times_faster(self) -> float:
        return self.reference_us / self.ours_us


def time_matrix(
    name: str, kind: NumberFormat, row_counts: Sequence[int], floors: Floors, isa: str, repeats: int
) -> Iterator[Timing]:
    """One shape in one format, for each number of rows."""
    outputs, inputs = SHAPES[name]
    weights = np.random.default_rng(0).standard_normal((outputs, inputs)).astype(np.float32)
    first = NativeMatrix(weights, inputs, NumberFormat.F32, kind, isa=isa)
    copies = min(MAX_COPIES, max(1, COLD_BYTES // first.packed_bytes))
    ours = [first, *(NativeMatrix(weights, inputs, NumberFormat.F32, kind, isa=isa) for _ in range(copies - 1))]
    dtype = torch.float32 if kind == NumberFormat.F32 else torch.bfloat16
    theirs = [torch.from_numpy(weights).to(dtype, copy=True) for _ in range(copies)]
    product_kind = PRODUCT_KINDS[kind.name]
    for rows in row_counts:
        x = np.random.default_rng(rows).standard_normal((rows, inputs)).astype(np.float32)
        tensor = torch.from_numpy(x).to(dtype)
        operations = [(product_kind, 2.0 * rows * outputs * inputs)]
        yield Timing(
            operation=name,
            kind=kind.name,
            rows=rows,
            ours_us=median_us(in_turns([partial(matrix.multiply, x) for matrix in ours]), repeats),
            reference_us=median_us(
                in_turns([partial(torch.nn.functional.linear, tensor, matrix) for matrix in theirs]), repeats
            ),
            floor_us=1e6 * floors.seconds(first.packed_bytes, operations),
        )


def time_sampling(spread: float, isa: str, repeats: int) -> Timing:
    """One row of a whole vocabulary; the larger the spread of its logits, the surer the model."""
    scaled = (np.random.default_rng(0).standard_normal((1, VOCAB_SIZE)) * spread).astype(np.float32)
    scaled -= scaled.max()
    peaks = scaled.argmax(axis=1)
    keys = NoiseKeys(*(np.array([number], np.uint64) for number in (1, 0, 100)))
    return Timing(
        operation=f"sample, spread {spread:g}",
        kind="F32",
        rows=1,
        ours_us=median_us(lambda: native_sampler.gumbel_argmax(scaled, peaks, keys, isa=isa), repeats),
        reference_us=median_us(lambda: sampler.gumbel_argmax(scaled, peaks, keys), repeats),
        floor_us=0.0,
    )


def in_turns(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Makes the next of `calls` each time."""
    turns = cycle(calls)
    return lambda: next(turns)()


def median_us(work: Callable[[], object], repeats: int) -> float:
    """Median of the thread's own time of one call, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return 1e6 * statistics.median(times)


def print_timings(timings: Iterator[Timing]) -> None:
    heads = f"{'ours us':>9} {'torch us':>9} {'faster':>7} {'floor us':>9} {'of floor':>8}"
    print(f"{'operation':18} {'kind':>15} {'rows':>4} {heads}")
    for row in timings:
        share = f"{row.floor_us / row.ours_us:8.0%}" if row.floor_us else f"{'':8}"
        print(
            f"{row.operation:18} {row.kind:>15} {row.rows:4d} {row.ours_us:9.0f} {row.reference_us:9.0f} "
            f"{row.times_faster:6.1f}x {row.floor_us:9.0f} {share}"
        )


def all_timings(options: argparse.Namespace, floors: Floors) -> Iterator[Timing]:
    for kind in map(NumberFormat.__getitem__, options.formats):
        for name in SHAPES:
            yield from time_matrix(name, kind, options.rows, floors, options.isa, options.repeats)
    for spread in (3.0, 10.0):
        yield time_sampling(spread, options.isa, options.repeats)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The CPU engine's operations against torch and the machine's floors.")
    parser.add_argument("--rows", type=counts, default=[1, 4, 16, 64, 512])
    parser.add_argument(
        "--formats",
        type=names_of(tuple(PRODUCT_KINDS)),
        default=["BF16", "Q8_0", "Q4_1", "F32"],
        help=f"of {', '.join(PRODUCT_KINDS)}",
    )
    parser.add_argument(
        "--isa", type=instruction_set, default="", help="instruction set of our kernels; empty: the best"
    )
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    floors = measure_floors(options.isa)
    rates = ", ".join(f"{kind.name} {rate / 1e9:.0f} G/s" for kind, rate in floors.operations_per_s.items())
    print(f"floors of one core: read {floors.read_bytes_per_s / 1e9:.1f} GB/s; products {rates}")
    print_timings(all_timings(options, floors))
    return 0


if __name__ == "__main__":
    sys.exit(main())
