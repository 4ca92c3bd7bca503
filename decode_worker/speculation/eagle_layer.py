"""A drafter's one layer over a small paged KV pool of its own: rows of the target in, laws of guesses out.

    taps of a row, embedding of the token it chose ─ fuse_first ─┐
    own state, embedding of the guess behind it ──── fuse_next ──┴─> one-layer decoder ─> logits, state

The layer is a model of one layer to the engine's runners; the output head stands where its embedding would. What is
fused is an EAGLE file's (`open_eagle_layer`) or a checkpoint's own (`mtp_layer`).
Implementations: `native_eagle_layer` (4 bits, one call for all guesses of all requests), `torch_eagle_layer` (float32,
where the native library was not built, and for layers that it does not compute). `drafter_training.eagle_model` is
EAGLE's in training. It knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from decode_worker.speculation.confident_tree import Law
from decode_worker.speculation.drafter_file import DrafterFile
from decode_worker.speculation.drafter_shapes import check_drafter
from decode_worker.speculation.small_products import FloatArray
from engine import native_library
from engine.kv_memory import KvMemory, layout_of
from engine.model_config import ModelConfig
from engine.weights.weight_source import RawBlocks, WeightSource

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Reading:
    """Rows of one context that the layer has not read, and how far to guess behind them.

    `blocks` of the context in order of position, the first `num_cached` tokens of them read; `first_position` of the
    new rows; `taps` [rows, tap layers, hidden]; `token_ids` [rows]: what each row chose.
    """

    blocks: npt.NDArray[np.int32]
    num_cached: int
    first_position: int
    taps: FloatArray
    token_ids: Sequence[int]
    num_guesses: int


@dataclass(frozen=True, slots=True, eq=False)
class Fusion:
    """What stands around the layer: how rows and guesses become its inputs, and which tokens its logits are of.

    All parts are fused over their root mean square. `first` [hidden, (taps + 1) * hidden], `following` [hidden,
    2 * hidden], the embedding's columns last. `tap_norm`, `state_norm` [hidden]: weights of a norm that taps and own
    states go through before. `vocabulary` [logits]: the target's ids. `embedding` [target vocab, hidden].
    """

    tap_layers: tuple[int, ...]
    vocabulary: torch.Tensor
    embedding: torch.Tensor
    first: torch.Tensor
    following: torch.Tensor
    tap_norm: torch.Tensor | None = None
    state_norm: torch.Tensor | None = None


class EagleLayer(Protocol):
    """Owns weights and pool. Called from the engine thread."""

    tap_layers: tuple[int, ...]

    def guess(self, readings: Sequence[Reading], min_reach: float) -> list[list[Law]]:
        """For each context the laws behind its last row, each behind the likeliest token of the law before it.

        Guessing goes on as long as that chain holds with at least `min_reach`. KV of guesses is overwritten by the
        rows that are read next.
        """
        ...

    def close(self) -> None: ...


def open_eagle_layer(
    file: DrafterFile, target: ModelConfig, embedding: torch.Tensor, head: torch.Tensor, num_blocks: int
) -> EagleLayer:
    """`embedding` and `head` [vocab, hidden] are the target's. Raises `StartupError` where the file does not fit."""
    check_drafter(file, target)
    config = replace(
        target,
        name=f"{target.name}.eagle",
        num_layers=1,
        vocab_size=len(file.vocabulary),
        tie_embeddings=True,
        attention_bias=False,
        qk_norm=False,
        sliding_window=0,
    )
    fuse_first, fuse_next = file.tensors["fuse_first.weight"], file.tensors["fuse_next.weight"]
    fusion = Fusion(file.tap_layers, file.vocabulary, embedding, fuse_first, fuse_next)
    return open_layer(fusion, LayerWeights(config, file, head), num_blocks)


def open_layer(fusion: Fusion, weights: WeightSource, num_blocks: int) -> EagleLayer:
    """`weights` of one layer, whose embedding is the head; they may be closed afterwards."""
    config = weights.config
    memory = KvMemory(layout_of(config, "float32", BLOCK_TOKENS), num_blocks)
    # Not at the top: where the library was not built, this file must still import.
    if native_library.is_available() and config.mixture is None:
        from decode_worker.speculation.native_eagle_layer import NativeEagleLayer

        return NativeEagleLayer(fusion, weights, memory)
    from decode_worker.speculation.torch_eagle_layer import TorchEagleLayer

    return TorchEagleLayer(fusion, weights, memory)


class LayerWeights:
    """An EAGLE file's layer as a checkpoint of one layer; a `WeightSource`."""

    blocks_are_exact = False

    def __init__(self, config: ModelConfig, file: DrafterFile, head: torch.Tensor) -> None:
        self.config = config
        heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        query, key, value = torch.split(file.tensors["qkv.weight"], [heads, kv, kv])
        gate, up = file.tensors["gate_up.weight"].chunk(2)
        prefix = "model.layers.0."
        self._tensors = {
            "model.embed_tokens.weight": head[file.vocabulary],
            "model.norm.weight": file.tensors["final_norm"],
            f"{prefix}input_layernorm.weight": file.tensors["attention_norm"],
            f"{prefix}self_attn.q_proj.weight": query,
            f"{prefix}self_attn.k_proj.weight": key,
            f"{prefix}self_attn.v_proj.weight": value,
            f"{prefix}self_attn.o_proj.weight": file.tensors["attention_output.weight"],
            f"{prefix}post_attention_layernorm.weight": file.tensors["mlp_norm"],
            f"{prefix}mlp.gate_proj.weight": gate,
            f"{prefix}mlp.up_proj.weight": up,
            f"{prefix}mlp.down_proj.weight": file.tensors["down.weight"],
        }

    def names(self) -> Sequence[str]:
        return sorted(self._tensors)

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors[name].float().contiguous()
        return tensor

    def raw_blocks(self, name: str) -> RawBlocks | None:
        return None

    def close(self) -> None: ...
