"""Weights of a GGUF file under Hugging Face's names.

GGUF stores the rows of q and k of its `llama` architecture for interleaved rope (element 2i turns with 2i + 1); here
they are put back into Hugging Face's halves, also for the quantised blocks: a row's blocks move with the row.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from cluster.errors import StartupError
from cluster.gguf_file import GgufFile
from engine.model_config import ModelConfig
from engine.weights.expected_shapes import check_shapes
from engine.weights.fingerprint import fingerprint
from engine.weights.gguf_config import PERMUTED_ARCHITECTURE, ROPE_FACTORS, config_of
from engine.weights.weight_source import RawBlocks

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Read and tested; the package decodes more, but a file in any other type says so instead of being trusted.
_QUANTIZED = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"})


class GgufWeights:
    """An open GGUF checkpoint; keeps `engine.weights.weight_source.WeightFile`'s promise."""

    blocks_are_exact = True

    def __init__(self, path: Path) -> None:
        """Raises `StartupError` for a file that cannot be read or that holds another architecture."""
        self._file = GgufFile(path)
        try:
            self._stored_names = {_hugging_face_name(name): name for name in self._file.tensors if name != ROPE_FACTORS}
            self._check_types()
            config = config_of(self._file)
            shapes = {name: self._file.tensors[stored].shape for name, stored in self._stored_names.items()}
            check_shapes(str(path), config, shapes)
        except StartupError:
            self._file.close()
            raise
        self._is_permuted = self._file.value("general.architecture") == PERMUTED_ARCHITECTURE
        kinds = [(name, shapes[name], self._file.tensors[stored].kind) for name, stored in self._stored_names.items()]
        self.config: ModelConfig = dataclasses.replace(config, fingerprint=fingerprint(config, kinds, self._row))

    def names(self) -> Sequence[str]:
        return sorted(self._stored_names)

    def tensor(self, name: str) -> torch.Tensor:
        return self._converted(name, self._ordered_rows(name)).view(self._file.tensors[self._stored_names[name]].shape)

    def part(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        stored = self._file.tensors[self._stored_names[name]]
        if len(stored.shape) == 1:
            return self.tensor(name)[rows]
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[stored.kind]]
        first, last, _ = columns.indices(stored.shape[1])
        # Columns are read from the block that holds the first one to that of the last.
        first_block, last_block = first // block, -(-last // block)
        content = self._ordered_rows(name)[rows, first_block * block_bytes : last_block * block_bytes]
        return self._converted(name, content)[:, first - first_block * block : last - first_block * block]

    def raw_blocks(self, name: str) -> RawBlocks | None:
        stored = self._file.tensors[self._stored_names[name]]
        if stored.kind in _FLOATS:
            return None
        return RawBlocks(stored.kind, self._ordered_rows(name))

    def close(self) -> None:
        self._file.close()

    def _converted(self, name: str, content: npt.NDArray[np.uint8]) -> torch.Tensor:
        """The values of whole blocks `[rows, bytes]`."""
        kind = self._file.tensors[self._stored_names[name]].kind
        if kind in _FLOATS:
            weight = torch.from_numpy(content.copy()).view(_FLOATS[kind])
            return weight.float() if kind == "F16" else weight
        values = quants.dequantize(content, GGMLQuantizationType[kind])
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))

    def _ordered_rows(self, name: str) -> npt.NDArray[np.uint8]:
        rows = self._file.rows(self._stored_names[name])
        if not self._is_permuted:
            return rows
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = self.config.num_heads if "q_proj" in name else self.config.num_kv_heads
            return rows[_half_split_rows(heads, self.config.head_dim)]
        return rows

    def _row(self, name: str, index: int) -> bytes:
        return bytes(self._file.rows(self._stored_names[name])[index].tobytes())

    def _check_types(self) -> None:
        for tensor in self._file.tensors.values():
            if tensor.kind not in _FLOATS and tensor.kind not in _QUANTIZED:
                raise StartupError(
                    f"{self._file.path}: tensor {tensor.name} is {tensor.kind}, which is not supported: use a file in "
                    "F16, BF16, Q8_0, Q4_0, Q4_1 or Q4_K_M",
                    param="model",
                )


def _hugging_face_name(stored: str) -> str:
    """Hugging Face's name for a GGUF tensor; a name without one stays, and `check_shapes` refuses it."""
    if stored in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[stored]
    match = _LAYER_NAME.fullmatch(stored)
    if match is None or match[2] not in _LAYER_MODULES:
        return stored
    return f"model.layers.{match[1]}.{_LAYER_MODULES[match[2]]}.{match[3]}"


def _half_split_rows(num_heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """For each row in halves order, its row in the interleaved file."""
    rows = np.arange(num_heads * head_dim, dtype=np.intp)
    return rows.reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
