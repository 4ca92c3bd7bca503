"""Weights of a directory with `config.json` and one or many `*.safetensors` files. Tensors are mapped, not read.

A quantised matrix is stored as several tensors; to a reader it is one tensor under the name of the plain weight.
Layers for multi-token prediction are no part of the model: they have shapes and tensors here, for the drafter alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cluster.errors import StartupError, shown
from engine.model_config import ModelConfig
from engine.weights.expected_shapes import check_shapes
from engine.weights.fingerprint import fingerprint
from engine.weights.hugging_face_config import read_config, read_num_mtp_layers, read_stated_quantization
from engine.weights.mixtral_names import plain_name
from engine.weights.mtp_names import is_mtp
from engine.weights.quantization_config import CheckpointQuantization
from engine.weights.quantized_layouts import IGNORED_PARTS, LAYOUTS, Layout
from engine.weights.quantized_matrix import QuantizedMatrix
from engine.weights.weight_source import RawBlocks

INDEX_FILE = "model.safetensors.index.json"
_SUPPORTED_TYPES = frozenset({"F32", "BF16", "F16"})
# Tables that old checkpoints carry; they follow from the config.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of an open file."""

    file: Any
    name: str

    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self.file.get_tensor(self.name)
        return tensor

    def slice(self) -> Any:
        """Its shape and type, and any part of it, without reading the rest."""
        return self.file.get_slice(self.name)


class SafetensorsWeights:
    """An open checkpoint directory; keeps `engine.weights.weight_source.WeightFile`'s promise."""

    blocks_are_exact = False  # a zero point may be rounded

    def __init__(self, directory: Path) -> None:
        """Raises `StartupError` for a directory that is incomplete, corrupt or of another architecture."""
        config = read_config(directory)
        self._quantization = read_stated_quantization(directory)
        self._files = {path: _open(path) for path in _weight_files(directory)}
        self._stored = {
            plain_name(name): StoredTensor(file, name)
            for file in self._files.values()
            for name in file.offset_keys()
            if not name.endswith(_DERIVED_SUFFIX)
        }
        if "lm_head.weight" in self._stored and config.tie_embeddings:
            del self._stored["lm_head.weight"]  # a copy of the embedding, which some exporters write
        self._layouts = {} if self._quantization is None else self._find_matrices(self._quantization)
        slices = {name: stored.slice() for name, stored in self._stored.items()}
        parts_of_matrices = self._stored_parts()
        plain = [name for name in slices if name not in parts_of_matrices]
        shapes = {name: tuple(slices[name].get_shape()) for name in plain}
        kinds = {name: str(slices[name].get_dtype()) for name in plain}
        for name, (layout, parts) in self._layouts.items():
            shapes[name] = self._matrix_shape(name, layout, parts)
            kinds[name] = " ".join(f"{part}:{slices[stored].get_dtype()}" for part, stored in sorted(parts.items()))
        num_mtp_layers = read_num_mtp_layers(directory)
        self.mtp_shapes = {
            name: shape for name, shape in shapes.items() if is_mtp(name, config.num_layers, num_mtp_layers)
        }
        shapes = {name: shape for name, shape in shapes.items() if name not in self.mtp_shapes}
        check_shapes(str(directory), config, shapes)
        for name in plain:
            if (kind := kinds[name]) not in _SUPPORTED_TYPES:
                raise StartupError(
                    f"{directory}: tensor {name} is {shown(kind)}, which is not supported: use F32, BF16 or F16",
                    param="model",
                )
        described = [(name, shape, kinds[name]) for name, shape in shapes.items()]
        self.config: ModelConfig = dataclasses.replace(config, fingerprint=fingerprint(config, described, self._row))

    def names(self) -> Sequence[str]:
        stored = self._stored_parts()
        return sorted({*self._layouts, *(name for name in self._stored if name not in stored)} - self.mtp_shapes.keys())

    def tensor(self, name: str) -> torch.Tensor:
        matrix = self._quantized(name)
        if matrix is not None:
            return matrix.dequantized()
        weight: torch.Tensor = self._stored[name].tensor()
        return weight.float() if weight.dtype == torch.float16 else weight

    def part(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        matrix = self._quantized(name)
        if matrix is not None:
            return matrix.dequantized()[rows, columns]
        stored = self._stored[name].slice()
        weight: torch.Tensor = stored[rows] if len(stored.get_shape()) == 1 else stored[rows, columns]
        return weight.float() if weight.dtype == torch.float16 else weight

    def raw_blocks(self, name: str) -> RawBlocks | None:
        matrix = self._quantized(name)
        return None if matrix is None else matrix.blocks()

    def close(self) -> None:
        """Drops the mappings; tensors that somebody still holds keep theirs."""
        self._stored.clear()
        self._layouts.clear()
        self._files.clear()

    def _quantized(self, name: str) -> QuantizedMatrix | None:
        if self._quantization is None or name not in self._layouts:
            return None
        layout, parts = self._layouts[name]
        try:
            return layout.read(name, _Parts(self._stored, parts), self._quantization)
        except (RuntimeError, IndexError, ValueError) as error:  # torch's, of shapes that contradict each other
            raise StartupError(f"{name}: its stored parts do not fit together ({error})", param="model") from error

    def _matrix_shape(self, name: str, layout: Layout, parts: Mapping[str, str]) -> tuple[int, ...]:
        try:
            return layout.shape(_Parts(self._stored, parts))
        except (IndexError, ZeroDivisionError) as error:
            raise StartupError(f"{name}: its stored parts do not fit together ({error})", param="model") from error

    def _find_matrices(self, quantization: CheckpointQuantization) -> dict[str, tuple[Layout, dict[str, str]]]:
        """Name of the plain weight -> how it is stored, and the stored tensors by part. Takes unread scales out."""
        modules: dict[str, dict[str, str]] = {}
        for name in list(self._stored):
            module, _, part = name.rpartition(".")
            if part in IGNORED_PARTS:
                del self._stored[name]
            else:
                modules.setdefault(module, {})[part] = name
        found: dict[str, tuple[Layout, dict[str, str]]] = {}
        for module, parts in modules.items():
            for layout in LAYOUTS[quantization.method]:
                if layout.required <= parts.keys():
                    used = layout.required | layout.optional
                    found[f"{module}.weight"] = (layout, {part: parts[part] for part in used if part in parts})
                    if "bias" in parts and not bool(self._stored[parts["bias"]].tensor().any()):
                        del self._stored[parts["bias"]]  # zeros, which some exporters write for every module
        return found

    def _stored_parts(self) -> frozenset[str]:
        return frozenset(stored for _, parts in self._layouts.values() for stored in parts.values())

    def _row(self, name: str, index: int) -> bytes:
        if name in self._layouts:  # one row of each stored tensor, which has another number of them
            return b"".join(self._stored_row(stored, index) for _, stored in sorted(self._layouts[name][1].items()))
        return self._stored_row(name, index)

    def _stored_row(self, name: str, index: int) -> bytes:
        part = self._stored[name].slice()
        shape = part.get_shape()
        if not shape:
            row: torch.Tensor = self._stored[name].tensor().reshape(1)
        elif len(shape) > 1:
            row = part[index % shape[0] : index % shape[0] + 1]
        else:
            row = part[:]
        return bytes(row.contiguous().view(torch.uint8).numpy().tobytes())


class _Parts(Mapping[str, torch.Tensor]):
    """The stored tensors of one matrix, each read when it is asked for."""

    def __init__(self, stored: Mapping[str, StoredTensor], name_of_part: Mapping[str, str]) -> None:
        self._stored = stored
        self._name_of_part = name_of_part

    def __getitem__(self, part: str) -> torch.Tensor:
        return self._stored[self._name_of_part[part]].tensor()

    def __iter__(self) -> Iterator[str]:
        return iter(self._name_of_part)

    def __len__(self) -> int:
        return len(self._name_of_part)


def _weight_files(directory: Path) -> list[Path]:
    """The files the index lists, or every *.safetensors file where there is no index."""
    index = directory / INDEX_FILE
    if not index.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise StartupError(
                f"{directory} holds no *.safetensors file: only safetensors and GGUF are read, pickled weights never",
                param="model",
            )
        return files
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        names = sorted({str(name) for name in listed})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{index} is not a valid index ({error}): download it again", param="model") from error
    for name in names:
        # The index comes with the download: it must not lead out of its directory.
        if Path(name).name != name:
            raise StartupError(f"{index} names {shown(name)}, which is no plain file name", param="model")
    return [directory / name for name in names]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise StartupError(f"{path} is missing: download the checkpoint again", param="model") from error
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{path} is corrupt or truncated ({error}): download it again", param="model") from error
