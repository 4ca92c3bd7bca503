"""A mock worker's engine: no torch, its own fingerprint, the model's vocabulary, a clear word for what it cannot."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tandem.v1 import common_pb2

from cluster.errors import StartupError
from cluster.fallbacks import Fallbacks
from cluster.rpc_security import RpcSecurity
from cluster.worker_process import WorkerContext
from cluster.worker_settings import WorkerSettings
from engine.mock_worker import DEFAULT_NUM_BLOCKS
from engine.model_loader import open_weights
from engine.worker_engine import open_engine
from tests.engine.tiny_models import random_model, save_safetensors

NO_TORCH = """
import sys
import prefill_worker.prefill_node, decode_worker.decode_node, engine.mock_worker, engine.weights.hugging_face_config
sys.exit("torch" in sys.modules)
"""


def context_of(model: Path, **fields: Any) -> WorkerContext:
    settings = WorkerSettings(
        worker_id="w", model=str(model), listen="unix:/unused", runtime_dir=model, engine="mock", **fields
    )
    identity = common_pb2.WorkerIdentity(worker_id="w", incarnation="i")
    return WorkerContext(settings, identity, RpcSecurity(""), redis=None, kv_events=None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_safetensors(random_model("qwen3"), tmp_path_factory.mktemp("tiny") / "model")


def test_a_mock_worker_imports_no_torch() -> None:
    assert subprocess.run([sys.executable, "-c", NO_TORCH], check=False, timeout=60).returncode == 0


def test_it_has_the_models_vocabulary_and_a_fingerprint_that_no_real_worker_has(model: Path) -> None:
    parts = open_engine(context_of(model), Fallbacks())
    try:
        assert parts.kind == "mock"
        with contextlib.closing(open_weights(model)) as weights:
            assert parts.config.vocab_size == weights.config.vocab_size
            assert parts.config.fingerprint != weights.config.fingerprint
        assert parts.record(context_of(model)).engine == "mock"
        assert parts.pool.num_blocks == DEFAULT_NUM_BLOCKS
    finally:
        parts.close(5.0)


def test_the_pool_is_as_large_as_the_settings_say(model: Path) -> None:
    for fields, expected in (({"num_kv_blocks": 7}, 7), ({"kv_cache_bytes": 10_240}, 5), ({"kv_cache_bytes": 1}, 1)):
        parts = open_engine(context_of(model, **fields), Fallbacks())
        assert parts.pool.num_blocks == expected
        parts.close(5.0)


def test_speculation_is_refused_at_the_start(model: Path) -> None:
    with pytest.raises(StartupError, match="speculation"):
        open_engine(context_of(model, speculation="ngram"), Fallbacks())
