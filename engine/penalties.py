"""How often one sequence has used each token, and what penalties that puts on its logits.

    repetition  l > 0 ? l / r : l * r      for tokens of prompt and output
    frequency   l - f * count              count in the output alone
    presence    l - p                      for tokens of the output
in this order, as vLLM documents. The counts are sparse: a step touches the tokens that were used, not the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cluster.sampling_params import SamplingParams

INITIAL_CAPACITY = 64


class TokenCounts:
    """The distinct tokens of one sequence. Reads committed tokens only, so a rejected draft never shows here."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_read = 0
        self._index: dict[int, int] = {}
        self._token_ids = np.zeros(INITIAL_CAPACITY, dtype=np.int64)
        self._output_counts = np.zeros(INITIAL_CAPACITY, dtype=np.float32)

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens of prompt and output."""
        return self._token_ids[: len(self._index)]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """How often each of `token_ids` was generated."""
        return self._output_counts[: len(self._index)]

    def read(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Counts what is new. `token_ids` is the whole sequence from its start."""
        if self._num_read < self._num_prompt_tokens:
            for token_id in np.unique(token_ids[: self._num_prompt_tokens]).tolist():
                self._slot(token_id)
            self._num_read = self._num_prompt_tokens
        for token_id in token_ids[self._num_read :].tolist():
            slot = self._slot(token_id)
            self._output_counts[slot] += 1
        self._num_read = len(token_ids)

    def ahead(self) -> TokenCounts:
        """A copy that may read drafts: these counts do not change with it."""
        copy = TokenCounts(self._num_prompt_tokens)
        copy._num_read = self._num_read
        copy._index = dict(self._index)
        copy._token_ids, copy._output_counts = self._token_ids.copy(), self._output_counts.copy()
        return copy

    def _slot(self, token_id: int) -> int:
        slot = self._index.setdefault(token_id, len(self._index))
        if slot == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._output_counts = np.concatenate([self._output_counts, np.zeros_like(self._output_counts)])
        self._token_ids[slot] = token_id
        return slot


class PenalisedRow(NamedTuple):
    """Row `row` of the logits belongs to a sequence with these counts and parameters."""

    row: int
    counts: TokenCounts
    params: SamplingParams


def apply_penalties(logits: torch.Tensor, penalised: Sequence[PenalisedRow]) -> None:
    """Changes `logits` [R, vocab] in place."""
    lengths = [len(entry.counts.token_ids) for entry in penalised]
    rows = torch.from_numpy(np.repeat([entry.row for entry in penalised], lengths))
    token_ids = torch.from_numpy(np.concatenate([entry.counts.token_ids for entry in penalised]))
    counts = torch.from_numpy(np.concatenate([entry.counts.output_counts for entry in penalised]))

    def column(values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths)).to(logits.device)

    rows, token_ids, counts = (tensor.to(logits.device) for tensor in (rows, token_ids, counts))
    repetition = column([entry.params.repetition_penalty for entry in penalised])
    frequency = column([entry.params.frequency_penalty for entry in penalised])
    presence = column([entry.params.presence_penalty for entry in penalised])
    values = logits[rows, token_ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, token_ids] = values - frequency * counts - presence * (counts > 0)
