"""One engine step as arrays: what the scheduler gives and a model runner takes.

Arrays only, so that a native kernel takes their addresses and a CUDA graph copies them into fixed buffers. All tokens
of all sequences are laid end to end (selective batching): the linear layers see `[num_tokens, hidden]`, only attention
looks at sequence boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from engine.model_config import ModelConfig

if TYPE_CHECKING:  # the mock engine runs without torch
    import torch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
# Called after a layer's KV of this step is in the pool, with the layer's index. It must not block.
LayerCallback = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class StepInput:
    """The arguments of one forward pass over a batch of B sequences with T new tokens in all.

    `token_ids` [T], `positions` [T]: the new tokens, sequence after sequence.
    `slots` [T] int64: where each token's KV goes: block * block_tokens + offset.
    `query_starts` [B + 1]: sequence b owns rows query_starts[b] to query_starts[b + 1].
    `context_lens` [B]: KV tokens of each sequence after this step (cached + new).
    `block_tables` [B, W]: block ids in order of position; entries past the context are 0 and never read.
    `logit_rows` [R]: rows of the flattened batch whose logits are wanted, ascending.
    `tap_layers`: layers after which the hidden states of those rows are wanted, ascending; none cost nothing.
    `inputs` [T, hidden] float32, or None: what the first layer reads instead of the token ids' embeddings.
    `tree_masks` [T] or None (no sequence verifies a tree): 0 for a row that sees every token before it; else bit j says
        that it sees the j-th row of its sequence in this step, beside all tokens before those. The rows of a tree lie
        in the pool one after the other, siblings too, while `positions` are those of each one's own branch.
    `only_most_likely`: nobody reads more of the logits than each row's largest, so a runner that gives `most_likely`
        may leave them unwritten.
    """

    token_ids: Int32Array
    positions: Int32Array
    slots: Int64Array
    query_starts: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    logit_rows: Int32Array
    tap_layers: tuple[int, ...] = ()
    inputs: npt.NDArray[np.float32] | None = None
    tree_masks: Int32Array | None = None
    only_most_likely: bool = False

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.context_lens.shape[0])


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`logits` [R, vocab] float32, `hidden` [R, hidden] (last hidden states of the same rows, for drafters).

    `most_likely` [R], of a runner that finds them on the way: each row's token with the largest logit, of equal ones
    the first; -1 where a logit is NaN or the largest is not finite.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    taps: torch.Tensor | None = None
    most_likely: Int32Array | None = None


class ModelRunner(Protocol):
    """A model that writes KV into the pool it was built with. One thread calls it.

    Implementations: `engine.torch_runner` (reference, any device), `engine.native_runner` (CPU).
    """

    config: ModelConfig
    backend: str  # "torch" | "native" | ...
    verifies_trees: bool  # whether a step may have tree masks

    def forward(self, step: StepInput, layer_done: LayerCallback | None) -> StepOutput:
        """Runs the step; calls `layer_done(i)` once layer i's KV is visible in the pool to any reader on this host."""
        ...
