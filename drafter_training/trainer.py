"""The training loop: batches of written turns, one loss, two optimizers, checkpoints; it knows no kind of drafter.

Matrices are stepped by Muon (Jordan 2024: the momentum orthogonalised, so that a few strong directions of the hidden
states do not drown the others; AdamW lost on this task what the regression gave), vectors by AdamW.

The learning rate warms up, stays, and falls to nothing over the last part of the steps. So a run may be cut short or
made longer while it stays: resume it with another number of steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from drafter_training.batches import Batch, make_batch, shuffled_batches
from drafter_training.feature_store import StoredTurn
from drafter_training.guess_losses import HeldGuesses

WARM_UP_STEPS = 10
FALLING_SHARE = 0.3
MAX_GRADIENT_NORM = 1.0
MOMENTUM = 0.95
BETAS = (0.9, 0.95)
VECTOR_SHARE = 0.1  # of the learning rate: AdamW's steps are measured otherwise
SLOW_SHARE = 0.25  # of the learning rate
STEPS_PER_CHECKPOINT = 100


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    num_steps: int
    turns_per_batch: int
    learning_rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Objective:
    """What is trained: `loss` of a batch (with a generator for what it draws), `count_held` adds a held-out batch."""

    model: nn.Module
    loss: Callable[[Batch, torch.Generator], torch.Tensor]
    count_held: Callable[[Batch, HeldGuesses], None]
    num_guesses: int
    slow_prefixes: tuple[str, ...] = ()  # of names of parameters that start out well: they move slower


class Trainer:
    """Trains in place. Checkpoint and metrics lie in `directory`; an existing checkpoint is continued."""

    def __init__(self, objective: Objective, plan: TrainingPlan, directory: Path) -> None:
        self._objective = objective
        self._plan = plan
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._parameters = dict(objective.model.named_parameters())
        rate = plan.learning_rate
        matrices = [name for name, parameter in self._parameters.items() if parameter.dim() == 2]
        slow = [self._parameters[name] for name in matrices if name.startswith(objective.slow_prefixes)]
        fast = [self._parameters[name] for name in matrices if not name.startswith(objective.slow_prefixes)]
        groups = [{"params": fast, "lr": rate}, {"params": slow, "lr": SLOW_SHARE * rate}]
        vectors = [parameter for parameter in self._parameters.values() if parameter.dim() < 2]
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon([group for group in groups if group["params"]], momentum=MOMENTUM, weight_decay=0.0),
            torch.optim.AdamW(vectors, lr=VECTOR_SHARE * rate, betas=BETAS, weight_decay=0.0),
        )
        self._full_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]
        self.step = 0

    def run(self, turns: Sequence[StoredTurn], held_out: Sequence[StoredTurn]) -> Iterator[float]:
        """Gives the loss of each step."""
        size = self._plan.turns_per_batch
        num_batches = len(turns) // size
        if num_batches == 0:
            raise ValueError(f"{len(turns)} turns fill no batch of {size}")
        while self.step < self._plan.num_steps:
            # Order and place depend on the step alone, so that a resumed run goes the same way.
            pass_number, num_done = divmod(self.step, num_batches)
            for batch in shuffled_batches(turns, size, self._plan.seed + pass_number, num_done):
                yield self._train_step(batch)
                if self.step % STEPS_PER_CHECKPOINT == 0 or self.step == self._plan.num_steps:
                    self._note({"step": self.step, "held_out": self.evaluate(held_out)})
                    self.save()
                if self.step == self._plan.num_steps:
                    return

    def evaluate(self, held_out: Sequence[StoredTurn]) -> dict[str, object]:
        counted = HeldGuesses([0] * self._objective.num_guesses, [0] * self._objective.num_guesses)
        size = self._plan.turns_per_batch
        for start in range(0, len(held_out), size):
            self._objective.count_held(make_batch(held_out[start : start + size]), counted)
        return {"acceptance": counted.rates, "tokens_per_step": counted.tokens_per_step}

    def resume(self) -> bool:
        """Goes on from the checkpoint, if there is one."""
        if not self._checkpoint.is_file():
            return False
        tensors = load_file(self._checkpoint)
        self.step = int(tensors["step"])
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[f"model.{name}"])
                prefix = f"state.{name}."
                self._optimizer_of(parameter).state[parameter] = {
                    key.removeprefix(prefix): tensor.clone()
                    for key, tensor in tensors.items()
                    if key.startswith(prefix)
                }
        return True

    @property
    def _checkpoint(self) -> Path:
        return self._directory / "checkpoint.safetensors"

    def _optimizer_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        return self._optimizers[0 if parameter.dim() == 2 else 1]

    def _train_step(self, batch: Batch) -> float:
        factor = rate_factor(self.step, self._plan.num_steps)
        for optimizer, full_rates in zip(self._optimizers, self._full_rates, strict=True):
            for group, full_rate in zip(optimizer.param_groups, full_rates, strict=True):
                group["lr"] = factor * full_rate
            optimizer.zero_grad()
        generator = torch.Generator().manual_seed(self._plan.seed + self.step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self._objective.loss(batch, generator)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters.values(), MAX_GRADIENT_NORM)
        for optimizer in self._optimizers:
            optimizer.step()
        self.step += 1
        value = float(loss.detach())
        if self.step % 10 == 0:
            self._note({"step": self.step, "loss": value})
        return value

    def save(self) -> None:
        """Writes the checkpoint, whole or not at all."""
        tensors = {"step": torch.tensor(self.step)}
        for name, parameter in self._parameters.items():
            state = self._optimizer_of(parameter).state[parameter]
            tensors[f"model.{name}"] = parameter.detach()
            tensors |= {f"state.{name}.{key}": tensor for key, tensor in state.items()}
        unfinished = self._checkpoint.with_suffix(".unfinished")
        save_file(tensors, unfinished)
        unfinished.rename(self._checkpoint)
        (self._directory / "plan.json").write_text(json.dumps(asdict(self._plan), indent=1) + "\n")

    def _note(self, values: dict[str, object]) -> None:
        with (self._directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")


def rate_factor(step: int, num_steps: int) -> float:
    """The share of the learning rate at a step: up, level, down to zero."""
    falling = max(1, round(FALLING_SHARE * num_steps))
    return min(1.0, (step + 1) / WARM_UP_STEPS, (num_steps - step) / falling)
