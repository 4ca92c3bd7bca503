"""One rank's runner and its device: the model's usual runner on a part of the weights and of the pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.errors import StartupError
from engine.tensor_parallel.ranks import Ranks
from engine.tensor_parallel.shard import Shard, ShardedWeights
from engine.torch_runner import PoolTensor, TorchRunner
from engine.triton_runner import triton_device, triton_runner
from engine.weights.weight_source import WeightFile


@dataclass(frozen=True, slots=True)
class RunnerChoice:
    """What was chosen at start, the same for every rank."""

    backend: str  # "torch" | "triton"
    quantization: str
    dtype: str
    max_model_len: int


def open_rank_runner(weights: WeightFile, own_pool: PoolTensor, ranks: Ranks, choice: RunnerChoice) -> TorchRunner:
    """`weights` are the whole model's, `own_pool` has the rank's KV heads.

    Raises `StartupError` for a model that does not divide.
    """
    own_weights = ShardedWeights(weights, Shard(ranks.rank, ranks.size))
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


def rank_device(backend: str, quantization: str, kv_dtype: str, shard: Shard) -> torch.device:
    """Where the rank computes: on a CPU, or on the GPU of its number. Side effect: makes that torch's current one.

    Raises `StartupError` where there are fewer GPUs than ranks, and as `triton_device`.
    """
    if backend != "triton":
        return torch.device("cpu")
    device = triton_device(quantization, kv_dtype)
    if device.type == "cuda":
        if torch.cuda.device_count() < shard.size:
            raise StartupError(
                f"tensor_parallel {shard.size} needs as many GPUs on this host, and this process sees "
                f"{torch.cuda.device_count()}",
                param="tensor_parallel",
            )
        torch.cuda.set_device(shard.rank)
    return device
