"""A model's shape from a Hugging Face `config.json`. What it does not understand it refuses.

Reads both generations of the format: `rope_theta` with `rope_scaling` beside it, and `rope_parameters` that holds both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.errors import StartupError, shown
from engine.model_config import MixtureOfExperts, ModelConfig, RopeScaling, yarn_attention_factor
from engine.weights.quantization_config import CheckpointQuantization, read_quantization

# model_type in config.json -> our architecture. Mistral is Llama with a window, MiMo is Qwen2 with a layer beside it.
ARCHITECTURE_OF = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
    "mimo": "qwen2",
}
_QWEN_LIKE = ("qwen", "mimo")  # whose window counts only where use_sliding_window says so
DEFAULT_ROPE_THETA = 10_000.0


def read_config(directory: Path) -> ModelConfig:
    """The config without a fingerprint. Raises `StartupError` for a file that is missing, garbled or unsupported."""
    path = directory / "config.json"
    values = _Fields(path, _read_json(path))
    model_type = values.get("model_type")
    if model_type not in ARCHITECTURE_OF:
        raise StartupError(
            f"{path}: model_type {shown(model_type)} is not supported: use {', '.join(ARCHITECTURE_OF)}", param="model"
        )
    values.refuse_unless("hidden_act", "silu")
    values.refuse_unless("mlp_bias", False)
    values.refuse_unless("partial_rotary_factor", 1.0)
    values.refuse_unless("attention_bias", ARCHITECTURE_OF[model_type] == "qwen2")
    num_heads = values.integer("num_attention_heads")
    hidden_size = values.integer("hidden_size")
    rope = values.get("rope_parameters") or {}
    max_positions = values.integer("max_position_embeddings")
    scaling = _rope_scaling(path, rope or values.get("rope_scaling") or {}, max_positions)
    return ModelConfig(
        architecture=ARCHITECTURE_OF[model_type],
        name=directory.resolve().name,
        vocab_size=values.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=values.integer("intermediate_size"),
        num_layers=values.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=values.integer("num_key_value_heads", num_heads),
        head_dim=values.integer("head_dim", hidden_size // num_heads),
        rope_theta=float(rope.get("rope_theta", values.get("rope_theta") or DEFAULT_ROPE_THETA)),
        rms_norm_eps=float(values.get("rms_norm_eps") or 1e-6),
        max_model_len=scaling.longest_sequence(max_positions) if scaling else max_positions,
        tie_embeddings=bool(values.get("tie_word_embeddings")),
        attention_bias=ARCHITECTURE_OF[model_type] == "qwen2",
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        sliding_window=_sliding_window(values),
        rope_scaling=scaling,
        mixture=_mixture(values),
        eos_token_ids=_end_tokens(directory, values),
        bos_token_id=values.get("bos_token_id"),
    )


def _mixture(values: _Fields) -> MixtureOfExperts | None:
    """None for a dense model. Models with dense layers in between are refused."""
    model_type = values.get("model_type")
    if model_type == "mixtral":
        num_experts, size = values.integer("num_local_experts"), values.integer("intermediate_size")
    elif model_type == "qwen3_moe":
        values.refuse_unless("decoder_sparse_step", 1)
        values.refuse_unless("mlp_only_layers", [])
        # transformers 5 writes Mixtral's name for it.
        num_experts = values.integer("num_experts" if values.get("num_experts") else "num_local_experts")
        size = values.integer("moe_intermediate_size")
    else:
        return None
    experts_per_token = values.integer("num_experts_per_tok")
    if experts_per_token > num_experts:
        raise values.refuse("num_experts_per_tok")
    return MixtureOfExperts(
        num_experts, experts_per_token, size, model_type == "mixtral" or bool(values.get("norm_topk_prob"))
    )


def read_num_mtp_layers(directory: Path) -> int:
    """How many layers for multi-token prediction the config states; they stand behind the model's own."""
    path = directory / "config.json"
    stated = _read_json(path).get("num_nextn_predict_layers") or 0
    if type(stated) is not int or stated < 0:
        raise StartupError(f"{path}: num_nextn_predict_layers is {shown(stated)}, must be a number", param="model")
    return stated


def read_stated_quantization(directory: Path) -> CheckpointQuantization | None:
    """How the weights are quantised; None where they are not. Raises `StartupError` for what is not supported."""
    path = directory / "config.json"
    stated = _read_json(path).get("quantization_config")
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise StartupError(f"{path}: quantization_config is {shown(stated)}, must be an object", param="model")
    return read_quantization(path, stated)


class _Fields:
    """The values of one config.json. A null stands for an absent field, as transformers writes it."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name)
        if value is None:
            value = default
        if type(value) is not int or value < 1:
            raise StartupError(f"{self._path}: {name} is {shown(value)}, must be a positive number", param="model")
        return value

    def refuse_unless(self, name: str, supported: object) -> None:
        value = self._values.get(name)
        if value is not None and value != supported:
            raise StartupError(f"{self._path}: {name} {shown(value)} is not supported", param="model")

    def refuse(self, name: str) -> StartupError:
        return StartupError(f"{self._path}: {name} {shown(self.get(name))} is not supported", param="model")


def _sliding_window(values: _Fields) -> int:
    """One window for all layers, or 0. Models whose layers differ are refused."""
    kinds = set(values.get("layer_types") or ())
    is_qwen = str(values.get("model_type")).startswith(_QWEN_LIKE)
    if len(kinds) > 1:
        raise values.refuse("layer_types")
    if kinds == {"full_attention"} or (is_qwen and not values.get("use_sliding_window")):
        return 0
    if is_qwen and not kinds and values.get("max_window_layers"):
        raise values.refuse("max_window_layers")  # the layers below it attend to everything
    return int(values.get("sliding_window") or 0)


def _rope_scaling(path: Path, rope: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    try:
        if kind == "linear":
            return RopeScaling("linear", float(rope["factor"]))
        if kind == "llama3":
            return RopeScaling(
                "llama3",
                float(rope["factor"]),
                float(rope["low_freq_factor"]),
                float(rope["high_freq_factor"]),
                int(rope["original_max_position_embeddings"]),
            )
        if kind == "yarn":
            return _yarn_scaling(rope, max_positions)
    except KeyError as error:
        raise StartupError(f"{path}: rope scaling {kind} lacks {error.args[0]}", param="model") from error
    raise StartupError(
        f"{path}: rope scaling {shown(kind)} is not supported: use linear, llama3 or yarn", param="model"
    )


def _yarn_scaling(rope: Mapping[str, Any], max_positions: int) -> RopeScaling:
    factor = float(rope["factor"])
    attention_factor = rope.get("attention_factor")
    if attention_factor is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = yarn_attention_factor(factor, rope["mscale"]) / yarn_attention_factor(
            factor, rope["mscale_all_dim"]
        )
    return RopeScaling(
        "yarn",
        factor,
        low_freq_factor=float(rope.get("beta_slow") or 1.0),
        high_freq_factor=float(rope.get("beta_fast") or 32.0),
        original_context=int(rope.get("original_max_position_embeddings") or max_positions),
        attention_factor=float(attention_factor or yarn_attention_factor(factor)),
        is_truncated=rope.get("truncate") is not False,
    )


def _end_tokens(directory: Path, values: _Fields) -> tuple[int, ...]:
    """Ends of sequence from config.json and generation_config.json: chat models add theirs in the second only."""
    generation = directory / "generation_config.json"
    found: list[int] = []
    for value in (
        values.get("eos_token_id"),
        _read_json(generation).get("eos_token_id") if generation.is_file() else None,
    ):
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(found))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(
            f"cannot read {path}: {error.strerror}: a model directory holds config.json and *.safetensors",
            param="model",
        ) from error
    except ValueError as error:
        raise StartupError(f"{path} is not valid JSON ({error}): download it again", param="model") from error
    if not isinstance(values, dict):
        raise StartupError(f"{path} holds no JSON object: download it again", param="model")
    return values
