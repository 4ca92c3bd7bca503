"""Runs of bytes of one buffer, told by their places: what a pool gives to a transport without a view for each run."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from typing import overload

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]


class _InOrder(array):  # type: ignore[type-arg]  # of int: generic only for a type checker
    """Places 0, 1, 2, ..."""


class EqualRuns(Sequence[memoryview]):
    """Runs of `run_bytes` each: run i starts `places[i] * stride` bytes behind `address`.

    As a sequence it makes their views; native code takes the numbers. What it points into stays mapped while it lives.
    Plain integers throughout: a frame has some dozen runs, and numpy's calls would take as long as its bytes.
    """

    __slots__ = ("_buffer", "_first", "address", "places", "run_bytes", "stride")

    def __init__(
        self, buffer: memoryview, buffer_address: int, first: int, places: Sequence[int], stride: int, run_bytes: int
    ) -> None:
        """`first`: what place 0 would be in the buffer. Raises `IndexError` for a run outside it."""
        if len(places):
            # Of places in order the ends are known; looking at all of them costs as much as the rest of this.
            low, high = (places[0], places[-1]) if isinstance(places, _InOrder) else (min(places), max(places))
            if first + low * stride < 0 or first + high * stride + run_bytes > buffer.nbytes:
                raise IndexError(f"a run of {run_bytes} bytes lies outside of a buffer of {buffer.nbytes}")
        self._buffer = buffer[:]  # a view of our own: its owner cannot unmap what we point into
        self._first = first
        self.address = buffer_address + first
        self.places = places if isinstance(places, array) else array("q", places)
        self.stride = stride
        self.run_bytes = run_bytes

    @property
    def num_bytes(self) -> int:
        return len(self.places) * self.run_bytes

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...

    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        start = self._first + self.places[index] * self.stride
        return self._buffer[start : start + self.run_bytes]

    def __iter__(self) -> Iterator[memoryview]:
        buffer, size = self._buffer, self.run_bytes
        for place in self.places:
            start = self._first + place * self.stride
            yield buffer[start : start + size]


class MappedBytes:
    """A mapping of this process, where other people's runs have their copies."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._address = address_of(buffer)

    def from_start(self, start: int, like: Sequence[memoryview]) -> Sequence[memoryview]:
        """Runs of the sizes of those of `like`, one behind the other. Raises `IndexError` outside the mapping."""
        if (size := size_of_each(like)) is not None:
            return EqualRuns(self._buffer, self._address, start, counting(len(like)), size, size)
        ends = np.cumsum(sizes_of(like)).tolist()
        if start < 0 or start + ends[-1] > self._buffer.nbytes:
            raise IndexError(f"{ends[-1]} bytes from {start} lie outside of a mapping of {self._buffer.nbytes}")
        return [self._buffer[start + first : start + end] for first, end in zip((0, *ends[:-1]), ends, strict=True)]

    def strided(self, first: int, places: Sequence[int], stride: int, run_bytes: int) -> EqualRuns:
        """Raises `IndexError` outside the mapping."""
        return EqualRuns(self._buffer, self._address, first, places, stride, run_bytes)

    def at(self, places: Sequence[int], sizes: Sequence[int]) -> Sequence[memoryview]:
        """The runs that begin there. Raises `IndexError` outside the mapping."""
        if sizes and min(sizes) == max(sizes):
            return EqualRuns(self._buffer, self._address, 0, places, 1, sizes[0])
        if any(
            place < 0 or size < 0 or place + size > self._buffer.nbytes
            for place, size in zip(places, sizes, strict=True)
        ):
            raise IndexError(f"a run lies outside of a mapping of {self._buffer.nbytes} bytes")
        return [self._buffer[place : place + size] for place, size in zip(places, sizes, strict=True)]


@cache
def counting(count: int) -> array[int]:
    """0, 1, 2, ...: as many as a frame has runs, so few different ones."""
    return _InOrder("q", range(count))


def size_of_each(runs: Sequence[memoryview]) -> int | None:
    """Bytes of every run when they are known to be alike."""
    if isinstance(runs, EqualRuns):
        return runs.run_bytes
    return runs[0].nbytes if len(runs) == 1 else None


def address_of(run: memoryview) -> int:
    """Where its first byte is in this process."""
    return int(np.frombuffer(run, np.uint8).ctypes.data)


def addresses_of(runs: Sequence[memoryview]) -> Offsets:
    if isinstance(runs, EqualRuns):
        return runs.address + runs.stride * np.array(runs.places, np.int64)
    return np.array([address_of(run) for run in runs], np.int64)


def sizes_of(runs: Sequence[memoryview]) -> Offsets:
    if isinstance(runs, EqualRuns):
        return np.full(len(runs), runs.run_bytes, np.int64)
    return np.array([run.nbytes for run in runs], np.int64)
