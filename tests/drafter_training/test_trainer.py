"""The training loop: it learns, it resumes to the same weights, its rate falls at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from drafter_training.batches import Batch, make_batch, shuffled_batches
from drafter_training.feature_store import StoredTurn
from drafter_training.guess_losses import HeldGuesses
from drafter_training.trainer import Objective, Trainer, TrainingPlan, rate_factor

HIDDEN = 8
PLAN = TrainingPlan(num_steps=24, turns_per_batch=2, learning_rate=0.05, seed=3)


def turns(count: int = 10) -> list[StoredTurn]:
    generator = torch.Generator().manual_seed(0)
    lengths = [3 + index % 4 for index in range(count)]
    return [
        StoredTurn(
            torch.arange(length + 1, dtype=torch.int32),
            torch.randn(length, 1, HIDDEN, generator=generator).bfloat16(),
        )
        for length in lengths
    ]


class Doubler(nn.Module):
    """Learns to double its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Linear(HIDDEN, HIDDEN)


def objective() -> Objective:
    model = Doubler()

    def loss(batch: Batch, generator: torch.Generator) -> torch.Tensor:
        x = batch.taps[batch.is_row][:, 0]
        noise = 0.01 * torch.randn(x.shape, generator=generator)
        error: torch.Tensor = model.matrix(x).float() - 2 * x + noise
        return error.pow(2).mean()

    def count(batch: Batch, counted: HeldGuesses) -> None:
        counted.num_tried[0] += int(batch.is_row.sum())

    return Objective(model, loss, count, num_guesses=1)


def test_it_learns(tmp_path: Path) -> None:
    losses = list(Trainer(objective(), PLAN, tmp_path).run(turns(), turns()))
    assert len(losses) == PLAN.num_steps
    assert losses[-1] < losses[0] / 2
    notes = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert notes[-1]["step"] == PLAN.num_steps
    assert notes[-1]["held_out"]["tokens_per_step"] == 1.0


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    whole, first, second = objective(), objective(), objective()
    trainer = Trainer(whole, PLAN, tmp_path / "whole")
    list(trainer.run(turns(), turns()))
    stopped = Trainer(first, PLAN, tmp_path / "parts")
    assert not stopped.resume()
    run = stopped.run(turns(), turns())
    for _ in range(10):  # two passes over the turns
        next(run)
    stopped.save()
    resumed = Trainer(second, PLAN, tmp_path / "parts")
    assert resumed.resume()
    assert resumed.step == 10
    list(resumed.run(turns(), turns()))
    for name, parameter in whole.model.named_parameters():
        assert torch.allclose(parameter, dict(second.model.named_parameters())[name], atol=1e-6), name


def test_rate_rises_stays_and_falls() -> None:
    rates = [rate_factor(step, 100) for step in range(100)]
    assert rates[0] < rates[5] < rates[20] == rates[60] == 1.0
    assert rates[60] > rates[80] > rates[99] > 0


def test_too_few_turns_are_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 turns fill no batch of 2"):
        list(Trainer(objective(), PLAN, tmp_path).run(turns(1), turns()))


def test_batches_hold_every_turn_once_in_a_seeded_order() -> None:
    batches = list(shuffled_batches(turns(), 2, seed=1))
    assert sorted(int(rows) for batch in batches for rows in batch.is_row.sum(1)) == sorted(
        len(turn.taps) for turn in turns()
    )
    again = list(shuffled_batches(turns(), 2, seed=1))
    assert all(torch.equal(one.taps, other.taps) for one, other in zip(batches, again, strict=True))
    other = list(shuffled_batches(turns(), 2, seed=2))
    assert any(not torch.equal(one.is_row, two.is_row) for one, two in zip(batches, other, strict=True))


def test_a_batch_pads_and_says_so() -> None:
    one, two = turns(2)
    batch = make_batch([one, two])
    assert batch.is_row.sum(1).tolist() == [3, 4]
    assert batch.next_ids[0].tolist() == [1, 2, 3, 0]
    assert torch.equal(batch.taps[1], two.taps.float())
    assert not batch.taps[0, 3:].any()
