"""The shape of a Llama-family decoder, whatever file it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary positions are stretched: Llama 3's way (`rope_type: llama3`), YaRN, or plainly linear."""

    kind: str  # "llama3" | "yarn" | "linear"
    factor: float
    low_freq_factor: float = 1.0  # llama3, in turns within the original context; yarn calls it beta_slow
    high_freq_factor: float = 4.0  # yarn: beta_fast
    original_context: int = 8192
    attention_factor: float = 1.0  # yarn: queries and keys are each that much longer
    is_truncated: bool = True  # yarn: the passage begins and ends at whole pairs

    def longest_sequence(self, max_positions: int) -> int:
        """Tokens that the model can take; YaRN's files may state the original context alone."""
        return max(max_positions, int(self.original_context * self.factor)) if self.kind == "yarn" else max_positions


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """The square root of YaRN's 1 / t (arXiv 2309.00071, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """MLPs of which each token takes a few."""

    num_experts: int
    experts_per_token: int
    expert_size: int  # an expert's intermediate size
    normalizes_weights: bool  # the weights of a token's experts sum to 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Architecture, sizes and special tokens."""

    architecture: str  # "llama" | "qwen2" | "qwen3" | "mixtral" | "qwen3_moe"
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_model_len: int
    tie_embeddings: bool
    attention_bias: bool = False  # Qwen2: biases on q, k, v
    qk_norm: bool = False  # Qwen3: RMSNorm on each head of q and k before rope
    sliding_window: int = 0  # 0 is off (Mistral 7B v0.1: 4096)
    rope_scaling: RopeScaling | None = None
    mixture: MixtureOfExperts | None = None  # what every layer's MLP is; None: one dense one
    eos_token_ids: tuple[int, ...] = field(default=())
    bos_token_id: int | None = None
    # BLAKE2b of config and weights' identity: equal fingerprints may share KV.
    fingerprint: str = ""

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of KV that one token takes over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * element_bytes
