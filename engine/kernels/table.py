"""Which implementation of each operation a device uses: one table, so that a model names operations, not devices.

The reference runs everywhere. A backend that replaces an operation keeps its contract (shapes, what is written in
place), so a table may mix them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.kernels import reference
from engine.kernels.experts import ExpertsMaker, make_experts
from engine.kernels.linear import Linear, make_linear
from engine.kernels.reference_attention import AttentionShape, plan_attention
from engine.step import StepInput

# A linear layer on a weight [outputs, inputs] with its bias.
LinearMaker = Callable[[torch.Tensor, torch.Tensor | None], Linear]


class AttentionPlan(Protocol):
    """One step's attention, planned once and used by every layer."""

    def attend(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """Output `[num_tokens, num_heads * head_dim]` of query `[num_tokens, num_heads, head_dim]`."""
        ...


@dataclass(frozen=True, slots=True)
class OperationTable:
    """The operations of a decoder; `engine.kernels.reference` has the contract of each."""

    add_rms_norm: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float], torch.Tensor]
    rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    silu_multiply: Callable[[torch.Tensor], torch.Tensor]
    kv_write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None]
    plan_attention: Callable[[StepInput, AttentionShape, torch.Tensor], AttentionPlan]
    make_linear: LinearMaker
    make_experts: ExpertsMaker


REFERENCE = OperationTable(
    add_rms_norm=reference.add_rms_norm,
    rotary=reference.rotary,
    silu_multiply=reference.silu_multiply,
    kv_write=reference.kv_write,
    plan_attention=plan_attention,
    make_linear=make_linear,
    make_experts=make_experts,
)
