"""A mixture of experts, the reference: each expert is an MLP that computes the rows that were routed to it.

    hidden ─ route ─> experts_per_token experts for each row, with weights ─> sum of weight * expert(row)

Source: Mixtral (arXiv 2401.04088) and Qwen3-MoE as in Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.kernels.linear import make_linear
from engine.kernels.reference import silu_multiply

# Hidden states [rows, hidden], expert ids [rows, experts_per_token] int64, their weights float32 -> [rows, hidden].
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# From each expert's gate over up [2 * size, hidden], and its down [hidden, size].
ExpertsMaker = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Experts]


def route(
    router_logits: torch.Tensor, experts_per_token: int, *, normalizes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest experts of each row `[rows, experts_per_token]`, and their weights in float32.

    `normalizes`: a row's weights sum to 1; otherwise they are shares of all experts.
    """
    weights, expert_ids = torch.topk(torch.softmax(router_logits.float(), dim=-1), experts_per_token, dim=-1)
    if normalizes:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return expert_ids, weights


def make_experts(gate_up: Sequence[torch.Tensor], down: Sequence[torch.Tensor]) -> Experts:
    """One expert after the other, in ascending order, so that a row's sum does not depend on who is beside it."""
    layers = [(make_linear(first), make_linear(second)) for first, second in zip(gate_up, down, strict=True)]

    def compute(hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        for expert in sorted(set(expert_ids.flatten().tolist())):
            rows, places = torch.nonzero(expert_ids == expert, as_tuple=True)
            first, second = layers[expert]
            result = second(silu_multiply(first(hidden.index_select(0, rows))))
            output.index_add_(0, rows, result.float() * weights[rows, places, None])
        return output.to(hidden.dtype)

    return compute
