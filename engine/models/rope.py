"""Rotary position embedding: the frequencies a config asks for, and the table of cosines and sines.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071); Llama 3's scaling as in Hugging Face transformers'
`rope_type: llama3`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from engine.model_config import ModelConfig, RopeScaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> npt.NDArray[np.float64]:
    """Radians a position for each pair, `[head_dim / 2]`: theta ** (-2i / head_dim), scaled."""
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        return frequencies / _yarn_divisors(head_dim, theta, scaling)
    return frequencies / _llama3_divisors(frequencies, scaling)


def query_factor(scaling: RopeScaling | None) -> float:
    """What attention scores are multiplied by. Keys stay as they are, so that every backend's KV is the same."""
    return 1.0 if scaling is None else scaling.attention_factor**2


def rope_table(config: ModelConfig, num_positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each `[num_positions, head_dim / 2]` float32."""
    frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    # Float32 as in transformers: the checkpoints were trained with its rounding.
    angles = np.outer(np.arange(num_positions, dtype=np.float32), frequencies.astype(np.float32))
    table = torch.from_numpy(angles).to(device)
    return table.cos(), table.sin()


def _llama3_divisors(frequencies: npt.NDArray[np.float64], scaling: RopeScaling) -> npt.NDArray[np.float64]:
    """1 for the fast pairs, `factor` for the slow ones, a smooth passage between."""
    turns = scaling.original_context * frequencies / (2 * math.pi)  # full turns within the original context
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling.factor + smooth)


def _yarn_divisors(head_dim: int, theta: float, scaling: RopeScaling) -> npt.NDArray[np.float64]:
    """1 for pairs that turn often within the original context, `factor` for those that hardly turn, a ramp between."""

    def pair_with(turns: float) -> float:
        return head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with(scaling.high_freq_factor), pair_with(scaling.low_freq_factor)
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    pairs = np.arange(head_dim // 2, dtype=np.float64)
    ramp = np.clip((pairs - first) / max(last - first, 0.001), 0.0, 1.0)
    divisors: npt.NDArray[np.float64] = 1.0 / (ramp / scaling.factor + 1.0 - ramp)
    return divisors
