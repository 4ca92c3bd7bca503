"""The training loop: batches of written turns, one loss, AdamW, checkpoints; it knows neither EAGLE nor Medusa.

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

WARM_UP_STEPS = 60
FALLING_SHARE = 0.3
MAX_GRADIENT_NORM = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
SLOW_SHARE = 0.25  # of the learning rate
STEPS_PER_CHECKPOINT = 50


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    num_steps: int
    turns_per_batch: int = 4
    learning_rate: float = 4e-4
    seed: int = 0


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
        slow = {name for name in self._parameters if name.startswith(objective.slow_prefixes)}
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for name, p in self._parameters.items() if name not in slow], "share": 1.0},
                {"params": [self._parameters[name] for name in sorted(slow)], "share": SLOW_SHARE},
            ],
            lr=plan.learning_rate,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
        )
        self.step = 0

    def run(self, read_turns: Callable[[], Sequence[StoredTurn]], held_out: Sequence[StoredTurn]) -> Iterator[float]:
        """Gives the loss of each step. Turns are read anew for every pass, so that a growing store is used."""
        while self.step < self._plan.num_steps:
            first_step = self.step
            turns = read_turns()
            for batch in shuffled_batches(turns, self._plan.turns_per_batch, self._plan.seed + self.step):
                yield self._train_step(batch)
                if self.step % STEPS_PER_CHECKPOINT == 0 or self.step == self._plan.num_steps:
                    self._note({"step": self.step, "held_out": self.evaluate(held_out)})
                    self._save()
                if self.step == self._plan.num_steps:
                    return
            if self.step == first_step:
                raise ValueError(f"{len(turns)} turns fill no batch of {self._plan.turns_per_batch}")

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
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(self.step)),
                    "exp_avg": tensors[f"first.{name}"].clone(),
                    "exp_avg_sq": tensors[f"second.{name}"].clone(),
                }
        return True

    @property
    def _checkpoint(self) -> Path:
        return self._directory / "checkpoint.safetensors"

    def _train_step(self, batch: Batch) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = group["share"] * self._plan.learning_rate * rate_factor(self.step, self._plan.num_steps)
        generator = torch.Generator().manual_seed(self._plan.seed + self.step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self._objective.loss(batch, generator)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters.values(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        self.step += 1
        value = float(loss)
        if self.step % 10 == 0:
            self._note({"step": self.step, "loss": value})
        return value

    def _save(self) -> None:
        tensors = {"step": torch.tensor(self.step)}
        for name, parameter in self._parameters.items():
            state = self._optimizer.state[parameter]
            tensors[f"model.{name}"] = parameter.detach()
            tensors[f"first.{name}"], tensors[f"second.{name}"] = state["exp_avg"], state["exp_avg_sq"]
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
