"""Weights of a directory with `config.json` and one or many `*.safetensors` files. Tensors are mapped, not read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cluster.errors import StartupError, shown
from engine.model_config import ModelConfig
from engine.weights.expected_shapes import check_shapes
from engine.weights.fingerprint import fingerprint
from engine.weights.hugging_face_config import read_config
from engine.weights.weight_source import RawBlocks

INDEX_FILE = "model.safetensors.index.json"
_SUPPORTED_TYPES = frozenset({"F32", "BF16", "F16"})
# Tables that old checkpoints carry; they follow from the config.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"


class SafetensorsWeights:
    """An open checkpoint directory; keeps `engine.weights.weight_source.WeightSource`'s promise."""

    def __init__(self, directory: Path) -> None:
        """Raises `StartupError` for a directory that is incomplete, corrupt or of another architecture."""
        config = read_config(directory)
        self._files = {path: _open(path) for path in _weight_files(directory)}
        self._file_of = {
            name: file
            for file in self._files.values()
            for name in file.offset_keys()
            if not name.endswith(_DERIVED_SUFFIX)
        }
        if "lm_head.weight" in self._file_of and config.tie_embeddings:
            del self._file_of["lm_head.weight"]  # a copy of the embedding, which some exporters write
        slices = {name: file.get_slice(name) for name, file in self._file_of.items()}
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        check_shapes(str(directory), config, shapes)
        kinds = {name: str(part.get_dtype()) for name, part in slices.items()}
        for name, kind in kinds.items():
            if kind not in _SUPPORTED_TYPES:
                raise StartupError(
                    f"{directory}: tensor {name} is {shown(kind)}, which is not supported: use F32, BF16 or F16",
                    param="model",
                )
        described = [(name, shapes[name], kinds[name]) for name in kinds]
        self.config: ModelConfig = dataclasses.replace(config, fingerprint=fingerprint(config, described, self._row))

    def names(self) -> Sequence[str]:
        return sorted(self._file_of)

    def tensor(self, name: str) -> torch.Tensor:
        weight: torch.Tensor = self._file_of[name].get_tensor(name)
        return weight.float() if weight.dtype == torch.float16 else weight

    def raw_blocks(self, name: str) -> RawBlocks | None:
        return None

    def close(self) -> None:
        """Drops the mappings; tensors that somebody still holds keep theirs."""
        self._file_of.clear()
        self._files.clear()

    def _row(self, name: str, index: int) -> bytes:
        part = self._file_of[name].get_slice(name)
        row: torch.Tensor = part[index : index + 1] if len(part.get_shape()) > 1 else part[:]
        return bytes(row.contiguous().view(torch.uint8).numpy().tobytes())


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
