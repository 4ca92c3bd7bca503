"""`engine.tensor_parallel.shard`: the ranks' parts are the whole, each is small, and what does not divide says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.errors import StartupError
from engine.model_loader import open_weights
from engine.tensor_parallel.shard import Shard, ShardedWeights, check_divides, shard_config
from engine.weights.expected_shapes import expected_shapes
from tests.engine.tiny_models import random_model, save_gguf, save_safetensors

ROW_MODULES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
COLUMN_MODULES = ("o_proj", "down_proj")
VOCABULARY_MODULES = ("embed_tokens", "lm_head")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_parts_of_all_ranks_are_the_whole_checkpoint(kind: str, size: int, tmp_path: Path) -> None:
    model = random_model("qwen2", num_key_value_heads=4)
    path = (
        save_safetensors(model, tmp_path / "model") if kind == "safetensors" else save_gguf(model, tmp_path / "m.gguf")
    )
    whole = open_weights(path)
    ranks = [ShardedWeights(whole, Shard(rank, size)) for rank in range(size)]
    for name in whole.names():
        module = name.split(".")[-2]
        parts = [rank.tensor(name) for rank in ranks]
        if module in ROW_MODULES or module in VOCABULARY_MODULES:
            together = torch.cat(parts)
        else:
            together = torch.cat(parts, dim=1) if module in COLUMN_MODULES else parts[0]
        assert torch.equal(together, whole.tensor(name)), name
        if module in ROW_MODULES + COLUMN_MODULES + VOCABULARY_MODULES:
            assert parts[0].numel() * size == whole.tensor(name).numel()
    whole.close()


@pytest.mark.parametrize("variant", ["qwen3", "qwen3_moe", "mixtral"])
def test_rank_has_the_shapes_that_its_config_asks_for(variant: str, tmp_path: Path) -> None:
    whole = open_weights(save_safetensors(random_model(variant), tmp_path / "model"))
    part = ShardedWeights(whole, Shard(1, 2))
    asked = expected_shapes(replace(part.config, vocab_size=part.config.vocab_size // 2))
    assert {name: tuple(part.tensor(name).shape) for name in part.names()} == asked
    whole.close()


def test_vocabulary_that_does_not_divide_ends_with_zeros(tmp_path: Path) -> None:
    whole = open_weights(save_safetensors(random_model("qwen2", vocab_size=161), tmp_path / "model"))
    parts = [ShardedWeights(whole, Shard(rank, 2)).tensor("lm_head.weight") for rank in range(2)]
    assert [len(part) for part in parts] == [81, 81]
    assert torch.equal(torch.cat(parts)[:161], whole.tensor("lm_head.weight"))
    assert not parts[1][-1].any()
    whole.close()


def test_more_ranks_than_kv_heads_share_them_evenly() -> None:
    assert [Shard(rank, 4).kv_heads(2) for rank in range(4)] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]


@pytest.mark.parametrize(
    ("changes", "size", "what"),
    [
        ({"num_heads": 6, "num_kv_heads": 2}, 4, "6 heads"),
        ({"num_heads": 12, "num_kv_heads": 4}, 3, "4 KV heads"),
        ({"num_heads": 12, "num_kv_heads": 2}, 3, "2 KV heads"),
        ({"intermediate_size": 97}, 2, "an MLP of 97"),
    ],
)
def test_model_that_does_not_divide_is_refused_by_what_does_not(
    changes: dict[str, int], size: int, what: str, tmp_path: Path
) -> None:
    whole = open_weights(save_safetensors(random_model("llama"), tmp_path / "model"))
    config = replace(whole.config, **changes)  # type: ignore[arg-type]
    whole.close()
    with pytest.raises(StartupError, match=f"has {what}, which tensor_parallel {size} does not divide") as refusal:
        check_divides(config, size)
    assert refusal.value.param == "tensor_parallel"


def test_one_rank_of_one_is_the_model_itself(tmp_path: Path) -> None:
    whole = open_weights(save_safetensors(random_model("llama"), tmp_path / "model"))
    check_divides(whole.config, 1)
    assert shard_config(whole.config, Shard(0, 1)) == whole.config
    whole.close()
