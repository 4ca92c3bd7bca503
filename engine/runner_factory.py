"""From a worker's settings to a model that runs: weights, dtype, KV pool and backend, chosen once at start.

    settings ─> weights ─> dtype ─> blocks ─> KV pool ─> backend ─> BuiltRunner

Whatever `auto` had to give up is in `BuiltRunner.fallback`: the worker logs, counts and publishes it. What a user asked
for by name is never replaced by something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from cluster.errors import StartupError
from cluster.kv_layout import FP8_KV, KvLayout
from cluster.model_files import resolve_model
from cluster.worker_settings import WorkerSettings
from engine.decode_graphs import capture_cuda_graph
from engine.device_kv_memory import DeviceKvMemory
from engine.dtype import cpu_features, resolve_dtype
from engine.kv_memory import KvMemory, layout_of
from engine.model_config import ModelConfig
from engine.model_loader import open_weights, refuse_pickle
from engine.step import ModelRunner
from engine.tensor_parallel.pool_heads import layout_of_heads
from engine.tensor_parallel.rank_runner import RunnerChoice, rank_device
from engine.tensor_parallel.shard import Shard, check_divides
from engine.tensor_parallel.sharded_kv_memory import ShardedKvMemory
from engine.tensor_parallel.sharded_runner import ShardedRunner, open_sharded_runner
from engine.torch_runner import TorchRunner
from engine.triton_runner import triton_runner
from engine.weights.weight_source import WeightFile

MAX_DEFAULT_KV_BYTES = 2**30
# Of what is free now: a machine runs several workers, and the weights of the next one must fit too.
DEFAULT_KV_SHARE = 0.1
# Of a GPU's memory that is free before the weights are there: one worker has the GPU.
GPU_KV_SHARE = 0.5
# These write straight into the pool of a decode worker.
POOL_WRITING_TRANSPORTS = frozenset({"shm-direct", "nixl"})
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Fallback:
    """A second choice that was taken at start."""

    component: str
    wanted: str
    used: str
    reason: str


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A model ready to run. Owned by the worker, which closes it after its engine has stopped."""

    runner: ModelRunner
    memory: KvMemory
    max_model_len: int
    fallback: Fallback | None

    @property
    def config(self) -> ModelConfig:
        return self.runner.config

    @property
    def sharded(self) -> ShardedRunner | None:
        """The runner where other processes are ranks of it: closed before the memory is."""
        return self.runner if isinstance(self.runner, ShardedRunner) else None


def build_runner(settings: WorkerSettings, *, shareable_pool: bool = False) -> BuiltRunner:
    """Loads the model. With `shareable_pool`, the KV pool is a memfd that another process on this host may map.

    Raises `StartupError` for whatever keeps the model from running. Side effect: sets torch's number of threads.
    """
    refuse_pickle(Path(settings.model))
    torch.set_num_threads(settings.num_threads)
    weights = open_weights(resolve_model(settings.model))
    try:
        check_divides(weights.config, settings.tensor_parallel)
        max_model_len = model_length(settings, weights.config)
        device = _device(settings)
        dtype = resolve_dtype(settings.dtype, device, cpu_features())
        layout = layout_of(weights.config, FP8_KV if settings.kv_dtype == "fp8" else dtype, settings.block_tokens)
        is_sharded = settings.tensor_parallel > 1
        memory = _open_memory(settings, layout, device, shareable=shareable_pool or is_sharded)
        try:
            pick_backend = _sharded_runner if is_sharded else _pick_backend
            runner, fallback = pick_backend(settings, weights, memory, dtype, max_model_len)
        except BaseException:
            memory.close()
            raise
        return BuiltRunner(runner, memory, max_model_len, fallback)
    finally:
        weights.close()


def _device(settings: WorkerSettings) -> torch.device:
    """Where the model runs. Raises `StartupError` for a transport that cannot reach a GPU's memory."""
    if settings.backend != "triton":
        return torch.device("cpu")
    direct = POOL_WRITING_TRANSPORTS.intersection(settings.transports)
    if direct and settings.role == "decode":
        raise StartupError(
            f"transport {min(direct)} writes into the KV pool by its address, and backend triton keeps it in GPU "
            "memory: use shm, tcp or ucx",
            param="transports",
        )
    return rank_device(settings.backend, settings.quantization, settings.kv_dtype, Shard(0, settings.tensor_parallel))


def _open_memory(settings: WorkerSettings, layout: KvLayout, device: torch.device, *, shareable: bool) -> KvMemory:
    if settings.backend != "triton":
        return KvMemory(layout, num_blocks(settings, layout, free_memory_bytes()), shareable=shareable)
    heads = Shard(0, settings.tensor_parallel).kv_heads(layout.num_kv_heads)
    own_layout = layout_of_heads(layout, heads)
    own = DeviceKvMemory(own_layout, _num_device_blocks(settings, layout, own_layout, device), device)
    return own if settings.tensor_parallel == 1 else ShardedKvMemory(layout, own, heads)


def _num_device_blocks(settings: WorkerSettings, layout: KvLayout, own_layout: KvLayout, device: torch.device) -> int:
    """What a user gives is the whole pool's size; by default each device gives a share of what it has."""
    if device.type != "cuda":  # the interpreter: the GPU's path, on the host's memory
        return num_blocks(settings, layout, free_memory_bytes())
    free_bytes = int(torch.cuda.mem_get_info(device)[0] * GPU_KV_SHARE)
    if settings.kv_cache_bytes:
        return num_blocks(settings, layout, free_bytes)
    return num_blocks(settings.model_copy(update={"kv_cache_bytes": free_bytes}), own_layout, free_bytes)


def num_blocks(settings: WorkerSettings, layout: KvLayout, free_bytes: int) -> int:
    """How many KV blocks the settings ask for; a share of `free_bytes` where they ask for nothing.

    Raises `StartupError` when that is less than one block.
    """
    if settings.num_kv_blocks:
        return settings.num_kv_blocks
    size_bytes = settings.kv_cache_bytes or min(MAX_DEFAULT_KV_BYTES, int(DEFAULT_KV_SHARE * free_bytes))
    if size_bytes < layout.block_bytes:
        raise StartupError(
            f"{size_bytes} bytes hold no KV block of {layout.block_bytes} bytes: set a larger kv_cache_bytes",
            param="kv_cache_bytes",
        )
    return size_bytes // layout.block_bytes


def model_length(settings: WorkerSettings, config: ModelConfig) -> int:
    """The longest sequence. Raises `StartupError` beyond what the model was trained for."""
    if settings.max_model_len > config.max_model_len:
        raise StartupError(
            f"max_model_len {settings.max_model_len} is beyond the model's own {config.max_model_len}: set less",
            param="max_model_len",
        )
    return settings.max_model_len or config.max_model_len


def free_memory_bytes() -> int:
    """What this process may still allocate: the machine's free memory, or less where a cgroup says so."""
    free: int = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free  # no cgroup v2, or not one of ours to read
    return free if limit == "max" else max(0, min(free, int(limit) - used))


def _pick_backend(
    settings: WorkerSettings, weights: WeightFile, memory: KvMemory, dtype: str, max_model_len: int
) -> tuple[ModelRunner, Fallback | None]:
    if settings.backend == "triton":
        on_gpu = triton_runner(
            weights, memory, quantization=settings.quantization, max_model_len=max_model_len, dtype=dtype
        )
        if torch.cuda.is_available() and settings.cuda_graphs == "auto":
            on_gpu.capture_decode_steps(
                capture_cuda_graph, max_sequences=settings.max_sequences, max_model_len=max_model_len
            )
        return on_gpu, None
    if settings.backend == "torch":
        _refuse_quantization(settings)
        return TorchRunner(weights, memory, dtype=dtype, max_model_len=max_model_len), None
    try:
        return _native_runner(settings, weights, memory, dtype), None
    except StartupError as error:
        # Blocks of a file have the same values in torch, only larger; int8 and int4 are a user's own choice to round.
        if settings.backend == "native" or settings.quantization in ("int8", "int4", "fp8"):
            raise
        runner = TorchRunner(weights, memory, dtype=dtype, max_model_len=max_model_len)
        return runner, Fallback("backend", wanted="native", used="torch", reason=error.message)


def _sharded_runner(
    settings: WorkerSettings, weights: WeightFile, memory: KvMemory, dtype: str, max_model_len: int
) -> tuple[ModelRunner, Fallback | None]:
    if settings.backend == "native":
        raise StartupError(
            "backend native computes in one process: set num_threads instead of tensor_parallel, or backend torch",
            param="tensor_parallel",
        )
    backend = "triton" if settings.backend == "triton" else "torch"
    if backend == "torch":
        _refuse_quantization(settings)
    runner = open_sharded_runner(
        settings, weights, memory, RunnerChoice(backend, settings.quantization, dtype, max_model_len)
    )
    if settings.backend == backend:
        return runner, None
    return runner, Fallback("backend", wanted="native", used="torch", reason="native does not shard a model")


def _refuse_quantization(settings: WorkerSettings) -> None:
    if settings.quantization != "none":
        raise StartupError(
            f"backend torch keeps weights in the model's dtype: quantization {settings.quantization} "
            "needs backend native",
            param="quantization",
        )


def _native_runner(settings: WorkerSettings, weights: WeightFile, memory: KvMemory, dtype: str) -> ModelRunner:
    if settings.quantization == "fp8":
        raise StartupError("quantization fp8 needs backend triton", param="quantization")
    if settings.kv_dtype == "fp8":
        raise StartupError(
            "backend native keeps KV as it computes: kv_dtype fp8 needs backend torch or triton", param="kv_dtype"
        )
    # Not at the top: where the library was not built, this file must still import.
    from engine.native_runner import NativeRunner

    return NativeRunner(
        weights.config,
        weights,
        memory,
        dtype=dtype,
        quantization=settings.quantization,
        # Few rows gain by fewer bytes; a prefill worker's many rows would pay for decoding them.
        compression="off" if settings.role == "prefill" else settings.weight_compression,
        num_threads=settings.num_threads,
        isa=settings.native_isa,
    )
