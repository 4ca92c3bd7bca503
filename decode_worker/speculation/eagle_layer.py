"""The EAGLE drafter's one layer over a small paged KV pool of its own: rows in, a guess and its state out.

    taps of a row, embedding of the token it chose ─ fuse_first ─┐
    own state, embedding of the guess behind it ──── fuse_next ──┴─> one-layer decoder ─> logits, state

The layer is a model of one layer to the engine's runners (native in 8 bits, else torch in float32); the reduced output
head stands where its embedding would. `drafter_training.eagle_model` is the same in torch. It knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from decode_worker.speculation.drafter_file import DrafterFile
from decode_worker.speculation.small_products import BFloat16Rows, FloatArray, fits_blocks, make_product, unit_rms
from engine import native_library
from engine.kv_memory import KvMemory, layout_of
from engine.model_config import ModelConfig
from engine.step import ModelRunner, StepInput
from engine.torch_runner import TorchRunner
from engine.weights.weight_source import RawBlocks

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive new tokens of one context: where they lie in the pool, behind `num_cached` tokens of its blocks."""

    blocks: npt.NDArray[np.int32]
    num_cached: int
    first_position: int


class EagleLayer:
    """Owns weights and pool. Called from the engine thread."""

    def __init__(
        self, file: DrafterFile, target: ModelConfig, embedding: torch.Tensor, head: torch.Tensor, num_blocks: int
    ) -> None:
        """`embedding` and `head` [vocab, hidden] are the target's."""
        self.tap_layers = file.tap_layers
        self.vocabulary: list[int] = file.vocabulary.tolist()
        self._eps = target.rms_norm_eps
        self._embedding = BFloat16Rows(embedding)
        self._fuse_first = make_product(file.tensors["fuse_first.weight"])
        self._fuse_next = make_product(file.tensors["fuse_next.weight"])
        config = replace(
            target,
            name=f"{target.name}.eagle",
            num_layers=1,
            vocab_size=len(self.vocabulary),
            tie_embeddings=True,
            attention_bias=False,
            qk_norm=False,
            sliding_window=0,
        )
        self._runner, self._memory = _open_runner(config, _LayerWeights(config, file, head), num_blocks)

    def first_guess(self, rows: Rows, taps: FloatArray, next_ids: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        """Reads rows of the target; gives the logits [draft vocab] behind the last one and the state [hidden]."""
        states = unit_rms(taps, self._eps).reshape(len(next_ids), -1)
        return self._forward(rows, self._fuse_first(np.concatenate((states, self._embedded(next_ids)), axis=1)))

    def next_guess(self, rows: Rows, state: FloatArray, guess: int) -> tuple[FloatArray, FloatArray]:
        """One row: goes on behind the drafter's own guess (a token of the target)."""
        own = unit_rms(state[None], self._eps)
        return self._forward(rows, self._fuse_next(np.concatenate((own, self._embedded((guess,))), axis=1)))

    def close(self) -> None:
        if not isinstance(self._runner, TorchRunner):
            self._runner.close()  # type: ignore[attr-defined]
        self._memory.close()

    def _embedded(self, token_ids: Sequence[int]) -> FloatArray:
        return unit_rms(self._embedding.rows(token_ids), self._eps)

    def _forward(self, rows: Rows, inputs: FloatArray) -> tuple[FloatArray, FloatArray]:
        count = len(inputs)
        places = np.arange(rows.num_cached, rows.num_cached + count)
        slots = rows.blocks[places // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + places % BLOCK_TOKENS
        output = self._runner.forward(
            StepInput(
                token_ids=np.zeros(count, np.int32),
                positions=np.arange(rows.first_position, rows.first_position + count, dtype=np.int32),
                slots=slots,
                query_starts=np.array([0, count], np.int32),
                context_lens=np.array([rows.num_cached + count], np.int32),
                block_tables=rows.blocks[None],
                logit_rows=np.array([count - 1], np.int32),
                tap_layers=(0,),
                inputs=np.ascontiguousarray(inputs),
            ),
            None,
        )
        if output.taps is None:
            raise ValueError("the runner gave no hidden states")
        return output.logits[0].numpy(), output.taps[0, 0].numpy().copy()


class _LayerWeights:
    """The layer as a checkpoint of one layer; a `WeightSource`."""

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


def _open_runner(config: ModelConfig, weights: _LayerWeights, num_blocks: int) -> tuple[ModelRunner, KvMemory]:
    memory = KvMemory(layout_of(config, "float32", BLOCK_TOKENS), num_blocks)
    if not native_library.is_available():
        return TorchRunner(weights, memory), memory
    # Not at the top: where the library was not built, this file must still import.
    from engine.native_runner import NativeRunner

    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    quantization: Literal["int8", "none"] = "int8" if all(map(fits_blocks, widths)) else "none"
    return NativeRunner(config, weights, memory, dtype="float32", quantization=quantization), memory
