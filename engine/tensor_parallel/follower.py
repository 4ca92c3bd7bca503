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
from engine.kv_memory import layout_of
from engine.model_loader import open_weights
from engine.step import ModelRunner
from engine.tensor_parallel.pool_heads import MappedPool
from engine.tensor_parallel.rank_runner import RunnerChoice, open_rank_runner
from engine.tensor_parallel.ranks import COLLECTIVE_TIMEOUT_S, ProcessRanks
from engine.tensor_parallel.step_message import receive_step

HERE, GO, READY = b"H", b"G", b"R"


class FollowerSettings(BaseModel):
    """What rank 0 tells a follower: whatever it has decided itself, so that nothing is decided twice."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker_id: str
    rank: int
    size: int
    parent_pid: int
    control_fd: int = -1  # this and the rendezvous: known once the process is started
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
    pool_fd: int
    pool_offset: int


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
            runner = _open_runner(settings)
        except StartupError as error:
            control.sendall(error.message.encode())
            raise
        control.sendall(READY)
        while (step := receive_step(control)) is not None:
            runner.forward(step, None)


def _open_runner(settings: FollowerSettings) -> ModelRunner:
    torch.set_num_threads(settings.num_threads)
    ranks = ProcessRanks(
        settings.rank, settings.size, settings.rendezvous, torch.device("cpu"), settings.collective_timeout_s
    )
    weights = open_weights(settings.model)
    try:
        layout = layout_of(weights.config, settings.kv_dtype, settings.block_tokens)
        pool = MappedPool(layout, settings.num_blocks, settings.pool_fd, settings.pool_offset)
        choice = RunnerChoice(settings.backend, settings.quantization, settings.dtype, settings.max_model_len)
        return open_rank_runner(weights, pool, ranks, choice)
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
