"""A worker's engine that computes nothing: the timing model of its settings, a small KV pool, everything else real.

Handoff, landing, block pool, prefix cache, KV events and limits are those of a real worker; a laptop hosts dozens. No
torch is imported. The vocabulary and the context length come from the model's file, its weights are not read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

from cluster.errors import StartupError
from cluster.kv_layout import ELEMENT_BYTES, KvLayout
from cluster.model_files import resolve_model
from cluster.worker_process import WorkerContext
from cluster.worker_settings import WorkerSettings
from engine.block_pool import BlockPool
from engine.block_store import OpenStore, no_store
from engine.kv_memory import KvMemory
from engine.kv_tiering import open_tiering
from engine.mock_engine import MockEngine, StepTiming
from engine.model_config import ModelConfig
from engine.worker_engine import WorkerEngine, engine_limits

# A pool that costs next to nothing to fill and to move: 2 KiB for a block of 16 tokens, in four layers.
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, DTYPE = 4, 1, 8, "float16"
DEFAULT_NUM_BLOCKS = 8192
FINGERPRINT_BYTES = 16


def open_mock_engine(context: WorkerContext, open_store: OpenStore = no_store) -> WorkerEngine:
    """Not yet started. Raises `StartupError` for settings that only a model can serve."""
    settings = context.settings
    if settings.speculation != "off":
        raise StartupError("the mock engine guesses no tokens: leave speculation off", param="speculation")
    config = _read_config(resolve_model(settings.model))
    max_model_len = settings.max_model_len or config.max_model_len
    layout = KvLayout(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, DTYPE, ELEMENT_BYTES[DTYPE], settings.block_tokens)
    memory = KvMemory(layout, _num_blocks(settings, layout), shareable="shm-direct" in settings.transports)
    pool = BlockPool(memory.num_blocks, layout.block_tokens, config.fingerprint, events=context.kv_events)
    store = open_store(settings, layout, config.fingerprint)
    tiering = open_tiering(pool, memory, store, context.kv_events)
    engine = MockEngine(
        StepTiming(prefill=settings.mock_prefill_ms, decode=settings.mock_decode_ms),
        pool,
        engine_limits(settings, max_model_len),
        vocab_size=config.vocab_size,
        num_layers=NUM_LAYERS,
        tiering=tiering,
    )
    return WorkerEngine(
        kind="mock",
        engine=engine,
        pool=pool,
        memory=memory,
        config=config,
        max_model_len=max_model_len,
        speculator=None,
        model_name=settings.served_model_name or config.name,
        details={"pid": str(os.getpid()), "backend": "mock", "kv_pool_bytes": str(memory.size_bytes)},
        store=store,
        tiering=tiering,
    )


def _num_blocks(settings: WorkerSettings, layout: KvLayout) -> int:
    if settings.num_kv_blocks:
        return settings.num_kv_blocks
    return max(1, settings.kv_cache_bytes // layout.block_bytes) if settings.kv_cache_bytes else DEFAULT_NUM_BLOCKS


def _read_config(path: Path) -> ModelConfig:
    """The model's config under a fingerprint that no real worker has: mock KV must never meet real KV."""
    if path.is_dir():
        from engine.weights.hugging_face_config import read_config

        config = read_config(path)
    else:
        from cluster.gguf_file import GgufFile
        from engine.weights.gguf_config import config_of

        with GgufFile(path) as file:
            config = config_of(file)
    described = f"mock {config.name} {config.vocab_size}".encode()
    return dataclasses.replace(
        config, fingerprint=hashlib.blake2b(described, digest_size=FINGERPRINT_BYTES).hexdigest()
    )
