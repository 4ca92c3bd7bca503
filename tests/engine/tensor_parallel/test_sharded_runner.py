"""`engine.tensor_parallel.sharded_runner` with real processes: the same tokens, a loss that is told, nothing left."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from cluster.errors import EngineFailure, StartupError
from cluster.worker_settings import WorkerSettings
from engine.kv_memory import KvMemory, layout_of
from engine.model_loader import open_weights
from engine.runner_factory import build_runner
from engine.tensor_parallel.rank_runner import RunnerChoice
from engine.tensor_parallel.sharded_runner import ShardedRunner, open_sharded_runner
from engine.weights.weight_source import WeightFile
from tests.engine.steps import BlockDealer, greedy_tokens, make_step, prompt_logits
from tests.engine.tiny_models import random_model, save_safetensors
from tests.exactness.make_greedy_reference import REFERENCE_FILE

TOLD_TIMEOUT_S = 60.0
CHOICE = RunnerChoice("torch", "none", "float32", 512)


def settings(model: Path, runtime_dir: Path, size: int, **values: Any) -> WorkerSettings:
    return WorkerSettings(
        worker_id="w",
        model=str(model),
        listen="127.0.0.1:0",
        runtime_dir=runtime_dir,
        backend="torch",
        dtype="float32",
        num_kv_blocks=32,
        tensor_parallel=size,
        **values,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_safetensors(random_model("llama"), tmp_path / "model")


@pytest.fixture
def weights(model: Path) -> Iterator[WeightFile]:
    weights = open_weights(model)
    yield weights
    weights.close()


@pytest.fixture
def memory(weights: WeightFile) -> Iterator[KvMemory]:
    memory = KvMemory(layout_of(weights.config, "float32", 16), 32, shareable=True)
    yield memory
    memory.close()


def test_killed_rank_is_told_at_once_and_nothing_is_left(
    model: Path, weights: WeightFile, memory: KvMemory, tmp_path: Path
) -> None:
    reasons: list[str] = []
    told = threading.Event()

    def on_lost(reason: str) -> None:
        reasons.append(reason)
        told.set()

    runner = open_sharded_runner(settings(model, tmp_path, 2), weights, memory, CHOICE, on_lost=on_lost)
    dealer = BlockDealer(memory)
    assert runner.forward(make_step(dealer, [(dealer.sequence([2, 3, 4]), 3)]), None).logits.isfinite().all()
    details = runner.kernel_details()
    own_pid, follower_pid = (int(pid) for pid in details["rank_pids"].split())
    assert (details["tensor_parallel"], own_pid) == ("2", os.getpid())
    assert list(tmp_path.glob("ranks-*")) == []  # where they met is gone once they have

    os.kill(follower_pid, signal.SIGKILL)
    assert told.wait(TOLD_TIMEOUT_S), "nobody said that the rank is gone, though no step ran"
    with pytest.raises(EngineFailure, match="a sharded step failed"):
        runner.forward(make_step(dealer, [(dealer.sequence([2, 3, 4]), 3)]), None)
    runner.close()
    assert reasons == [f"rank 1 (process {follower_pid}) was killed by signal 9"]
    assert not psutil.pid_exists(follower_pid)


def test_rank_that_cannot_load_says_why_and_no_process_stays(
    model: Path, weights: WeightFile, memory: KvMemory, tmp_path: Path
) -> None:
    children = set(psutil.Process().children())
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(b"GGUF")
    with pytest.raises(StartupError, match=r"rank 1: .*torn\.gguf"):
        open_sharded_runner(settings(torn, tmp_path, 2), weights, memory, CHOICE)
    assert set(psutil.Process().children()) == children
    assert list(tmp_path.glob("ranks-*")) == []


def test_what_does_not_shard_is_refused_by_its_name(model: Path, tmp_path: Path) -> None:
    for changes, what in (
        ({"backend": "native"}, "backend native computes in one process: set num_threads"),
        ({"quantization": "int8"}, "quantization int8"),
        ({"tensor_parallel": 3}, "4 heads, which tensor_parallel 3 does not divide"),
    ):
        with pytest.raises(StartupError, match=what):
            build_runner(settings(model, tmp_path, 2).model_copy(update=changes))


def test_triton_over_two_ranks_leaves_the_kv_and_gives_the_logits_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter; each rank has its heads in a pool of its own, as on a GPU."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = save_safetensors(random_model("llama", num_hidden_layers=2, num_attention_heads=2), tmp_path / "model")
    logits, pools = [], []
    for size, backend in ((1, "torch"), (2, "triton")):
        built = build_runner(settings(model, tmp_path, size).model_copy(update={"backend": backend}))
        logits.append(prompt_logits(built.runner, BlockDealer(built.memory), list(range(2, 22)), 20))
        content = b"".join(bytes(run) for run in built.memory.runs(range(8, 32), 0, 2))
        pools.append(np.frombuffer(content, np.float32))
        if built.sharded is not None:
            built.sharded.close()
        built.memory.close()
    assert torch.allclose(logits[0], logits[1], atol=1e-4)
    assert np.allclose(pools[0], pools[1], atol=1e-4, equal_nan=True)


@pytest.mark.model
def test_real_model_over_three_ranks_gives_the_reference_tokens(default_model_path: Path, tmp_path: Path) -> None:
    """9 heads and 3 KV heads: one KV head for each rank. Backend auto takes the one that shards, and says so."""
    rows = [row for row in json.loads(REFERENCE_FILE.read_text()) if len(row["prompt"]) in (15, 17)]
    built = build_runner(settings(default_model_path, tmp_path, 3).model_copy(update={"backend": "auto"}))
    assert isinstance(built.runner, ShardedRunner)
    assert built.fallback is not None
    assert (built.fallback.wanted, built.fallback.used, built.runner.backend) == ("native", "torch", "torch")
    tokens = greedy_tokens(built.runner, BlockDealer(built.memory), [row["prompt"] for row in rows], 8)
    assert tokens == [row["tokens"][:8] for row in rows]
    followers = [psutil.Process(int(pid)) for pid in built.runner.kernel_details()["rank_pids"].split()[1:]]
    built.runner.close()
    assert not any(follower.is_running() for follower in followers)
    built.memory.close()
