"""Where an EAGLE drafter's training starts: the best linear guess, behind it a layer that adds nothing yet.

A ridge regression from what the layer reads to the target's next state costs seconds and already guesses a third of the
tokens; from there the layer learns only what is left. (The target's own last layer is no good start: its activations
are so large that the first steps of its output matrices throw away what the regression gave.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafter_training.eagle_model import EagleModel, unit_rms
from drafter_training.feature_store import StoredTurn
from drafter_training.target_parts import TargetParts

RIDGE = 3e-3  # of a row's weight
TURNS_AT_ONCE = 32


@torch.no_grad()
def start_eagle(model: EagleModel, target: TargetParts, turns: Sequence[StoredTurn]) -> None:
    """Sets fusions, outputs and final norm; the rest keeps its random start."""
    hidden, eps = target.config.hidden_size, target.config.rms_norm_eps
    num_taps = turns[0].taps.shape[1]
    first, following = _Regression((num_taps + 1) * hidden, hidden), _Regression(2 * hidden, hidden)
    for start in range(0, len(turns), TURNS_AT_ONCE):
        taps, embeddings, wanted = [], [], []
        for turn in turns[start : start + TURNS_AT_ONCE]:
            features = unit_rms(turn.taps.float(), eps)
            taps.append(features[:-1])
            embeddings.append(unit_rms(target.embedding[turn.token_ids[1:-1].long()], eps))
            wanted.append(features[1:, -1])
        rows, embedded, next_states = torch.cat(taps), torch.cat(embeddings), torch.cat(wanted)
        first.add(torch.cat((rows.flatten(1), embedded), dim=-1), next_states)
        following.add(torch.cat((rows[:, -1], embedded), dim=-1), next_states)
    model.fuse_first.weight.copy_(first.solve())
    model.fuse_next.weight.copy_(following.solve())
    model.attention_output.weight.zero_()
    model.down.weight.zero_()
    model.final_norm.copy_(target.final_norm)


class _Regression:
    """Ridge regression from sums over rows."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self._inputs = torch.zeros(num_inputs, num_inputs)
        self._products = torch.zeros(num_inputs, num_outputs)
        self._num_rows = 0

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._inputs.addmm_(x.T, x)
        self._products.addmm_(x.T, y)
        self._num_rows += len(x)

    def solve(self) -> torch.Tensor:
        """[outputs, inputs]"""
        ridge = RIDGE * self._num_rows * torch.eye(len(self._inputs))
        solution: torch.Tensor = torch.linalg.solve(self._inputs + ridge, self._products)
        return solution.T.contiguous()
