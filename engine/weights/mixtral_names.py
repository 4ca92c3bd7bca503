"""Mixtral's files name a mixture's parts in their own way; everywhere else they have Qwen3-MoE's names."""

from __future__ import annotations

import re

_MODULE_OF = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERT = re.compile(r"(model\.layers\.\d+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.(\w+)")
_ROUTER = re.compile(r"(model\.layers\.\d+)\.block_sparse_moe\.gate\.(\w+)")


def plain_name(stored: str) -> str:
    """`model.layers.0.mlp.experts.3.up_proj.weight` of `model.layers.0.block_sparse_moe.experts.3.w3.weight`; other
    names stay."""
    if (match := _EXPERT.fullmatch(stored)) is not None:
        return f"{match[1]}.mlp.experts.{match[2]}.{_MODULE_OF[match[3]]}.{match[4]}"
    if (match := _ROUTER.fullmatch(stored)) is not None:
        return f"{match[1]}.mlp.gate.{match[2]}"
    return stored
