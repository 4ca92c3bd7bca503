"""`engine.models.rope` against transformers' own frequencies."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.model_config import ModelConfig, RopeScaling
from engine.models.rope import rope_frequencies, rope_table

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_llama3_frequencies_equal_transformers() -> None:
    config = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert factor == 1.0
    assert np.allclose(rope_frequencies(128, 500_000.0, LLAMA3), expected.numpy(), rtol=1e-5)


def test_linear_scaling_divides_every_frequency() -> None:
    plain = rope_frequencies(64, 10_000.0, None)
    assert np.allclose(rope_frequencies(64, 10_000.0, RopeScaling("linear", 4.0)), plain / 4)
    assert plain[0] == 1.0


def test_table_has_a_row_for_each_position() -> None:
    config = ModelConfig("llama", "m", 100, 64, 96, 2, 2, 1, 32, 10_000.0, 1e-5, 512, True)
    cos, sin = rope_table(config, 100, torch.device("cpu"))
    assert cos.shape == sin.shape == (100, 16)
    assert torch.allclose(cos.square() + sin.square(), torch.ones_like(cos))
    assert torch.equal(cos[0], torch.ones(16))
