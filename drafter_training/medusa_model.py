"""The Medusa drafter as it is trained: one small residual block for each position ahead, on the last hidden state.

    last hidden state of the row that chose token t+1 ─ h + silu(W_g h) ─> head: the token at t + g + 1

As in Medusa (Cai et al. 2024) the guesses do not know each other. The head is the target's own rows for a reduced
vocabulary, frozen and shared by all blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import nn

from engine.model_config import ModelConfig


class MedusaModel(nn.Module):
    """Names of parameters are those of the drafter file."""

    def __init__(self, config: ModelConfig, num_heads: int) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(num_heads))
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(config.hidden_size)) for _ in range(num_heads))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    def states(self, last_hidden: torch.Tensor) -> list[torch.Tensor]:
        """Ready for the head: guess g of row t in entry g - 1 at row t. `last_hidden` [B, T, hidden], normed."""
        return [
            norm * (last_hidden + functional.silu(block(last_hidden)))
            for block, norm in zip(self.blocks, self.norms, strict=True)
        ]
