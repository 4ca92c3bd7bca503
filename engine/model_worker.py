"""A worker's engine that runs a model: weights and KV pool by `runner_factory`, steps by `model_executor`."""

from __future__ import annotations

import os
from typing import Protocol, runtime_checkable

import torch

from cluster.fallbacks import Fallbacks
from cluster.model_files import resolve_model
from cluster.tokenizer import load_tokenizer
from cluster.worker_process import WorkerContext
from engine.block_pool import BlockPool
from engine.block_store import OpenStore
from engine.dtype import cpu_features
from engine.engine import Engine
from engine.grammar_compiler import GrammarCompiler
from engine.kv_tiering import open_tiering
from engine.model_executor import ModelExecutor
from engine.pages_ahead import open_pages_ahead
from engine.runner_factory import build_runner
from engine.swap_space import SwapSpace
from engine.worker_engine import OpenSpeculator, WorkerEngine, engine_limits, step_budget

# What decides between kernels; a CPU has a hundred more.
SHOWN_CPU_FEATURES = frozenset(
    {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "sve"}
)


@runtime_checkable
class HasKernelDetails(Protocol):
    """A runner that can say more of its kernels than its backend's name."""

    def kernel_details(self) -> dict[str, str]: ...


def open_model_engine(
    context: WorkerContext, fallbacks: Fallbacks, open_store: OpenStore, open_speculator: OpenSpeculator | None
) -> WorkerEngine:
    """Loads the model and makes its engine, not yet started. Raises `StartupError`."""
    settings = context.settings
    # Only a transport that writes straight into the pool needs one that another process may map.
    built = build_runner(settings, shareable_pool="shm-direct" in settings.transports)
    if built.fallback is not None:
        fallback = built.fallback
        fallbacks.took(fallback.component, wanted=fallback.wanted, used=fallback.used, reason=fallback.reason)
    memory = built.memory
    limits = engine_limits(settings, built.max_model_len)
    pages_ahead = open_pages_ahead(memory, fallbacks)
    pool = BlockPool(
        memory.num_blocks,
        memory.layout.block_tokens,
        built.config.fingerprint,
        events=context.kv_events,
        on_first_use=None if pages_ahead is None else pages_ahead.blocks_used,
    )
    speculator = open_speculator(settings, built) if open_speculator is not None else None
    executor = ModelExecutor(
        built.runner,
        limits,
        memory.layout.block_tokens,
        memory,
        tap_layers=() if speculator is None else speculator.tap_layers,
    )
    grammars = GrammarCompiler(lambda: load_tokenizer(resolve_model(settings.model)), built.config.vocab_size)
    swap = SwapSpace(memory, memory.layout.block_bytes, settings.swap_bytes) if settings.swap_bytes else None
    store = open_store(settings, memory.layout, built.config.fingerprint)
    tiering = open_tiering(pool, memory, store, context.kv_events)
    return WorkerEngine(
        kind="real",
        engine=Engine(
            executor,
            pool,
            limits,
            speculator=speculator,
            grammars=grammars,
            swap=swap,
            step_budget=step_budget(settings.role, settings.itl_slo_ms, settings.block_tokens),
            tiering=tiering,
        ),
        pool=pool,
        memory=memory,
        config=built.config,
        max_model_len=built.max_model_len,
        speculator=speculator,
        model_name=settings.served_model_name or built.config.name,
        details={
            "pid": str(os.getpid()),
            "backend": built.runner.backend,
            "threads": str(torch.get_num_threads()),
            "cpu_features": " ".join(sorted(cpu_features() & SHOWN_CPU_FEATURES)),
            "huge_pages": str(memory.huge_pages),
            "kv_pool_bytes": str(memory.size_bytes),
            **(built.runner.kernel_details() if isinstance(built.runner, HasKernelDetails) else {}),
        },
        grammars=grammars,
        store=store,
        sharded=built.sharded,
        tiering=tiering,
        pages_ahead=pages_ahead,
    )
