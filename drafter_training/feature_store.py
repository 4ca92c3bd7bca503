"""Written turns on disk: numbered shards, each made by one seed, so that writing resumes where it stopped.

    shard-00000.safetensors   token_ids [sum(n + 1)]   the row's input token first, then what was generated
                              num_rows [turns]          n of each turn
                              taps [sum(n), layers, hidden] bfloat16

Row i of a turn read token i, and its hidden states chose token i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from drafter_training.turn_writer import WrittenTurn


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """`token_ids` [n + 1], `taps` [n, layers, hidden] bfloat16."""

    token_ids: torch.Tensor
    taps: torch.Tensor


class FeatureStore:
    """A directory of shards."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def has(self, shard: int) -> bool:
        return self._path(shard).is_file()

    def shards(self) -> list[int]:
        return sorted(int(path.stem.partition("-")[2]) for path in self._directory.glob("shard-?????.safetensors"))

    def save(self, shard: int, turns: Sequence[WrittenTurn]) -> int:
        """Writes the shard whole or not at all. Gives its number of rows."""
        tokens = [token for turn in turns for token in (turn.prompt.token_ids[-1], *turn.token_ids)]
        num_rows = [len(turn.token_ids) for turn in turns]
        unfinished = self._path(shard).with_suffix(".unfinished")
        save_file(
            {
                "token_ids": torch.tensor(tokens, dtype=torch.int32),
                "num_rows": torch.tensor(num_rows, dtype=torch.int32),
                "taps": torch.cat([turn.taps for turn in turns]),
            },
            unfinished,
        )
        unfinished.rename(self._path(shard))
        return sum(num_rows)

    def load(self, shard: int) -> list[StoredTurn]:
        with safe_open(self._path(shard), framework="pt") as file:
            token_ids, taps = file.get_tensor("token_ids"), file.get_tensor("taps")
            num_rows: list[int] = file.get_tensor("num_rows").tolist()
        turns = zip(token_ids.split([rows + 1 for rows in num_rows]), taps.split(num_rows), strict=True)
        return [StoredTurn(*turn) for turn in turns]

    def count_rows(self, shard: int) -> int:
        with safe_open(self._path(shard), framework="pt") as file:
            return int(file.get_tensor("num_rows").sum())

    def discard(self) -> None:
        for shard in self.shards():
            self._path(shard).unlink()

    def _path(self, shard: int) -> Path:
        return self._directory / f"shard-{shard:05d}.safetensors"
