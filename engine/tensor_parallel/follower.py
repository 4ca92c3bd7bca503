"""`python -m engine.tensor_parallel.follower`: one rank behind rank 0. It computes each step that rank 0 sends.

    started ──> imported ──(all are)──> connected ──> model loaded ──> steps, until rank 0 closes the connection
            HERE           <── GO                      READY | why not

It knows no requests, no wire protocol and no peers outside its worker, and ends with it, whatever way that ends.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from cluster.errors import StartupError
from cluster.logs import configure_logs
from cluster.process_guard import EXIT_STARTUP_ERROR, die_with_parent
from cluster.settings_flags import parse_settings
from engine.device_kv_memory import DeviceKvMemory
from engine.kv_memory import layout_of
from engine.model_loader import open_weights
from engine.step import ModelRunner
from engine.tensor_parallel.pool_heads import MappedPool, PoolHeads, layout_of_heads
from engine.tensor_parallel.rank_cells import CellServer
from engine.tensor_parallel.rank_runner import RunnerChoice, open_rank_runner, rank_device
from engine.tensor_parallel.ranks import COLLECTIVE_TIMEOUT_S, ProcessRanks
from engine.tensor_parallel.shard import Shard
from engine.tensor_parallel.step_message import receive_step
from engine.torch_runner import PoolTensor

HERE, GO, READY = b"H", b"G", b"R"


class FollowerSettings(BaseModel):
    """What rank 0 tells a follower: whatever it has decided itself, so that nothing is decided twice."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker_id: str
    rank: int
    size: int
    parent_pid: int
    control_fd: int = -1  # this, the next one and the rendezvous: known once the process is started
    cells_fd: int = -1  # where rank 0 reads and writes cells of a pool in this rank's device
    rendezvous: Path = Path()
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S
    model: Path
    backend: str
    quantization: str
    dtype: str
    kv_dtype: str
    num_threads: int
    max_model_len: int
    block_tokens: int
    num_blocks: int
    pool_fd: int = -1  # the pool of all ranks; -1: each has its heads in its device
    pool_offset: int = 0


def follow(arguments: Sequence[str]) -> None:
    """Returns when rank 0 has closed the connection. Raises `StartupError`, and whatever breaks a step."""
    settings = parse_settings(FollowerSettings, "follower", arguments)
    die_with_parent(settings.parent_pid)
    # A terminal or a service manager signals the whole group: rank 0 drains, and needs its ranks for that.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    configure_logs("follower", f"{settings.worker_id}/{settings.rank}")
    with socket.socket(fileno=settings.control_fd) as control:
        control.sendall(HERE)
        if control.recv(1) != GO:
            return
        try:
            runner, pool = _open_runner(settings)
        except StartupError as error:
            control.sendall(error.message.encode())
            raise
        cells = CellServer(socket.socket(fileno=settings.cells_fd), pool) if isinstance(pool, DeviceKvMemory) else None
        control.sendall(READY)
        while (step := receive_step(control)) is not None:
            runner.forward(step, None)
        if cells is not None:
            cells.close()


def _open_runner(settings: FollowerSettings) -> tuple[ModelRunner, PoolTensor]:
    """And the rank's pool."""
    torch.set_num_threads(settings.num_threads)
    shard = Shard(settings.rank, settings.size)
    device = rank_device(settings.backend, settings.quantization, settings.kv_dtype, shard)
    ranks = ProcessRanks(settings.rank, settings.size, settings.rendezvous, device, settings.collective_timeout_s)
    weights = open_weights(settings.model)
    try:
        layout = layout_of(weights.config, settings.kv_dtype, settings.block_tokens)
        heads = shard.kv_heads(layout.num_kv_heads)
        pool: PoolTensor
        if settings.pool_fd < 0:
            pool = DeviceKvMemory(layout_of_heads(layout, heads), settings.num_blocks, device)
        else:
            pool = PoolHeads(MappedPool(layout, settings.num_blocks, settings.pool_fd, settings.pool_offset), heads)
        choice = RunnerChoice(settings.backend, settings.quantization, settings.dtype, settings.max_model_len)
        return open_rank_runner(weights, pool, ranks, choice), pool
    finally:
        weights.close()


def main() -> None:
    try:
        follow(sys.argv[1:])
    except StartupError as error:
        sys.stderr.write(f"follower: {error.message}\n")
        sys.exit(EXIT_STARTUP_ERROR)


if __name__ == "__main__":
    main()
