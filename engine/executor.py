"""What carries a step out: a model (`engine.model_executor`) or a timing model (`engine.mock_engine`)."""

from __future__ import annotations

from collections.abc import Sequence as Chunks
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.request import PositionLogprobs
from engine.sequence import Sequence
from engine.step import LayerCallback
from engine.step_plan import ScheduledChunk


@dataclass(slots=True)
class StepResults:
    """What a step gave, the other fields than `token_ids` sparse.

    `token_ids`: for each chunk that is sampled, in order, the token after its last one and after each of its drafts.
    """

    token_ids: list[int]
    failed: dict[int, str] = field(default_factory=dict)  # index of token_ids -> why there is no such token
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)  # by index of token_ids
    prompt_logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)  # by index of the chunk
    # [token_ids, tap layers, hidden]: states of the rows that chose them, for drafters; good until the next step.
    taps: npt.NDArray[np.float32] | None = None


class StepExecutor(Protocol):
    """Runs steps. One thread calls it."""

    vocab_size: int
    num_layers: int

    def execute(self, chunks: Chunks[ScheduledChunk], layer_done: LayerCallback | None) -> StepResults:
        """Computes the chunks' KV and samples where a chunk reaches the end of its sequence."""
        ...

    def copy_block(self, source: int, destination: int) -> None:
        """Copies one block's KV, all layers."""
        ...

    def move_tokens(self, sources: Chunks[int], destinations: Chunks[int]) -> None:
        """Copies single tokens' KV, all layers, from slot to slot (block * block_tokens + offset), as if at once."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drops what is kept for a sequence that finished or starts over (unknown ones change nothing)."""
        ...
