"""Quantised checkpoints for tests, packed bit by bit as the formats are described, not by the code that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from tests.engine.tiny_models import random_model

Integers = npt.NDArray[np.int64]
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Quantized:
    """One matrix: `values` `[outputs, inputs]` from 0 on, `scales` and `zeros` `[outputs, groups]`."""

    values: Integers
    scales: npt.NDArray[np.float16]
    zeros: Integers
    group_of_input: Integers

    @property
    def weight(self) -> torch.Tensor:
        """What a reader must give, in float32."""
        columns = self.group_of_input
        steps = (self.values - self.zeros[:, columns]).astype(np.float32)
        return torch.from_numpy(steps * self.scales.astype(np.float32)[:, columns])


def quantize(
    weight: torch.Tensor, *, bits: int = 4, group: int = GROUP, symmetric: bool = False, shuffled: bool = False
) -> Quantized:
    """Rounded to nearest. `shuffled`: inputs belong to groups in no order, as with activation ordering."""
    array = weight.detach().double().numpy()
    outputs, inputs = array.shape
    group_of_input = np.arange(inputs) // group
    if shuffled:
        np.random.default_rng(inputs).shuffle(group_of_input)
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    scales = np.empty((outputs, inputs // group), np.float16)
    zeros = np.full(scales.shape, middle, np.int64)
    values = np.empty((outputs, inputs), np.int64)
    for number in range(scales.shape[1]):
        part = array[:, group_of_input == number]
        low, high = part.min(1, initial=0.0), part.max(1, initial=0.0)
        widest = np.maximum(-low, high) / (middle - 1) if symmetric else (high - low) / top
        scales[:, number] = widest
        step = scales[:, number].astype(np.float64)
        if not symmetric:
            zeros[:, number] = np.clip(np.rint(-low / step), 0, top)
        values[:, group_of_input == number] = np.clip(np.rint(part / step[:, None]) + zeros[:, number, None], 0, top)
    return Quantized(values, scales, zeros, group_of_input)


def pack(rows: Integers, bits: int) -> torch.Tensor:
    """int32 words along the last axis, lowest bits first; a last word that is not full ends in zeros."""
    per_word = 32 // bits
    padded = np.zeros((rows.shape[0], -(-rows.shape[1] // per_word) * per_word), np.uint64)
    padded[:, : rows.shape[1]] = rows
    words = np.zeros((rows.shape[0], padded.shape[1] // per_word), np.uint64)
    for place in range(per_word):
        words |= padded[:, place::per_word] << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def gptq_parts(matrix: Quantized, *, bits: int = 4, stored_less: int = 1) -> dict[str, torch.Tensor]:
    """`stored_less`: what the format takes off a zero point: 1 in v1, 0 in v2."""
    stored_zeros = (matrix.zeros - stored_less) % 2**bits
    return {
        "qweight": pack(matrix.values, bits).t().contiguous(),
        "qzeros": pack(stored_zeros.T, bits),
        "scales": torch.from_numpy(matrix.scales.T.copy()),
        "g_idx": torch.from_numpy(matrix.group_of_input.astype(np.int32)),
    }


def awq_parts(matrix: Quantized) -> dict[str, torch.Tensor]:
    def interleaved(rows: Integers) -> torch.Tensor:
        by_word = rows.reshape(rows.shape[0], -1, 8)
        return pack(by_word[:, :, list(AWQ_ORDER)].reshape(rows.shape), 4)

    return {
        "qweight": interleaved(matrix.values.T),
        "qzeros": interleaved(matrix.zeros.T),
        "scales": torch.from_numpy(matrix.scales.T.copy()),
    }


def packed_parts(matrix: Quantized, *, bits: int = 4, zero_points: str = "") -> dict[str, torch.Tensor]:
    """compressed-tensors; `zero_points`: none, "packed" along the outputs, or "plain" int8 around zero."""
    parts = {
        "weight_packed": pack(matrix.values, bits),
        "weight_scale": torch.from_numpy(matrix.scales.copy()),
        "weight_shape": torch.tensor(matrix.values.shape),
    }
    if zero_points == "packed":
        parts["weight_zero_point"] = pack(matrix.zeros.T, bits).t().contiguous()
    elif zero_points == "plain":
        parts["weight_zero_point"] = torch.from_numpy((matrix.zeros - 2 ** (bits - 1)).astype(np.int8))
    return parts


def save_quantized(
    directory: Path,
    stated: dict[str, Any],
    parts_of: Callable[[str, torch.Tensor], dict[str, torch.Tensor]],
    **overrides: Any,
) -> Any:
    """Writes a random model whose linear layers are stored as `parts_of(module, weight)`. Gives the model."""
    model = random_model("llama", **overrides)
    model.save_pretrained(directory)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            tensors |= {f"{module}.{part}": tensor for part, tensor in parts_of(module, parameter).items()}
        else:
            tensors[name] = parameter.detach().clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    return model
