"""Small random models for tests: as transformers' own objects, as safetensors directories and as GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers

HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB = 64, 3, 4, 2, 160
_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.2,  # wide enough that a wrong row or head moves every logit
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama3": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"rope_parameters": _LLAMA3_ROPE}),
    "linear": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 24}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": True}),
}
VARIANTS["yarn"] = (
    transformers.Qwen2Config,
    transformers.Qwen2ForCausalLM,
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
)
# Kept apart: transformers holds a layer's experts as one tensor, files hold each by itself.
MIXTURES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "mixtral": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 32},
    ),
    "qwen3_moe normalised": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "head_dim": 32,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    ),
}
_GGUF_MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_model(variant: str, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model with random weights, also in its norms and biases, in float32 and eval mode."""
    config_type, model_type, extra = (VARIANTS | MIXTURES)[variant]
    torch.manual_seed(seed)
    model = model_type(config_type(**(_SIZES | extra | overrides))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
    return model


def save_safetensors(model: Any, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def save_gguf(model: Any, path: Path, kind: str = "F32") -> Path:
    """Writes the model as llama.cpp's converter would: matrices in `kind`, vectors in F32, llama's q and k permuted."""
    config = model.config
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{index}" for index in range(config.vocab_size)])
    writer.add_eos_token_id(config.eos_token_id)
    if getattr(config, "sliding_window", None) and architecture == "llama":
        writer.add_sliding_window(config.sliding_window)
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleaved(weight, weight.shape[0] // head_dim)
        add_gguf_tensor(writer, gguf_name(name), weight, kind if weight.ndim == 2 else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_gguf_tensor(writer: Any, name: str, weight: npt.NDArray[np.float32], kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(weight, quantization), raw_dtype=quantization)


def interleaved(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows from Hugging Face's halves to GGUF's interleaved pairs, as llama.cpp's converter does it."""
    rows, columns = weight.shape
    return np.ascontiguousarray(
        weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_MODULES[module]}.{kind}"
