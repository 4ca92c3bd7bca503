"""A GGUF file's header: metadata and where each tensor's bytes are. No torch: a router reads its tokenizer from here.

    "GGUF" version num_tensors num_values | values: key, type, value | tensors: name, shape, type, offset | data

Only little-endian files of versions 2 and 3 are read. Every length in the file is checked against the file before it is
used. Values are decoded when asked for: a vocabulary of 150,000 strings costs nothing until somebody wants it.
Source: the GGUF specification of the ggml project.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from cluster.errors import StartupError, shown

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4  # the format nests arrays without a bound

_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_COUNT = struct.Struct("<Q")
_KIND = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's place. `shape` has rows first, the last dimension is contiguous."""

    name: str
    shape: tuple[int, ...]
    kind: str  # GGML's name of the element type: F32, Q4_1, ...
    offset: int  # from the start of the file
    size_bytes: int


class GgufFile:
    """An open file. `tensors` by GGUF's own names (`blk.0.attn_q.weight`). Close it, or use it as a context."""

    def __init__(self, path: Path) -> None:
        """Raises `StartupError` for a file that is missing, no GGUF, corrupt or truncated."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = "the file is empty" if isinstance(error, ValueError) else (error.strerror or str(error))
            raise StartupError(f"cannot read {path}: {reason}: give the path of a GGUF file", param="model") from error
        self._values: dict[str, tuple[int, int]] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            self.close()
            raise self._corrupt("its header is cut off or garbled") from error
        except StartupError:
            self.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value (number, bool, string or list), or `default` where the file has none."""
        if key not in self._values:
            return default
        kind, position = self._values[key]
        try:
            return self._decode(kind, position)[0]
        except UnicodeDecodeError as error:
            raise self._corrupt(f"{key} is not UTF-8") from error

    def rows(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes as `[rows, bytes of a row]`, read-only, not copied; a vector is one row."""
        tensor = self.tensors[name]
        num_rows = int(np.prod(tensor.shape[:-1]))
        flat = np.frombuffer(self._mapping, dtype=np.uint8, count=tensor.size_bytes, offset=tensor.offset)
        return flat.reshape(num_rows, -1)

    def close(self) -> None:
        """Unmaps the file (idempotent); arrays that somebody still holds keep it mapped until they go."""
        try:
            self._mapping.close()
        except BufferError:
            return

    def _parse(self) -> None:
        if self._mapping[:4] != MAGIC:
            raise StartupError(f"{self.path} is not a GGUF file (no GGUF magic): check the path", param="model")
        version = _KIND.unpack_from(self._mapping, 4)[0]
        if version not in (2, 3):
            raise StartupError(
                f"{self.path} is GGUF version {shown(version)}: little-endian versions 2 and 3 are read", param="model"
            )
        num_tensors, num_values = struct.unpack_from("<QQ", self._mapping, 8)
        position = 24
        for _ in range(num_values):
            key, position = self._string(position)
            kind = _KIND.unpack_from(self._mapping, position)[0]
            self._values[key] = (kind, position + 4)
            position = self._skip(kind, position + 4)
        self._parse_tensors(num_tensors, position)

    def _parse_tensors(self, num_tensors: int, position: int) -> None:
        entries: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name, position = self._string(position)
            num_dimensions = _KIND.unpack_from(self._mapping, position)[0]
            if not 1 <= num_dimensions <= MAX_DIMENSIONS:
                raise self._corrupt(f"tensor {shown(name)} has {num_dimensions} dimensions")
            shape = struct.unpack_from(f"<{num_dimensions}Q", self._mapping, position + 4)
            position += 4 + 8 * num_dimensions
            kind, offset = struct.unpack_from("<IQ", self._mapping, position)
            position += 12
            entries.append((name, shape[::-1], kind, offset))
        alignment = self.value("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._corrupt(f"general.alignment is {shown(alignment)}")
        data_start = -(-position // alignment) * alignment
        for name, shape, kind, offset in entries:
            if name in self.tensors:
                raise self._corrupt(f"tensor {shown(name)} is there twice")
            self.tensors[name] = self._place(name, shape, kind, data_start + offset)

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError as error:
            raise StartupError(
                f"{self.path}: tensor {shown(name)} has the unknown type {kind}: convert the model to Q8_0 or F16",
                param="model",
            ) from error
        block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
        num_elements = 1
        for size in shape:
            num_elements *= size
        if shape[-1] % block_elements:
            raise self._corrupt(f"tensor {shown(name)} has rows of {shape[-1]}, no multiple of {block_elements}")
        size_bytes = num_elements // block_elements * block_bytes
        if offset + size_bytes > len(self._mapping):
            raise StartupError(
                f"{self.path} is truncated: tensor {shown(name)} ends at byte {offset + size_bytes}, "
                f"the file has {len(self._mapping)}: download it again",
                param="model",
            )
        return GgufTensor(name, shape, quantization.name, offset, size_bytes)

    def _string(self, position: int) -> tuple[str, int]:
        (length,) = _COUNT.unpack_from(self._mapping, position)
        start, end = position + 8, position + 8 + length
        if end > len(self._mapping):
            raise self._corrupt("a string runs past the end of the file")
        return self._mapping[start:end].decode("utf-8"), end

    def _skip(self, kind: int, position: int, depth: int = 0) -> int:
        """Where the value ends."""
        if kind in _SCALARS:
            end = position + _SCALARS[kind].size
        elif kind == _STRING:
            end = position + 8 + _COUNT.unpack_from(self._mapping, position)[0]
        elif kind == _ARRAY and depth < MAX_ARRAY_DEPTH:
            item_kind, count = struct.unpack_from("<IQ", self._mapping, position)
            end = position + 12
            if item_kind in _SCALARS:
                end += count * _SCALARS[item_kind].size
            elif item_kind == _STRING:
                unpack_from, mapping = _COUNT.unpack_from, self._mapping
                for _ in range(count):
                    end += 8 + unpack_from(mapping, end)[0]
            else:
                for _ in range(count):
                    end = self._skip(item_kind, end, depth + 1)
        else:
            raise self._corrupt(f"a metadata value has the unknown type {kind}")
        if end > len(self._mapping):
            raise self._corrupt("a metadata value runs past the end of the file")
        return end

    def _decode(self, kind: int, position: int) -> tuple[Any, int]:
        """The value and where it ends. Lengths were checked by `_skip` when the file was opened."""
        if kind in _SCALARS:
            return _SCALARS[kind].unpack_from(self._mapping, position)[0], position + _SCALARS[kind].size
        if kind == _STRING:
            return self._string(position)
        item_kind, count = struct.unpack_from("<IQ", self._mapping, position)
        position += 12
        if item_kind in _SCALARS:
            size = _SCALARS[item_kind].size
            data = self._mapping[position : position + count * size]
            return [item for (item,) in _SCALARS[item_kind].iter_unpack(data)], position + count * size
        items = []
        for _ in range(count):
            item, position = self._decode(item_kind, position)
            items.append(item)
        return items, position

    def _corrupt(self, what: str) -> StartupError:
        return StartupError(f"{self.path} is corrupt: {what}: download it again", param="model")
