"""What a checkpoint gives, whatever file it came from: its config and its tensors under Hugging Face's names.

path ── engine.model_loader.open_weights ──> WeightFile
                                              ├── GgufWeights         one .gguf file
                                              └── SafetensorsWeights  a directory with config.json
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class RawBlocks:
    """A quantised matrix as its file has it: `data` [rows, bytes of a row]; `kind` is GGML's name, such as Q4_1."""

    kind: str
    data: npt.NDArray[np.uint8]


class WeightSource(Protocol):
    """An open checkpoint. Rows of q and k are in Hugging Face's order (rope pairs element i with i + head_dim / 2).

    Implementations: `engine.weights.gguf_weights`, `engine.weights.safetensors_weights`.
    """

    config: ModelConfig
    blocks_are_exact: bool  # whether `raw_blocks`, dequantised in float32, are `tensor` bit for bit

    def names(self) -> Sequence[str]:
        """Every tensor of the model, sorted; exactly those that `expected_shapes` asks for."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """The weight in float32, or in bfloat16 where the file has that. The caller owns it."""
        ...

    def raw_blocks(self, name: str) -> RawBlocks | None:
        """The file's own quantised blocks; None where the tensor is not quantised."""
        ...

    def close(self) -> None: ...


class WeightFile(WeightSource, Protocol):
    """A checkpoint on disk."""

    def part(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        """Some rows and columns of `tensor`, a vector's elements as rows; the rest is not converted."""
        ...
