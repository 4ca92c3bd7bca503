"""Hands a model's weights to the native library: which tensor goes where, and in which format it is kept.

    quantization  matrices are kept as
    none          the compute dtype: float32 or bfloat16; the latter in 12 bits without loss where `compression` is
                  `auto` and the instruction set decodes that on the way (BF16_COMPRESSED)
    int8          Q8_0: bytes, one scale for each 32 inputs
    int4          Q4_1: 4 bits, scale and minimum for each 32 inputs; embedding and output head in Q8_0
    file          the file's own Q4_0, Q4_1 or Q8_0 blocks, value for value; other types in the compute dtype

Blocks of a file that are kept in the compute dtype are dequantised by the library, panel by panel: as float32 tensors
they would take several times the memory of the matrix, and the time that the system needs to give it.

Names are those of Hugging Face checkpoints. Reading files is the source's business.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from cluster.errors import StartupError
from engine import native_library
from engine.model_config import ModelConfig
from engine.native_library import NumberFormat, TensorKind
from engine.weights.weight_source import RawBlocks, WeightSource

Quantization = Literal["none", "int8", "int4", "file"]
WeightCompression = Literal["auto", "off"]

BLOCK_INPUTS = 32
_BLOCK_BYTES = {NumberFormat.Q4_0: 18, NumberFormat.Q4_1: 20, NumberFormat.Q8_0: 34}
_KEPT_FLOATS = (NumberFormat.F32, NumberFormat.BF16, NumberFormat.BF16_COMPRESSED)
_FLOAT_FORMATS = {
    torch.float32: NumberFormat.F32,
    torch.bfloat16: NumberFormat.BF16,
    torch.float16: NumberFormat.F16,
}
# Tensors of one group become one matrix of the library, so they are kept in one format.
_LAYER_MATRICES: tuple[tuple[tuple[TensorKind, str], ...], ...] = (
    (
        (TensorKind.QUERY, "self_attn.q_proj"),
        (TensorKind.KEY, "self_attn.k_proj"),
        (TensorKind.VALUE, "self_attn.v_proj"),
    ),
    ((TensorKind.ATTENTION_OUTPUT, "self_attn.o_proj"),),
    ((TensorKind.GATE, "mlp.gate_proj"), (TensorKind.UP, "mlp.up_proj")),
    ((TensorKind.DOWN, "mlp.down_proj"),),
)


class WeightLoader:
    """Packs one model's tensors. `formats` counts the matrices kept in each format."""

    def __init__(
        self,
        library: ctypes.CDLL,
        model: ctypes.c_void_p,
        weights: WeightSource,
        dtype: str,
        quantization: Quantization,
        compression: WeightCompression,
    ) -> None:
        self.formats: Counter[str] = Counter()
        self._library = library
        self._model = model
        self._weights = weights
        self._quantization = quantization
        computed = NumberFormat.F32 if dtype == "float32" else self._bfloat16_format(compression)
        self._head_format = NumberFormat.Q8_0 if quantization in ("int8", "int4") else computed
        self._layer_format = NumberFormat.Q4_1 if quantization == "int4" else self._head_format

    def load(self, config: ModelConfig) -> None:
        """Raises `StartupError` for a tensor that the library does not take."""
        self._load_matrix(0, [(TensorKind.EMBEDDING, "model.embed_tokens.weight")], self._head_format)
        if not config.tie_embeddings:
            self._load_matrix(0, [(TensorKind.OUTPUT, "lm_head.weight")], self._head_format)
        self._load_vector(TensorKind.FINAL_NORM, 0, "model.norm.weight")
        for layer in range(config.num_layers):
            self._load_layer(config, layer)

    def _bfloat16_format(self, compression: WeightCompression) -> NumberFormat:
        compresses = self._library.tandem_model_takes(self._model, NumberFormat.BF16_COMPRESSED)
        return NumberFormat.BF16_COMPRESSED if compression == "auto" and compresses else NumberFormat.BF16

    def _load_layer(self, config: ModelConfig, layer: int) -> None:
        prefix = f"model.layers.{layer}."
        for group in _LAYER_MATRICES:
            self._load_matrix(layer, [(kind, f"{prefix}{name}.weight") for kind, name in group], self._layer_format)
        self._load_vector(TensorKind.ATTENTION_NORM, layer, f"{prefix}input_layernorm.weight")
        self._load_vector(TensorKind.MLP_NORM, layer, f"{prefix}post_attention_layernorm.weight")
        if config.attention_bias:
            self._load_vector(TensorKind.QUERY_BIAS, layer, f"{prefix}self_attn.q_proj.bias")
            self._load_vector(TensorKind.KEY_BIAS, layer, f"{prefix}self_attn.k_proj.bias")
            self._load_vector(TensorKind.VALUE_BIAS, layer, f"{prefix}self_attn.v_proj.bias")
        if config.qk_norm:
            self._load_vector(TensorKind.QUERY_NORM, layer, f"{prefix}self_attn.q_norm.weight")
            self._load_vector(TensorKind.KEY_NORM, layer, f"{prefix}self_attn.k_norm.weight")

    def _load_matrix(self, layer: int, parts: list[tuple[TensorKind, str]], kept: NumberFormat) -> None:
        """Loads the tensors that make one matrix of the library: as blocks of the file where all are of one type."""
        keeps_blocks = self._quantization == "file"
        reads_blocks = keeps_blocks or (self._weights.blocks_are_exact and kept in _KEPT_FLOATS)
        blocks = [self._weights.raw_blocks(name) if reads_blocks else None for _, name in parts]
        sources = [_block_format(block) for block in blocks]
        if keeps_blocks:
            kept = sources[0] if sources[0] is not None and len(set(sources)) == 1 else kept
            reads_blocks = kept in _BLOCK_BYTES or self._weights.blocks_are_exact
        self.formats[kept.name] += 1
        for (kind, name), block, source in zip(parts, blocks, sources, strict=True):
            if block is None or source is None or not reads_blocks:
                self._load_tensor(kind, layer, name, kept)
            else:
                columns = block.data.shape[1] // _BLOCK_BYTES[source] * BLOCK_INPUTS
                self._load(kind, layer, name, block.data, columns, source, kept)

    def _load_vector(self, kind: TensorKind, layer: int, name: str) -> None:
        self._load_tensor(kind, layer, name, NumberFormat.F32)

    def _load_tensor(self, kind: TensorKind, layer: int, name: str, kept: NumberFormat) -> None:
        tensor = self._weights.tensor(name).detach()
        source = _FLOAT_FORMATS.get(tensor.dtype)
        if source is None:
            raise StartupError(f"{name}: the native backend reads float tensors, not {tensor.dtype}")
        # NumPy has no bfloat16: the bytes go over as they are.
        raw = tensor.contiguous().view(torch.uint8).numpy()
        columns = tensor.shape[-1]
        self._load(kind, layer, name, raw.reshape(-1, columns * tensor.itemsize), columns, source, kept)

    def _load(
        self,
        kind: TensorKind,
        layer: int,
        name: str,
        data: npt.NDArray[np.uint8],
        columns: int,
        source: NumberFormat,
        kept: NumberFormat,
    ) -> None:
        data = np.ascontiguousarray(data)
        code = self._library.tandem_model_load(
            self._model, kind, layer, data.shape[0], columns, source, kept, data.ctypes.data
        )
        if code != 0:
            raise StartupError(f"native backend, {name}: {native_library.last_error()}")


def _block_format(blocks: RawBlocks | None) -> NumberFormat | None:
    """The blocks' format, if the library reads it."""
    found = None if blocks is None else NumberFormat.__members__.get(blocks.kind)
    return found if found in _BLOCK_BYTES else None
