"""Which cells of a transfer have arrived and verified: a bit for each (layer, block).

Duplicated, resent or reordered frames set the same bits; complete means every bit of the rectangle is set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class CellRange:
    """Layers [first_layer, first_layer + num_layers) of blocks [first_block, first_block + num_blocks)."""

    first_layer: int
    num_layers: int
    first_block: int
    num_blocks: int

    @property
    def num_cells(self) -> int:
        return self.num_layers * self.num_blocks

    def overlaps(self, other: CellRange) -> bool:
        return (
            self.first_layer < other.first_layer + other.num_layers
            and other.first_layer < self.first_layer + self.num_layers
            and self.first_block < other.first_block + other.num_blocks
            and other.first_block < self.first_block + self.num_blocks
        )

    def split_off(self, max_cells: int) -> tuple[CellRange, tuple[CellRange, ...]]:
        """The first part of at most `max_cells` cells (whole blocks where they fit), and what is left, in order."""
        if self.num_cells <= max_cells:
            return self, ()
        if self.num_layers <= max_cells:
            num_blocks = max_cells // self.num_layers
            part = CellRange(self.first_layer, self.num_layers, self.first_block, num_blocks)
            return part, (self._from_block(num_blocks),)
        part = CellRange(self.first_layer, max_cells, self.first_block, 1)
        num_left = self.num_layers - max_cells
        rest = CellRange(self.first_layer + max_cells, num_left, self.first_block, 1)
        return part, (rest, self._from_block(1)) if self.num_blocks > 1 else (rest,)

    def _from_block(self, skipped: int) -> CellRange:
        return CellRange(self.first_layer, self.num_layers, self.first_block + skipped, self.num_blocks - skipped)


class CellCoverage:
    """Coverage of blocks [first_block, first_block + num_blocks) over all layers. Not thread-safe: its owner locks."""

    def __init__(self, num_layers: int, first_block: int, num_blocks: int) -> None:
        self._first_block = first_block
        self._is_covered = np.zeros((num_layers, num_blocks), dtype=np.bool_)
        self._num_missing = num_layers * num_blocks

    @property
    def is_complete(self) -> bool:
        return self._num_missing == 0

    def contains(self, cells: CellRange) -> bool:
        """Whether the range lies within the rectangle that is to be covered."""
        num_layers, num_blocks = self._is_covered.shape
        first = cells.first_block - self._first_block
        return (
            cells.num_layers > 0
            and cells.num_blocks > 0
            and cells.first_layer + cells.num_layers <= num_layers
            and first >= 0
            and first + cells.num_blocks <= num_blocks
        )

    def any_covered(self, cells: CellRange) -> bool:
        return bool(self._part(cells).any())

    def mark(self, cells: CellRange) -> None:
        part = self._part(cells)
        self._num_missing -= int(part.size - np.count_nonzero(part))
        part[:] = True

    def missing(self) -> tuple[CellRange, ...]:
        """What is not covered, as few rectangles as rows of equal gaps allow."""
        ranges: list[CellRange] = []
        previous: list[tuple[int, int]] = []
        for layer, row in enumerate(self._is_covered):
            gaps = _gaps(row)
            if gaps and gaps == previous:
                for index in range(len(ranges) - len(gaps), len(ranges)):
                    grown = ranges[index]
                    ranges[index] = CellRange(
                        grown.first_layer, grown.num_layers + 1, grown.first_block, grown.num_blocks
                    )
            else:
                ranges += [CellRange(layer, 1, self._first_block + start, length) for start, length in gaps]
            previous = gaps
        return tuple(ranges)

    def num_complete_blocks(self) -> int:
        """Blocks from the first on that are covered in every layer: what a dead sender leaves that may be kept."""
        complete = np.asarray(self._is_covered.all(axis=0))
        return int(complete.size) if complete.all() else int(np.argmin(complete))

    def _part(self, cells: CellRange) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        first = cells.first_block - self._first_block
        return self._is_covered[
            cells.first_layer : cells.first_layer + cells.num_layers, first : first + cells.num_blocks
        ]


def _gaps(row: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[tuple[int, int]]:
    """(start, length) of each run of uncovered blocks."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], ~row, [False]))))
    return [(int(start), int(end - start)) for start, end in zip(edges[::2], edges[1::2], strict=True)]
