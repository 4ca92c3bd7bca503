"""A real worker's engine: what is put together around the model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tandem.v1 import common_pb2

from cluster.fallbacks import Fallbacks
from cluster.rpc_security import RpcSecurity
from cluster.worker_process import WorkerContext
from cluster.worker_settings import WorkerSettings
from engine import native_library, pages_ahead
from engine.kv_memory import HUGE_PAGE_BYTES
from engine.worker_engine import WorkerEngine, open_engine
from tests.engine.tiny_models import random_model, save_safetensors

DEADLINE_S = 60.0
NUM_BLOCKS = 1024  # several huge pages


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerEngine]:
    monkeypatch.setattr(pages_ahead, "NOW_BYTES", 0)
    monkeypatch.setattr(pages_ahead, "LATER_BYTES", 0)
    settings = WorkerSettings(
        worker_id="w", model=str(save_safetensors(random_model("llama"), tmp_path / "model")),
        listen="unix:/unused", runtime_dir=tmp_path, num_kv_blocks=NUM_BLOCKS,
    )  # fmt: skip
    identity = common_pb2.WorkerIdentity(worker_id="w", incarnation="i")
    opened = open_engine(WorkerContext(settings, identity, RpcSecurity(""), redis=None, kv_events=None), Fallbacks())
    yield opened
    opened.close(DEADLINE_S)


@pytest.mark.skipif(not native_library.is_available(), reason="the native library is not built")
def test_pages_follow_the_blocks_that_the_pool_gives_out(parts: WorkerEngine) -> None:
    ahead = parts.pages_ahead
    assert ahead is not None
    assert ahead.touched_bytes == 0
    assert parts.memory.size_bytes > 2 * HUGE_PAGE_BYTES
    assert parts.pool.allocate(NUM_BLOCKS) is not None
    deadline = time.monotonic() + DEADLINE_S
    while ahead.touched_bytes < parts.memory.size_bytes:
        assert time.monotonic() < deadline
