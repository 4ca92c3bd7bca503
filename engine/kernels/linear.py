"""A linear layer whose weight is laid out once for the device: `y = x W^T + b`.

On a CPU, oneDNN multiplies a weight in its own blocked order; given the plain order, it reorders the weight at every
call, which for a few rows costs more than the product (measured for 1 and 16 rows: 1.6 times, in bf16 and float32).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional

Linear = Callable[[torch.Tensor], torch.Tensor]
# The layout is chosen for this many rows: decode steps, where reading the weight is the whole cost.
PACKED_FOR_ROWS = 16


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A linear layer on `weight` `[outputs, inputs]`; it takes `[num_tokens, inputs]`."""
    if not can_pack(weight):
        return lambda x: functional.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this build of torch and this CPU pack weights of that type."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
