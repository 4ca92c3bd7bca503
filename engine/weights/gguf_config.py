"""A model's shape from GGUF metadata. What it does not understand it refuses: a guess would give fluent nonsense."""

from __future__ import annotations

from typing import Any

import numpy as np

from cluster.errors import StartupError, shown
from cluster.gguf_file import GgufFile
from engine.model_config import ModelConfig, RopeScaling, yarn_attention_factor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# The one whose q and k rows GGUF stores for interleaved rope; Mistral files carry this name too.
PERMUTED_ARCHITECTURE = "llama"
# Llama 3's scaling stands in GGUF as a tensor of divisors, one for each pair, instead of as parameters.
ROPE_FACTORS = "rope_freqs.weight"
DEFAULT_ROPE_THETA = 10_000.0
_END_TOKEN_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def config_of(file: GgufFile) -> ModelConfig:
    """The config without a fingerprint. Raises `StartupError` for another architecture or a missing key."""
    architecture = file.value("general.architecture")
    if architecture not in ARCHITECTURES:
        raise StartupError(
            f"{file.path} holds a {shown(architecture)} model: supported are {', '.join(ARCHITECTURES)}", param="model"
        )
    keys = _Keys(file, architecture)
    num_heads = keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    keys.must_equal("attention.value_length", head_dim)
    keys.must_equal("rope.dimension_count", head_dim)
    if keys.integer("expert_count", 0):
        raise StartupError(f"{file.path} is a mixture of experts, which is not supported yet", param="model")
    embedding = file.tensors.get("token_embd.weight")
    theta = float(file.value(f"{architecture}.rope.freq_base", DEFAULT_ROPE_THETA))
    scaling = _rope_scaling(file, keys, head_dim, theta)
    max_positions = keys.integer("context_length")
    return ModelConfig(
        architecture=architecture,
        name=str(file.value("general.name", file.path.stem)),
        vocab_size=embedding.shape[0] if embedding else keys.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rope_theta=theta,
        rms_norm_eps=float(keys.required("attention.layer_norm_rms_epsilon")),
        max_model_len=scaling.longest_sequence(max_positions) if scaling else max_positions,
        tie_embeddings="output.weight" not in file.tensors,
        attention_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        sliding_window=keys.integer("attention.sliding_window", 0),
        rope_scaling=scaling,
        eos_token_ids=tuple(dict.fromkeys(int(file.value(key)) for key in _END_TOKEN_KEYS if key in file)),
        bos_token_id=file.value("tokenizer.ggml.bos_token_id"),
    )


class _Keys:
    """Metadata under the architecture's prefix."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._prefix = architecture

    def required(self, key: str) -> Any:
        value = self.optional(key)
        if value is None:
            raise StartupError(
                f"{self._file.path} has no {self._prefix}.{key}: it is no complete model file", param="model"
            )
        return value

    def optional(self, key: str) -> Any:
        return self._file.value(f"{self._prefix}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.optional(key) if default is not None else self.required(key)
        if value is None:
            value = default
        # A list stands where layers differ; a bool or a float is no count.
        if type(value) is not int or value < 0 or (default is None and value == 0):
            raise StartupError(
                f"{self._file.path}: {self._prefix}.{key} is {shown(value)}, which is not supported", param="model"
            )
        return value

    def must_equal(self, key: str, expected: int) -> None:
        if self.integer(key, expected) != expected:
            raise StartupError(
                f"{self._file.path}: {self._prefix}.{key} is {self.optional(key)}, only {expected} is supported",
                param="model",
            )


def _rope_scaling(file: GgufFile, keys: _Keys, head_dim: int, theta: float) -> RopeScaling | None:
    kind = keys.optional("rope.scaling.type")
    if kind not in (None, "none", "linear", "yarn"):
        raise StartupError(f"{file.path}: rope scaling {shown(kind)} is not supported", param="model")
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, head_dim, theta)
    factor = float(keys.optional("rope.scaling.factor") or 1.0)
    if factor == 1.0 or kind not in ("linear", "yarn"):
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    return RopeScaling(
        "yarn",
        factor,
        high_freq_factor=32.0,
        low_freq_factor=1.0,
        original_context=keys.integer("rope.scaling.original_context_length", keys.integer("context_length")),
        attention_factor=yarn_attention_factor(factor),
    )


def _llama3_scaling(file: GgufFile, head_dim: int, theta: float) -> RopeScaling:
    """The parameters whose divisors the file lists: Llama 3's published ones with the file's largest divisor."""
    # Not at the top: a mock worker reads a model's shape without torch.
    from engine.models.rope import rope_frequencies

    divisors = file.rows(ROPE_FACTORS).reshape(-1).view(np.float32).astype(np.float64)
    scaling = RopeScaling("llama3", factor=float(divisors.max(initial=1.0)))
    expected = rope_frequencies(head_dim, theta, None) / rope_frequencies(head_dim, theta, scaling)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise StartupError(
            f"{file.path}: {ROPE_FACTORS} holds no Llama 3 rope scaling, which is not supported", param="model"
        )
    return scaling
