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
from drafter_training.ridge_regression import RidgeRegression
from drafter_training.target_parts import TargetParts

TURNS_AT_ONCE = 32


@torch.no_grad()
def start_eagle(model: EagleModel, target: TargetParts, turns: Sequence[StoredTurn]) -> None:
    """Sets fusions, outputs and final norm; the rest keeps its random start."""
    hidden, eps = target.config.hidden_size, target.config.rms_norm_eps
    num_taps = turns[0].taps.shape[1]
    first, following = RidgeRegression((num_taps + 1) * hidden, hidden), RidgeRegression(2 * hidden, hidden)
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
