"""What each kind of drafter is trained for, as the trainer sees it: model, loss of a batch, count of held guesses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as functional

from decode_worker.speculation.drafter_file import DrafterKind
from drafter_training.batches import Batch
from drafter_training.eagle_model import EagleModel, shifted, unit_rms
from drafter_training.eagle_start import start_eagle
from drafter_training.feature_store import StoredTurn
from drafter_training.guess_losses import HeldGuesses, count_held, distillation_loss, draw_candidates
from drafter_training.medusa_model import MedusaModel, start_medusa
from drafter_training.target_parts import TargetParts
from drafter_training.trainer import Objective

NUM_GUESSES = 3
UNROLLED_GUESSES = 2  # of EAGLE's training; from the second one on every guess reads the layer's own states
NUM_CANDIDATES = 3072
STATE_WEIGHT = 1.0  # of the distance to the target's next state: a signal in every dimension where data are few


def make_objective(
    kind: DrafterKind, target: TargetParts, vocabulary: torch.Tensor, turns: Sequence[StoredTurn], seed: int
) -> tuple[Objective, Callable[[], None]]:
    """The objective, and what sets the model's start (not needed where a checkpoint is continued)."""
    torch.manual_seed(seed)
    losses = _Losses(target, vocabulary)
    if kind == "medusa":
        medusa = MedusaModel(target.config, NUM_GUESSES)

        def medusa_states(batch: Batch) -> list[torch.Tensor]:
            states = medusa.states(target.normed(batch.taps[:, :, -1]))
            return [shifted(state, index) for index, state in enumerate(states)]

        objective = Objective(
            model=medusa,
            loss=lambda batch, generator: losses.divergence(medusa_states(batch), batch, generator),
            count_held=lambda batch, counted: losses.count(medusa_states(batch), batch, counted),
            num_guesses=NUM_GUESSES,
            slow_prefixes=("linears",),
        )
        return objective, lambda: start_medusa(medusa, target, turns)
    longest = max(len(turn.taps) for turn in turns)
    eagle = EagleModel(target.config, turns[0].taps.shape[1], longest)

    def eagle_loss(batch: Batch, generator: torch.Generator) -> torch.Tensor:
        states = eagle.unrolled(batch.taps, target.embedding[batch.next_ids], UNROLLED_GUESSES)
        divergence = losses.divergence([eagle.normed(state) for state in states], batch, generator)
        return divergence + STATE_WEIGHT * losses.state_distance(states, batch)

    def eagle_count(batch: Batch, counted: HeldGuesses) -> None:
        with torch.no_grad():
            states = eagle.unrolled(batch.taps, target.embedding[batch.next_ids], NUM_GUESSES)
            losses.count([eagle.normed(state) for state in states], batch, counted)

    objective = Objective(eagle, eagle_loss, eagle_count, NUM_GUESSES, slow_prefixes=("fuse",))
    return objective, lambda: start_eagle(eagle, target, turns)


class _Losses:
    """The losses over one reduced vocabulary."""

    def __init__(self, target: TargetParts, vocabulary: torch.Tensor) -> None:
        self._target = target
        self._vocabulary = vocabulary
        self._rounded = replace(target, head=target.head.to(torch.bfloat16))

    def divergence(self, states: list[torch.Tensor], batch: Batch, generator: torch.Generator) -> torch.Tensor:
        candidates = draw_candidates(self._rounded, self._vocabulary, NUM_CANDIDATES, generator)
        return distillation_loss(states, batch, self._rounded, candidates)

    def state_distance(self, states: list[torch.Tensor], batch: Batch) -> torch.Tensor:
        wanted = unit_rms(batch.taps[:, 1:, -1], self._target.config.rms_norm_eps)
        total = torch.zeros(())
        for index, state in enumerate(states):
            is_counted = batch.is_row[:, 1:].clone()
            is_counted[:, :index] = False
            total = total + functional.smooth_l1_loss(state[:, :-1][is_counted].float(), wanted[is_counted])
        return total / len(states)

    @torch.no_grad()
    def count(self, states: list[torch.Tensor], batch: Batch, counted: HeldGuesses) -> None:
        count_held(states, batch, self._target, self._vocabulary, counted)


def trained_tensors(objective: Objective) -> Mapping[str, torch.Tensor]:
    """The tensors of the drafter file."""
    return {name: parameter.detach() for name, parameter in objective.model.named_parameters()}
