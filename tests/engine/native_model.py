"""Small random models and a plain torch forward pass: what the native engine is compared with.

The reference computes each sequence alone, whole, from its first token, in float64: no pages, no batch, no chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.kv_memory import KvMemory, layout_of
from engine.model_config import ModelConfig
from engine.models.rope import rope_frequencies
from engine.native.build import build
from engine.native_library import usable_isas
from engine.native_runner import NativeRunner
from engine.native_weights import WeightCompression
from engine.step import StepInput
from engine.weights.weight_source import RawBlocks

SMALL_LLAMA = ModelConfig(
    architecture="llama",
    name="small",
    vocab_size=211,
    hidden_size=72,
    intermediate_size=104,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    max_model_len=512,
    tie_embeddings=True,
)
SMALL_QWEN2 = replace(SMALL_LLAMA, architecture="qwen2", attention_bias=True, tie_embeddings=False, hidden_size=64)
SMALL_QWEN3 = replace(SMALL_LLAMA, architecture="qwen3", qk_norm=True, head_dim=64, num_heads=4, num_kv_heads=4)
WIDE_HEADS = replace(SMALL_LLAMA, head_dim=128, num_heads=2, num_kv_heads=1, hidden_size=160)
SMALL_WINDOW = replace(SMALL_LLAMA, sliding_window=40)
# More inputs than kernels keep of a panel at once, and gates for half a line of the next product's activations.
BROAD = replace(SMALL_LLAMA, hidden_size=640, intermediate_size=80)
MODELS = {
    "llama": SMALL_LLAMA,
    "qwen2-bias": SMALL_QWEN2,
    "qwen3-norm": SMALL_QWEN3,
    "wide-heads": WIDE_HEADS,
    "window": SMALL_WINDOW,
    "broad": BROAD,
}


def built_isas() -> tuple[str, ...]:
    """Every instruction set that this machine runs, of a library that is built from the sources as they are."""
    build()
    return usable_isas()


def compressing_isas() -> tuple[str, ...]:
    """Those that keep bfloat16 weights in 12 bits: all with bfloat16 products."""
    return tuple(isa for isa in built_isas() if isa.startswith(("avx512_", "amx")))


class RandomWeights:
    """Weights of a `ModelConfig`, drawn from one seed; a `WeightSource`."""

    blocks_are_exact = False

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

        def vector(size: int, around: float) -> torch.Tensor:
            return around + 0.2 * torch.randn(size, generator=generator)

        self.config = config
        self.tensors = {
            "model.embed_tokens.weight": torch.randn(config.vocab_size, hidden, generator=generator),
            "model.norm.weight": vector(hidden, 1.0),
        }
        if not config.tie_embeddings:
            self.tensors["lm_head.weight"] = matrix(config.vocab_size, hidden)
        for layer in range(config.num_layers):
            parts = {
                "input_layernorm.weight": vector(hidden, 1.0),
                "post_attention_layernorm.weight": vector(hidden, 1.0),
                "self_attn.q_proj.weight": 2 * matrix(heads, hidden),
                "self_attn.k_proj.weight": 2 * matrix(kv, hidden),
                "self_attn.v_proj.weight": matrix(kv, hidden),
                "self_attn.o_proj.weight": matrix(hidden, heads),
                "mlp.gate_proj.weight": matrix(inner, hidden),
                "mlp.up_proj.weight": matrix(inner, hidden),
                "mlp.down_proj.weight": matrix(hidden, inner),
            }
            if config.attention_bias:
                sizes = {"q_proj": heads, "k_proj": kv, "v_proj": kv}
                parts |= {f"self_attn.{name}.bias": vector(size, 0.0) for name, size in sizes.items()}
            if config.qk_norm:
                parts |= {f"self_attn.{name}.weight": vector(config.head_dim, 1.0) for name in ("q_norm", "k_norm")}
            self.tensors |= {f"model.layers.{layer}.{name}": value for name, value in parts.items()}

    def names(self) -> Sequence[str]:
        return sorted(self.tensors)

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def raw_blocks(self, name: str) -> RawBlocks | None:
        return None

    def close(self) -> None:
        pass


def reference_logits(config: ModelConfig, weights: RandomWeights, token_ids: Sequence[int]) -> torch.Tensor:
    """[num_tokens, vocab_size] float64: every position's logits of one sequence."""
    x = weights.tensor("model.embed_tokens.weight").double()[list(token_ids)]
    positions = torch.arange(len(token_ids), dtype=torch.float32)
    frequencies = torch.from_numpy(rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)).float()
    angles = (positions[:, None] * frequencies[None]).double()
    for layer in range(config.num_layers):
        w = {
            name.removeprefix(f"model.layers.{layer}."): value.double()
            for name, value in weights.tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x = x + _attention(config, w, _norm(x, w["input_layernorm.weight"], config.rms_norm_eps), angles)
        h = _norm(x, w["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = h @ w["mlp.gate_proj.weight"].T, h @ w["mlp.up_proj.weight"].T
        x = x + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return _norm(x, weights.tensor("model.norm.weight").double(), config.rms_norm_eps) @ weights.tensor(head).double().T


def _norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def _attention(config: ModelConfig, w: dict[str, torch.Tensor], h: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    num_tokens = h.shape[0]

    def project(name: str, heads: int) -> torch.Tensor:
        out = h @ w[f"self_attn.{name}_proj.weight"].T
        if config.attention_bias:
            out = out + w[f"self_attn.{name}_proj.bias"]
        return out.view(num_tokens, heads, config.head_dim)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    q, k, v = (
        project("q", config.num_heads),
        project("k", config.num_kv_heads),
        project("v", config.num_kv_heads),
    )
    if config.qk_norm:
        q = _norm(q, w["self_attn.q_norm.weight"], config.rms_norm_eps)
        k = _norm(k, w["self_attn.k_norm.weight"], config.rms_norm_eps)
    group = config.num_heads // config.num_kv_heads
    k, v = rotate(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", rotate(q), k) / config.head_dim**0.5
    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)[None]
    hidden = distance < 0
    if config.sliding_window:
        hidden |= distance >= config.sliding_window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(num_tokens, -1) @ w["self_attn.o_proj.weight"].T


@dataclass
class CachedSequence:
    """One sequence of a test: its tokens, how many are in the pool, its blocks."""

    token_ids: list[int]
    blocks: list[int]
    computed: int = 0


class Batch:
    """Builds steps for sequences over a pool whose blocks are handed out in a scattered order."""

    def __init__(self, num_blocks: int, block_tokens: int, seed: int = 0) -> None:
        self._free = [int(block) for block in np.random.default_rng(seed).permutation(num_blocks)]
        self._block_tokens = block_tokens

    def add(self, token_ids: Sequence[int]) -> CachedSequence:
        num_blocks = -(-len(token_ids) // self._block_tokens)
        return CachedSequence(list(token_ids), [self._free.pop() for _ in range(num_blocks)])

    def step(self, parts: Sequence[tuple[CachedSequence, int]], *, logits: str = "all") -> StepInput:
        """The next `count` tokens of each sequence; `logits` of `all` rows, the `last` of each sequence or `none`."""
        table_width = max([1, *(len(sequence.blocks) for sequence, _ in parts)])
        tables = np.zeros((len(parts), table_width), np.int32)
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        starts, contexts = [0], []
        for index, (sequence, count) in enumerate(parts):
            first, last = sequence.computed, sequence.computed + count
            tables[index, : len(sequence.blocks)] = sequence.blocks
            token_ids += sequence.token_ids[first:last]
            positions += range(first, last)
            slots += [
                sequence.blocks[i // self._block_tokens] * self._block_tokens + i % self._block_tokens
                for i in range(first, last)
            ]
            starts.append(starts[-1] + count)
            contexts.append(last)
            rows += range(starts[-2], starts[-1]) if logits == "all" else [starts[-1] - 1] if logits == "last" else []
            sequence.computed = last
        return StepInput(
            token_ids=np.array(token_ids, np.int32),
            positions=np.array(positions, np.int32),
            slots=np.array(slots, np.int64),
            query_starts=np.array(starts, np.int32),
            context_lens=np.array(contexts, np.int32),
            block_tables=tables,
            logit_rows=np.array(rows, np.int32),
        )


def poisoned_memory(config: ModelConfig, *, dtype: str, block_tokens: int, num_blocks: int) -> KvMemory:
    """A pool full of NaN: whoever reads a byte that the step did not write shows it."""
    memory = KvMemory(layout_of(config, dtype, block_tokens), num_blocks)
    for block in range(num_blocks):
        memory.poison(block)
    return memory


def small_runner(
    config: ModelConfig,
    weights: RandomWeights,
    *,
    dtype: str = "float32",
    kv_dtype: str = "",
    block_tokens: int = 16,
    num_blocks: int = 64,
    num_threads: int = 1,
    isa: str = "",
    compression: WeightCompression = "auto",
) -> NativeRunner:
    memory = poisoned_memory(config, dtype=kv_dtype or dtype, block_tokens=block_tokens, num_blocks=num_blocks)
    return NativeRunner(config, weights, memory, dtype=dtype, num_threads=num_threads, isa=isa, compression=compression)
