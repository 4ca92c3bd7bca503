"""Which tensors a model of a given shape consists of: a checkpoint with one more, one less or another shape is refused.

A missing bias or a tensor that nobody reads would give fluent nonsense; refusing it at start is the only safe answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.errors import StartupError, shown
from engine.model_config import ModelConfig


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's name of every tensor, with its shape `[outputs, inputs]`."""
    hidden = config.hidden_size
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    layer_shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, query_size),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.mixture is not None:
        layer_shapes["mlp.gate.weight"] = (config.mixture.num_experts, hidden)
        for expert in range(config.mixture.num_experts):
            layer_shapes |= _mlp_shapes(f"mlp.experts.{expert}", hidden, config.mixture.expert_size)
    else:
        layer_shapes |= _mlp_shapes("mlp", hidden, config.intermediate_size)
    if config.attention_bias:
        layer_shapes["self_attn.q_proj.bias"] = (query_size,)
        layer_shapes["self_attn.k_proj.bias"] = (kv_size,)
        layer_shapes["self_attn.v_proj.bias"] = (kv_size,)
    if config.qk_norm:
        layer_shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        layer_shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    return shapes


def _mlp_shapes(prefix: str, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (size, hidden),
        f"{prefix}.up_proj.weight": (size, hidden),
        f"{prefix}.down_proj.weight": (hidden, size),
    }


def check_shapes(where: str, config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `StartupError` naming the first tensor that is missing, of another shape, or without a place."""
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise StartupError(f"{where} lacks tensor {name}: the checkpoint is incomplete", param="model")
        if found[name] != shape:
            raise StartupError(
                f"{where}: tensor {name} is {list(found[name])}, its config asks for {list(shape)}", param="model"
            )
    for name in found:
        if name not in expected:
            raise StartupError(
                f"{where} has tensor {shown(name)}, which a {config.architecture} model has no place for: "
                "this variant is not supported",
                param="model",
            )
