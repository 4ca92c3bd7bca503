"""The ranks of a sharded model as threads of the test: over gloo, with parts of one pool, without a process's start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from engine.kernels.table import REFERENCE, OperationTable
from engine.kv_memory import KvMemory
from engine.model_loader import open_weights
from engine.step import LayerCallback, StepInput, StepOutput
from engine.tensor_parallel.pool_heads import PoolHeads
from engine.tensor_parallel.ranks import ProcessRanks
from engine.tensor_parallel.shard import Shard, ShardedWeights
from engine.torch_runner import TorchRunner

Result = TypeVar("Result")
JOIN_TIMEOUT_S = 60.0


class ThreadRanks:
    """Runs a sharded model. Looks like rank 0's runner."""

    backend = "torch"
    verifies_trees = True

    def __init__(
        self,
        model: Path,
        memory: KvMemory,
        size: int,
        folder: Path,
        tables: Sequence[OperationTable] | None = None,
    ) -> None:
        """`tables`: the operations of each rank; none: the reference's."""
        self._threads = ThreadPoolExecutor(size)
        self._size = size
        tables = tables or [REFERENCE] * size
        weights = open_weights(model)
        self.config = weights.config
        ranks = self.all(lambda rank: ProcessRanks(rank, size, folder / "rendezvous", torch.device("cpu")))
        self.runners = []
        for rank in range(size):
            shard = Shard(rank, size)
            heads = PoolHeads(memory, shard.kv_heads(self.config.num_kv_heads))
            own = ShardedWeights(weights, shard)
            self.runners.append(TorchRunner(own, heads, dtype="float32", operations=tables[rank], ranks=ranks[rank]))
        weights.close()

    def all(self, call: Callable[[int], Result]) -> list[Result]:
        """What `call` gives for each rank, all at once."""
        calls = [self._threads.submit(call, rank) for rank in range(self._size)]
        return [one.result(JOIN_TIMEOUT_S) for one in calls]

    def forward(self, step: StepInput, layer_done: LayerCallback | None) -> StepOutput:
        return self.all(lambda rank: self.runners[rank].forward(step, None if rank else layer_done))[0]

    def close(self) -> None:
        self._threads.shutdown()


class Order:
    """What the ranks did, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.events: list[tuple[str, int, int]] = []

    def note(self, what: str, rank: int, layer: int) -> None:
        with self._lock:
            self.events.append((what, rank, layer))
