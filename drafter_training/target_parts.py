"""The parts of the target that a drafter's training reads: embedding rows, output head, final norm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as functional

from engine.model_config import ModelConfig
from engine.model_loader import open_weights


@dataclass(frozen=True, slots=True)
class TargetParts:
    """`embedding`, `head` [vocab, hidden]; float32."""

    config: ModelConfig
    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor

    def normed(self, last_tap: torch.Tensor) -> torch.Tensor:
        """The last hidden states, from the residual stream after the last layer."""
        return functional.rms_norm(
            last_tap.float(), (self.config.hidden_size,), self.final_norm, self.config.rms_norm_eps
        )


def read_target_parts(model: Path) -> TargetParts:
    weights = open_weights(model)
    try:
        config = weights.config
        embedding = weights.tensor("model.embed_tokens.weight").float().clone()
        return TargetParts(
            config=config,
            embedding=embedding,
            head=embedding if config.tie_embeddings else weights.tensor("lm_head.weight").float().clone(),
            final_norm=weights.tensor("model.norm.weight").float().clone(),
        )
    finally:
        weights.close()
