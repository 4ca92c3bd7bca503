"""A model runner in torch over the pool's tensor: the reference, and whatever operations another table brings."""

from __future__ import annotations

from typing import Protocol

import torch

from cluster.errors import StartupError
from cluster.kv_layout import KvLayout
from engine.dtype import TORCH_DTYPES
from engine.kernels.table import REFERENCE, OperationTable
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder
from engine.step import LayerCallback, StepInput, StepOutput
from engine.tensor_parallel.ranks import Ranks
from engine.weights.weight_source import WeightSource


class PoolTensor(Protocol):
    """What of a KV pool a runner needs."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def tensor(self) -> torch.Tensor:
        """`[blocks, layers, 2, kv_heads, block_tokens, head_dim]`; its heads may be some of a larger pool's."""
        ...


class TorchRunner:
    """Keeps `engine.step.ModelRunner`'s promise. Owned by the engine thread; the pool outlives it.

    The tensors of a `StepOutput` are fresh at each step.
    """

    verifies_trees = True

    def __init__(
        self,
        weights: WeightSource,
        memory: PoolTensor,
        *,
        dtype: str = "",
        max_model_len: int = 0,
        operations: OperationTable = REFERENCE,
        backend: str = "torch",
        ranks: Ranks | None = None,
    ) -> None:
        """Computes in `dtype`; without one, in the pool's. `max_model_len` bounds positions; 0: the model's context.
        `ranks`: the others of a sharded model, of which `weights` and `memory` are this rank's part.

        Raises `StartupError` when the pool was laid out for another model.
        """
        self.config: ModelConfig = weights.config
        self.backend = backend
        layout = memory.layout
        mine = (self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)
        if (layout.num_layers, layout.num_kv_heads, layout.head_dim) != mine:
            raise StartupError(f"the KV pool is laid out for another model: {layout}, not (layers, heads, dim) {mine}")
        self._pool = memory.tensor
        with torch.inference_mode():
            self._decoder = Decoder(
                weights,
                operations,
                dtype=TORCH_DTYPES[dtype or layout.dtype],
                device=self._pool.device,
                max_positions=max_model_len or self.config.max_model_len,
                ranks=ranks,
            )

    def forward(self, step: StepInput, layer_done: LayerCallback | None) -> StepOutput:
        """Logits and hidden states of `step.logit_rows`; KV of every token is in the pool afterwards."""
        with torch.inference_mode():
            return self._decoder.forward(step, self._pool, layer_done)
