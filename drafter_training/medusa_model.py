"""The Medusa drafter as it is trained: one small residual block for each position ahead, on the last hidden state.

    last hidden state h of the row that chose token t+1 ─ u = A_g h ─ u + silu(W_g u + b_g) ─> head: token t + g + 1

As in Medusa (Cai et al. 2024) the guesses do not know each other. A_g starts as the best linear guess of the state g
rows on, W_g and b_g at zero. The head is the target's own rows for a reduced
vocabulary, frozen and shared by all blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from torch import nn

from drafter_training.feature_store import StoredTurn
from drafter_training.ridge_regression import RidgeRegression
from drafter_training.target_parts import TargetParts
from engine.model_config import ModelConfig


class MedusaModel(nn.Module):
    """Names of parameters are those of the drafter file."""

    def __init__(self, config: ModelConfig, num_heads: int) -> None:
        super().__init__()
        self.config = config
        self.linears = nn.ModuleList(
            nn.Linear(config.hidden_size, config.hidden_size, bias=False) for _ in range(num_heads)
        )
        self.blocks = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(num_heads))
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(config.hidden_size)) for _ in range(num_heads))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    def states(self, last_hidden: torch.Tensor) -> list[torch.Tensor]:
        """Ready for the head: guess g of row t in entry g - 1 at row t. `last_hidden` [B, T, hidden], normed."""
        states = []
        for linear, block, norm in zip(self.linears, self.blocks, self.norms, strict=True):
            ahead = linear(last_hidden)
            states.append(norm * (ahead + functional.silu(block(ahead))))
        return states


@torch.no_grad()
def start_medusa(model: MedusaModel, target: TargetParts, turns: Sequence[StoredTurn]) -> None:
    """Sets the linear maps; the rest keeps its start."""
    hidden = target.config.hidden_size
    for ahead, linear in enumerate(model.linears, start=1):
        regression = RidgeRegression(hidden, hidden)
        for turn in turns:
            states = target.normed(turn.taps[:, -1])
            regression.add(states[:-ahead], states[ahead:])
        next(linear.parameters()).copy_(regression.solve())
