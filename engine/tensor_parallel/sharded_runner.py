"""Rank 0 of a sharded model as one runner: whoever steps it sees the whole model and its whole pool.

engine ──forward(step)──> ShardedRunner ──step──> followers     each its heads, its part of every sum
                                └── own part, logits of all
"""

from __future__ import annotations

import os

from cluster.errors import EngineFailure
from cluster.model_files import resolve_model
from cluster.worker_settings import WorkerSettings
from engine.kv_memory import KvMemory
from engine.model_config import ModelConfig
from engine.step import LayerCallback, StepInput, StepOutput
from engine.tensor_parallel.follower import FollowerSettings
from engine.tensor_parallel.followers import Followers, OnLost, end_process
from engine.tensor_parallel.pool_heads import PoolHeads, layout_of_heads
from engine.tensor_parallel.rank_cells import RankCells
from engine.tensor_parallel.rank_runner import RunnerChoice, open_rank_runner
from engine.tensor_parallel.ranks import COLLECTIVE_TIMEOUT_S, ProcessRanks
from engine.tensor_parallel.shard import Shard, check_divides
from engine.tensor_parallel.sharded_kv_memory import ShardedKvMemory
from engine.torch_runner import PoolTensor, TorchRunner
from engine.weights.weight_source import WeightFile


class ShardedRunner:
    """Keeps `engine.step.ModelRunner`'s promise. Owned by the worker, which closes it after its engine has stopped.

    When `forward` returns, no rank reads or writes the pool any more: rank 0 has every rank's part of the last layer's
    sums, and a rank gives that after its attention.
    """

    verifies_trees = True

    def __init__(self, runner: TorchRunner, followers: Followers, config: ModelConfig) -> None:
        self.config = config
        self.backend = runner.backend
        self._runner = runner
        self._followers = followers

    def forward(self, step: StepInput, layer_done: LayerCallback | None) -> StepOutput:
        """Raises `EngineFailure` when the ranks cannot compute it together; by then their loss was told."""
        try:
            self._followers.send(step)
            return self._runner.forward(step, layer_done)
        except Exception as error:  # whatever it is: another rank is in the middle of the step, or gone
            self._followers.lost(error)
            raise EngineFailure(f"a sharded step failed: {type(error).__name__}") from error

    def kernel_details(self) -> dict[str, str]:
        """What a status shows: how many ranks there are, and their processes in order."""
        pids = [os.getpid(), *self._followers.pids]
        return {"tensor_parallel": str(len(pids)), "rank_pids": " ".join(map(str, pids))}

    def close(self) -> None:
        self._followers.close()


def open_sharded_runner(
    settings: WorkerSettings,
    weights: WeightFile,
    memory: KvMemory,
    choice: RunnerChoice,
    *,
    on_lost: OnLost = end_process,
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> ShardedRunner:
    """Starts the other ranks of `settings.tensor_parallel` and loads with them.

    `memory` is one that all ranks can map (shareable), or has each one's heads in its device (`ShardedKvMemory`).
    Raises `StartupError`; then no process is left.
    """
    size = settings.tensor_parallel
    check_divides(weights.config, size)
    followers = Followers(
        [_follower_settings(settings, memory, choice, rank, collective_timeout_s) for rank in range(1, size)],
        settings.runtime_dir,
        on_lost,
    )
    try:
        own_pool = _own_pool(memory, size)
        ranks = ProcessRanks(0, size, followers.rendezvous, own_pool.tensor.device, collective_timeout_s)
        runner = open_rank_runner(weights, own_pool, ranks, choice)
        followers.wait_until_ready()
        if isinstance(memory, ShardedKvMemory):
            for rank, connection in enumerate(followers.cells, start=1):
                heads = Shard(rank, size).kv_heads(memory.layout.num_kv_heads)
                memory.attach(heads, RankCells(connection, layout_of_heads(memory.layout, heads)))
    except BaseException:
        followers.close()
        raise
    return ShardedRunner(runner, followers, weights.config)


def _own_pool(memory: KvMemory, size: int) -> PoolTensor:
    if isinstance(memory, ShardedKvMemory):
        return memory.own
    return PoolHeads(memory, Shard(0, size).kv_heads(memory.layout.num_kv_heads))


def _follower_settings(
    settings: WorkerSettings, memory: KvMemory, choice: RunnerChoice, rank: int, collective_timeout_s: float
) -> FollowerSettings:
    if memory.memfd is None and not isinstance(memory, ShardedKvMemory):
        raise EngineFailure("ranks need a KV pool that they can share")
    return FollowerSettings(
        worker_id=settings.worker_id,
        rank=rank,
        size=settings.tensor_parallel,
        parent_pid=os.getpid(),
        collective_timeout_s=collective_timeout_s,
        model=resolve_model(settings.model),
        backend=choice.backend,
        quantization=choice.quantization,
        dtype=choice.dtype,
        kv_dtype=memory.layout.dtype,
        num_threads=settings.num_threads,
        max_model_len=choice.max_model_len,
        block_tokens=memory.layout.block_tokens,
        num_blocks=memory.num_blocks,
        pool_fd=-1 if memory.memfd is None else memory.memfd,
        pool_offset=memory.mapping_offset,
    )
