"""Turns as batches of equal length: padded, masked, in a seeded order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from drafter_training.feature_store import StoredTurn


@dataclass(frozen=True, slots=True)
class Batch:
    """B turns of up to T rows.

    `next_ids` [B, T]: what each row chose. `taps` [B, T, layers, hidden] float32. `is_row` [B, T]: no padding.
    """

    next_ids: torch.Tensor
    taps: torch.Tensor
    is_row: torch.Tensor


def make_batch(turns: Sequence[StoredTurn]) -> Batch:
    length = max(len(turn.taps) for turn in turns)
    num_layers, hidden = turns[0].taps.shape[1:]
    next_ids = torch.zeros(len(turns), length, dtype=torch.int64)
    taps = torch.zeros(len(turns), length, num_layers, hidden)
    is_row = torch.zeros(len(turns), length, dtype=torch.bool)
    for index, turn in enumerate(turns):
        rows = len(turn.taps)
        next_ids[index, :rows] = turn.token_ids[1:]
        taps[index, :rows] = turn.taps
        is_row[index, :rows] = True
    return Batch(next_ids, taps, is_row)


def shuffled_batches(
    turns: Sequence[StoredTurn], turns_per_batch: int, seed: int, num_skipped: int = 0
) -> Iterator[Batch]:
    """One pass over the turns, past the first batches; a rest that fills no batch is left out."""
    order = torch.randperm(len(turns), generator=torch.Generator().manual_seed(seed)).tolist()
    for start in range(num_skipped * turns_per_batch, len(order) - turns_per_batch + 1, turns_per_batch):
        yield make_batch([turns[index] for index in order[start : start + turns_per_batch]])
