"""The shape of a Llama-family decoder, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency-dependent scaling (`rope_type: llama3`) or plain linear scaling."""

    kind: str  # "llama3" | "linear"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Architecture, sizes and special tokens."""

    architecture: str  # "llama" | "qwen2" | "qwen3"
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
    eos_token_ids: tuple[int, ...] = field(default=())
    bos_token_id: int | None = None
    # BLAKE2b of config and weights' identity: equal fingerprints may share KV.
    fingerprint: str = ""

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of KV that one token takes over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * element_bytes
