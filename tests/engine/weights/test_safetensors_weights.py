"""`engine.weights.safetensors_weights` and `hugging_face_config`: values, shards, refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.errors import StartupError
from engine.model_config import RopeScaling
from engine.model_loader import open_weights
from tests.engine.tiny_models import MIXTURES, VARIANTS, random_model, save_safetensors


@pytest.mark.parametrize("variant", VARIANTS)
def test_directory_gives_back_the_models_own_tensors(variant: str, tmp_path: Path) -> None:
    model = random_model(variant)
    weights = open_weights(save_safetensors(model, tmp_path))
    expected = dict(model.named_parameters())
    assert weights.names() == sorted(expected)
    for name in weights.names():
        assert torch.equal(weights.tensor(name), expected[name]), name
        assert weights.raw_blocks(name) is None
    assert len(weights.config.fingerprint) == 32
    weights.close()


@pytest.mark.parametrize("variant", MIXTURES)
def test_experts_have_one_name_each_whatever_the_file_calls_them(variant: str, tmp_path: Path) -> None:
    model = random_model(variant)
    weights = open_weights(save_safetensors(model, tmp_path))
    mixture = weights.config.mixture
    assert mixture is not None
    parameters = dict(model.named_parameters())
    for layer in range(weights.config.num_layers):
        prefix = f"model.layers.{layer}.mlp"
        assert torch.equal(weights.tensor(f"{prefix}.gate.weight"), parameters[f"{prefix}.gate.weight"])
        for expert in range(mixture.num_experts):
            gate, up, down = (
                weights.tensor(f"{prefix}.experts.{expert}.{module}_proj.weight") for module in ("gate", "up", "down")
            )
            assert torch.equal(torch.cat([gate, up]), parameters[f"{prefix}.experts.gate_up_proj"][expert])
            assert torch.equal(down, parameters[f"{prefix}.experts.down_proj"][expert])
    weights.close()


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    model = random_model("llama")
    save_safetensors(model, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    weights = open_weights(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights.tensor(name), parameter)
    weights.close()


def test_half_precision_files_give_float32_or_bfloat16(tmp_path: Path) -> None:
    for dtype, expected in [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)]:
        directory = save_safetensors(random_model("llama").to(dtype), tmp_path / str(dtype))
        weights = open_weights(directory)
        assert weights.tensor("model.norm.weight").dtype == expected
        weights.close()


def test_config_reads_rope_of_both_generations(tmp_path: Path) -> None:
    save_safetensors(random_model("llama3"), tmp_path)
    expected = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    assert open_weights(tmp_path).config.rope_scaling == expected
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    _edit(
        tmp_path, rope_parameters=None, rope_theta=5e5, rope_scaling=scaling | {"original_max_position_embeddings": 64}
    )
    config = open_weights(tmp_path).config
    assert (config.rope_scaling, config.rope_theta) == (expected, 5e5)


def test_end_tokens_of_generation_config_are_added(tmp_path: Path) -> None:
    save_safetensors(random_model("llama"), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    assert open_weights(tmp_path).config.eos_token_ids == (1, 7)


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("llama", {"model_type": "gpt_neox"}, "model_type 'gpt_neox' is not supported"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias True"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope scaling 'longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor"),
        ("llama", {"num_hidden_layers": "three"}, "num_hidden_layers is 'three'"),
        ("llama", {"num_hidden_layers": 2}, "has tensor 'model.layers.2"),
        ("llama", {"intermediate_size": 128}, "its config asks for"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ("mixtral", {"num_local_experts": 5}, r"mlp.gate.weight is \[4, 64\], its config asks for \[5, 64\]"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen3", {"model_type": "qwen2", "attention_bias": True}, "lacks tensor model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_unsupported_configs_say_what_is_unsupported(
    variant: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_safetensors(random_model(variant), tmp_path)
    _edit(tmp_path, **changes)
    with pytest.raises(StartupError, match=message):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("llama", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "layer_types"),
        ("llama", {"layer_types": ["full_attention", "linear_attention", "mamba"]}, "layer_types"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("qwen3", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen3", {"use_sliding_window": True, "layer_types": None, "max_window_layers": 2}, "max_window_layers"),
        *(
            ("llama", {"model_type": model_type}, f"model_type '{model_type}' is not supported")
            for model_type in ("jamba", "gemma3_text", "gpt_oss", "qwen3_next", "nemotron_h", "zamba2", "deepseek_v3")
        ),
    ],
)
def test_kv25_rt11_a_model_whose_layers_keep_several_kinds_of_kv_is_refused(
    variant: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Windows here and none there, states beside KV: a prompt has one group of blocks, which is there or is not."""
    save_safetensors(random_model(variant), tmp_path)
    _edit(tmp_path, **changes)
    with pytest.raises(StartupError, match=message):
        open_weights(tmp_path)


def test_broken_directories_are_refused_in_one_line(tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        return save_safetensors(random_model("llama"), tmp_path / name)

    without_config = broken("no-config")
    (without_config / "config.json").unlink()
    garbled_config = broken("garbled")
    (garbled_config / "config.json").write_text('{"model_type": ')
    pickled = broken("pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    truncated = broken("truncated")
    data = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(data[: len(data) // 2])
    empty = broken("empty")
    (empty / "model.safetensors").write_bytes(b"")
    missing_shard = broken("missing-shard")
    (missing_shard / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "absent.safetensors"}}))
    escaping = broken("escaping")
    (escaping / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    bad_index = broken("bad-index")
    (bad_index / "model.safetensors.index.json").write_text("[]")
    cases = {
        without_config: "a model directory holds config.json",
        garbled_config: "is not valid JSON",
        pickled: "pickled weights never",
        truncated: "corrupt or truncated",
        empty: "corrupt or truncated",
        missing_shard: "is missing",
        escaping: "no plain file name",
        bad_index: "is not a valid index",
    }
    for directory, message in cases.items():
        with pytest.raises(StartupError, match=message) as caught:
            open_weights(directory)
        assert "\n" not in caught.value.message


def test_one_file_of_a_checkpoint_asks_for_its_directory(tmp_path: Path) -> None:
    save_safetensors(random_model("llama"), tmp_path)
    with pytest.raises(StartupError, match="give its directory"):
        open_weights(tmp_path / "model.safetensors")


def _edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(values))
