"""One rank's runner: the model's usual one on a part of the weights and of the pool."""

from __future__ import annotations

from dataclasses import dataclass

from engine.tensor_parallel.pool_heads import PoolHeads
from engine.tensor_parallel.ranks import Ranks
from engine.tensor_parallel.shard import Shard, ShardedWeights
from engine.torch_runner import PoolTensor, TorchRunner
from engine.triton_runner import triton_runner
from engine.weights.weight_source import WeightFile


@dataclass(frozen=True, slots=True)
class RunnerChoice:
    """What was chosen at start, the same for every rank."""

    backend: str  # "torch" | "triton"
    quantization: str
    dtype: str
    max_model_len: int


def open_rank_runner(weights: WeightFile, pool: PoolTensor, ranks: Ranks, choice: RunnerChoice) -> TorchRunner:
    """`weights` and `pool` are the whole model's. Raises `StartupError` for one that does not divide."""
    shard = Shard(ranks.rank, ranks.size)
    own_weights = ShardedWeights(weights, shard)
    own_pool = PoolHeads(pool, shard.kv_heads(weights.config.num_kv_heads))
    if choice.backend == "triton":
        return triton_runner(
            own_weights,
            own_pool,
            quantization=choice.quantization,
            max_model_len=choice.max_model_len,
            dtype=choice.dtype,
            ranks=ranks,
        )
    return TorchRunner(own_weights, own_pool, dtype=choice.dtype, max_model_len=choice.max_model_len, ranks=ranks)
