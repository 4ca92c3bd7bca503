"""A matrix as a quantised checkpoint holds it, whatever its file's packing: integers, scales, zero points.

weight[o, i] = (values[o, i] - zeros[o, g]) * scales[o, g]        g = group_of_input[i]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.weights.weight_source import RawBlocks

BLOCK_INPUTS = 32
HALF_BLOCK = BLOCK_INPUTS // 2
# Scales in blocks are float16: what it cannot hold as well as a quantiser's own float16 would is not put in a block.
MAX_SCALE_ERROR = 2**-10


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """One matrix, unpacked. Its tensors may be views of the mapped file: what is made from them is not."""

    values: torch.Tensor  # [outputs, inputs], integers or float8
    scales: torch.Tensor  # [outputs, groups], float32
    zeros: torch.Tensor | None  # [outputs, groups], float32; None: all 0
    group_of_input: torch.Tensor | None  # [inputs], int64; None: groups of equal size, one after the other
    bits: int

    def __post_init__(self) -> None:
        """Raises `ValueError` for parts of different sizes."""
        outputs, inputs = self.values.shape
        if self.scales.shape[0] != outputs or (self.zeros is not None and self.zeros.shape != self.scales.shape):
            zeros = None if self.zeros is None else list(self.zeros.shape)
            raise ValueError(f"{outputs} outputs, scales {list(self.scales.shape)}, zero points {zeros}")
        if self.group_of_input is None and inputs % self.scales.shape[1]:
            raise ValueError(f"{inputs} inputs, {self.scales.shape[1]} groups")

    def dequantized(self) -> torch.Tensor:
        """The weight in float32, `[outputs, inputs]`."""
        if self.group_of_input is not None:
            weight = self.values.float()
            if self.zeros is not None:
                weight -= self.zeros[:, self.group_of_input]
            weight *= self.scales[:, self.group_of_input]
            return weight
        grouped = self.values.float().view(*self.scales.shape, -1)
        if self.zeros is not None:
            grouped -= self.zeros[:, :, None]
        grouped *= self.scales[:, :, None]
        return grouped.view(self.values.shape)

    def blocks(self) -> RawBlocks | None:
        """The same in GGML's blocks of 32 inputs: up to 4 bits as Q4_1, 8 bits around zero as Q8_0.

        None where blocks cannot hold it: other element types, groups that blocks do not divide or that are out of
        order, scales beyond float16. A zero point between whole steps is rounded to 1 part in 2,048.
        """
        inputs, groups = self.values.shape[1], self.scales.shape[1]
        if self.group_of_input is not None or inputs // groups % BLOCK_INPUTS:
            return None
        halves = self.scales.half()
        if not torch.allclose(halves.float(), self.scales, rtol=MAX_SCALE_ERROR, atol=0.0):
            return None
        per_group = inputs // groups // BLOCK_INPUTS
        scales = halves.repeat_interleave(per_group, dim=1)[:, :, None]
        values = self.values.view(self.values.shape[0], -1, BLOCK_INPUTS)
        if self.values.dtype == torch.int8 and self.zeros is None:
            return _raw("Q8_0", [scales.view(torch.uint8), values.view(torch.uint8)])
        if self.values.dtype != torch.uint8 or self.bits > 4:
            return None
        zeros = torch.zeros_like(self.scales) if self.zeros is None else self.zeros
        minimums = (-zeros * self.scales).half().repeat_interleave(per_group, dim=1)[:, :, None]
        nibbles = values[:, :, :HALF_BLOCK] | values[:, :, HALF_BLOCK:] << 4
        return _raw("Q4_1", [scales.view(torch.uint8), minimums.view(torch.uint8), nibbles])


def _raw(kind: str, parts: list[torch.Tensor]) -> RawBlocks:
    """Parts `[rows, blocks, bytes]` of each block side by side."""
    return RawBlocks(kind, torch.cat(parts, dim=2).flatten(1).numpy())
