"""A worker's engine put together from its settings: model runner, KV memory, block pool, engine thread.

The same for both pools: what differs between a prefill and a decode worker is what they submit.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
from tandem.v1 import handoff_pb2, membership_pb2, worker_pb2

from cluster.fallbacks import Fallbacks
from cluster.kv_layout import KvLayout
from cluster.worker_process import WorkerContext
from cluster.worker_settings import WorkerSettings
from engine.block_pool import BlockPool
from engine.drafting import Speculator
from engine.dtype import cpu_features
from engine.engine import Engine
from engine.model_config import ModelConfig
from engine.model_executor import ModelExecutor
from engine.request import EngineLimits, EngineLoad
from engine.runner_factory import BuiltRunner, build_runner

OpenSpeculator = Callable[[WorkerSettings, BuiltRunner], Speculator | None]

FAILURE_POLL_S = 0.25
# What decides between kernels; a CPU has a hundred more.
SHOWN_CPU_FEATURES = frozenset(
    {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "sve"}
)


@dataclass(frozen=True, slots=True)
class WorkerEngine:
    """The parts of one worker's engine. Owned by its node, which closes it."""

    engine: Engine
    pool: BlockPool
    built: BuiltRunner
    speculator: Speculator | None
    model_name: str  # as clients call it
    details: dict[str, str]  # what a status shows and nobody computes with

    @property
    def config(self) -> ModelConfig:
        return self.built.config

    @property
    def layout(self) -> KvLayout:
        return self.built.memory.layout

    def record(self, context: WorkerContext) -> membership_pb2.WorkerRecord:
        """The part of a worker's membership record that its model and settings give."""
        return membership_pb2.WorkerRecord(
            identity=context.identity,
            model=self.model_name,
            model_fingerprint=self.config.fingerprint,
            layout=_layout_message(self.layout),
            max_model_len=self.built.max_model_len,
            tp_size=1,
            vocab_size=self.config.vocab_size,
            engine="real",
        )

    def status(self, context: WorkerContext) -> worker_pb2.WorkerStatus:
        """The part of a worker's status that its engine gives."""
        census = self.pool.census()
        return worker_pb2.WorkerStatus(
            identity=context.identity,
            model=self.model_name,
            model_fingerprint=self.config.fingerprint,
            dtype=self.layout.dtype,
            block_tokens=self.layout.block_tokens,
            max_model_len=self.built.max_model_len,
            block_conservation_error=census.conservation_error,
            owned_blocks=census.owned,
            rss_bytes=psutil.Process().memory_info().rss,
            details=self.details,
            counters=self.speculator.counters() if self.speculator is not None else {},
        )

    async def wait_for_failure(self) -> str:
        """Returns once the engine's thread has ended by itself: the worker cannot serve any more."""
        while self.engine.is_running:  # noqa: ASYNC110  a thread's end is no event of the loop
            await asyncio.sleep(FAILURE_POLL_S)
        return "the engine's thread has ended"

    def close(self, timeout_s: float) -> None:
        """Ends the engine's thread, then gives the memory back."""
        self.engine.stop(timeout_s)
        self.built.memory.close()


def open_engine(
    context: WorkerContext, fallbacks: Fallbacks, open_speculator: OpenSpeculator | None = None
) -> WorkerEngine:
    """Loads the model and makes its engine, not yet started. Raises `StartupError`.

    `open_speculator` may run the model: nobody owns a block yet.
    """
    settings = context.settings
    # Only a transport that writes straight into the pool needs one that another process may map.
    built = build_runner(settings, shareable_pool="shm-direct" in settings.transports)
    if built.fallback is not None:
        fallback = built.fallback
        fallbacks.took(fallback.component, wanted=fallback.wanted, used=fallback.used, reason=fallback.reason)
    memory = built.memory
    limits = EngineLimits(
        max_batch_tokens=max(settings.max_batch_tokens, settings.max_sequences),
        max_sequences=settings.max_sequences,
        max_waiting=settings.max_waiting,
        max_model_len=built.max_model_len,
    )
    pool = BlockPool(memory.num_blocks, memory.layout.block_tokens, built.config.fingerprint, events=context.kv_events)
    executor = ModelExecutor(built.runner, limits, memory.layout.block_tokens, memory.copy_block)
    speculator = open_speculator(settings, built) if open_speculator is not None else None
    return WorkerEngine(
        engine=Engine(executor, pool, limits, speculator=speculator),
        speculator=speculator,
        pool=pool,
        built=built,
        model_name=settings.served_model_name or built.config.name,
        details={
            "pid": str(os.getpid()),
            "backend": built.runner.backend,
            "threads": str(torch.get_num_threads()),
            "cpu_features": " ".join(sorted(cpu_features() & SHOWN_CPU_FEATURES)),
            "huge_pages": str(memory.huge_pages),
            "kv_pool_bytes": str(memory.size_bytes),
        },
    )


def load_report(load: EngineLoad) -> worker_pb2.LoadReport:
    """An engine's load as it travels to routers and peers."""
    census = load.census
    return worker_pb2.LoadReport(
        running_requests=load.running,
        waiting_requests=load.waiting,
        waiting_tokens=load.waiting_tokens,
        total_blocks=census.total,
        free_blocks=census.free + census.cached,
        cached_blocks=census.cached,
        quarantined_blocks=census.quarantined,
        step_ms=load.step_ms,
        tokens_per_s=load.tokens_per_s,
        context_tokens=load.context_tokens,
    )


def _layout_message(layout: KvLayout) -> handoff_pb2.KvLayout:
    return handoff_pb2.KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        block_tokens=layout.block_tokens,
        order=layout.order,
    )
