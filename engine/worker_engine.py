"""A worker's engine put together from its settings: KV memory, block pool, engine thread, and what carries steps out.

    engine: real   `engine.model_worker`   a model
    engine: mock   `engine.mock_worker`    a timing model, without torch

The same for both pools: what differs between a prefill and a decode worker is what they submit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import psutil
from tandem.v1 import handoff_pb2, membership_pb2, worker_pb2

from cluster.fallbacks import Fallbacks
from cluster.kv_layout import KvLayout
from cluster.worker_process import WorkerContext
from cluster.worker_settings import WorkerSettings
from engine.block_pool import BlockPool
from engine.block_store import BlockStore, OpenStore, no_store
from engine.drafting import Speculator
from engine.engine import Engine
from engine.kv_memory import KvMemory
from engine.kv_tiering import KvTiering
from engine.model_config import ModelConfig
from engine.pages_ahead import PagesAhead
from engine.request import EngineLimits, EngineLoad
from engine.step_budget import StepBudget
from engine.torch_import import import_torch_for_eager_use

if TYPE_CHECKING:  # a mock worker runs without torch
    from engine.grammar_compiler import GrammarCompiler
    from engine.runner_factory import BuiltRunner
    from engine.tensor_parallel.sharded_runner import ShardedRunner

OpenSpeculator = Callable[[WorkerSettings, "BuiltRunner"], Speculator | None]


@dataclass(frozen=True, slots=True)
class WorkerEngine:
    """The parts of one worker's engine. Owned by its node, which closes it."""

    kind: Literal["real", "mock"]
    engine: Engine
    pool: BlockPool
    memory: KvMemory
    config: ModelConfig
    max_model_len: int
    speculator: Speculator | None
    model_name: str  # as clients call it
    details: dict[str, str]  # what a status shows and nobody computes with
    grammars: GrammarCompiler | None = None  # None: this engine takes no constrained requests
    store: BlockStore | None = None  # the tiers below the pool
    sharded: ShardedRunner | None = None  # None: one process runs the whole model
    tiering: KvTiering | None = None  # the engine's; None as the store is
    pages_ahead: PagesAhead | None = None  # the memory's; None: first touches are waited for

    @property
    def layout(self) -> KvLayout:
        return self.memory.layout

    def record(self, context: WorkerContext) -> membership_pb2.WorkerRecord:
        """The part of a worker's membership record that its model and settings give."""
        return membership_pb2.WorkerRecord(
            identity=context.identity,
            model=self.model_name,
            model_fingerprint=self.config.fingerprint,
            layout=_layout_message(self.layout),
            max_model_len=self.max_model_len,
            tp_size=context.settings.tensor_parallel,
            vocab_size=self.config.vocab_size,
            engine=self.kind,
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
            max_model_len=self.max_model_len,
            block_conservation_error=census.conservation_error,
            owned_blocks=census.owned,
            rss_bytes=psutil.Process().memory_info().rss,
            details=self.details | (self.store.details() if self.store is not None else {}),
            counters=self.engine.counters(),
        )

    async def wait_for_failure(self) -> str:
        """Returns once the engine's thread has ended by itself: the worker cannot serve any more."""
        loop, has_ended = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop has ended, and everybody who waited with it
                loop.call_soon_threadsafe(has_ended.set)

        self.engine.tell_when_ended(tell)
        await has_ended.wait()
        return "the engine's thread has ended"

    def requests_under_way(self, are_any: bool) -> None:
        """Whether this worker has any: what can wait until after them shall."""
        if self.pages_ahead is not None:
            self.pages_ahead.requests_under_way(are_any)

    def reset_prefix_cache(self) -> int:
        """Forgets every prefix, in the pool and below. Gives how many blocks of the pool had one."""
        num_dropped = self.pool.reset_prefix_cache()
        if self.store is not None:
            self.store.clear()
        return num_dropped

    def close(self, timeout_s: float) -> None:
        """Ends the engine's threads and the other ranks, then gives the memory back."""
        self.engine.stop(timeout_s)
        if self.grammars is not None:
            self.grammars.close()
        if self.store is not None:
            self.store.close()
        if self.sharded is not None:
            self.sharded.close()
        if self.pages_ahead is not None:
            self.pages_ahead.close()
        self.memory.close()


def open_engine(
    context: WorkerContext,
    fallbacks: Fallbacks,
    open_store: OpenStore = no_store,
    open_speculator: OpenSpeculator | None = None,
) -> WorkerEngine:
    """Makes the engine that the settings name, not yet started. Raises `StartupError`.

    `open_speculator` may run the model: nobody owns a block yet.
    """
    # Not at the top: each kind imports only what it runs on.
    if context.settings.engine == "mock":
        from engine.mock_worker import open_mock_engine

        return open_mock_engine(context, open_store)
    if context.settings.backend != "triton":
        import_torch_for_eager_use()
    from engine.model_worker import open_model_engine

    return open_model_engine(context, fallbacks, open_store, open_speculator)


def engine_limits(settings: WorkerSettings, max_model_len: int) -> EngineLimits:
    """What one step and the queue before it may hold."""
    return EngineLimits(
        max_batch_tokens=max(settings.max_batch_tokens, settings.max_sequences),
        max_sequences=settings.max_sequences,
        max_waiting=settings.max_waiting,
        max_model_len=max_model_len,
    )


def step_budget(role: str, itl_slo_ms: float, block_tokens: int) -> StepBudget | None:
    """What prompts may take of a step beside decodes; None on a prefill worker, where nothing decodes, or unbounded."""
    if role == "prefill" or not itl_slo_ms:
        return None
    return StepBudget(itl_slo_ms, block_tokens, binds_alone=role == "decode")


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
        prefill_share=load.prefill_share,
        restore_ms_per_block=load.restore_ms_per_block,
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
