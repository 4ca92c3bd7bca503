"""`python -m tests.integration.oracle_worker --role decode ...`: a worker whose KV is checked, and that dies on cue.

A mock worker (real processes, scheduler, pool, handoff and transports; time from a timing model) with three additions:

    oracle    each step writes KV whose every element is a function of (token, layer, head, position); freed blocks are
              poisoned; a landed prompt is compared with the oracle before the engine may use it, and a prefix from
              the cache or a tier before anything is computed behind it
    cue       a file `<worker id>.cue` in the runtime folder, "receiving SIGKILL entered": when a transfer gets into
              that state, before (`entered`) or after (`acted`) its actions, the process signals itself; of a prefill
              worker with `BREAK` for a signal, its KV connections break instead
    ledger    `<worker id>.wrong` is written when a landed block holds anything else than the oracle says
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cluster.fallbacks import Fallbacks
from cluster.identity import BlockRef
from cluster.process_guard import run_process
from cluster.worker_process import WorkerContext, WorkerNode, run_worker
from decode_worker import prompt_landing
from decode_worker.decode_node import DecodeNode
from engine.executor import StepExecutor, StepResults
from engine.kv_memory import KvMemory
from engine.mock_worker import open_mock_engine
from engine.request import EngineRequest
from engine.step import LayerCallback
from engine.step_plan import ScheduledChunk
from engine.worker_engine import WorkerEngine
from kv_transfer.tiers.opening import open_tiers
from prefill_worker import prefill_flow
from prefill_worker.prefill_node import PrefillNode

Words: TypeAlias = npt.NDArray[np.uint16]
PROGRAM: Final = "oracle_worker"
BREAK: Final = "BREAK"


def cue_path(folder: Path, worker_id: str) -> Path:
    return folder / f"{worker_id}.cue"


def wrong_path(folder: Path, worker_id: str) -> Path:
    return folder / f"{worker_id}.wrong"


def oracle(token_ids: npt.NDArray[np.int32], positions: npt.NDArray[np.int64], shape: tuple[int, ...]) -> Words:
    """`[tokens, *shape]`: what each element of these tokens' KV must be."""
    mixed = token_ids.astype(np.uint32) * np.uint32(2654435761) + positions.astype(np.uint32) * np.uint32(40503)
    inner = np.arange(np.prod(shape), dtype=np.uint32) * np.uint32(9973)
    words: Words = ((mixed[:, None] ^ inner[None, :]) >> np.uint32(7)).astype(np.uint16)
    return words.reshape(-1, *shape)


class OraclePool:
    """One worker's KV memory as words: `[blocks, layers, 2, heads, block_tokens, head_dim]`."""

    def __init__(self, memory: KvMemory) -> None:
        layout = memory.layout
        self._block_tokens = layout.block_tokens
        self._cell_shape = (layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
        shape = (memory.num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_tokens, layout.head_dim)
        self._words: Words = memory._array.view(np.uint16).reshape(shape)

    def write(self, blocks: list[BlockRef], token_ids: npt.NDArray[np.int32], first_token: int) -> None:
        positions = np.arange(first_token, first_token + len(token_ids))
        table = np.array([ref.block for ref in blocks])
        rows, slots = table[positions // self._block_tokens], positions % self._block_tokens
        self._words[rows, :, :, :, slots, :] = oracle(token_ids, positions, self._cell_shape)

    def num_wrong(self, blocks: tuple[BlockRef, ...], token_ids: npt.NDArray[np.int32]) -> int:
        """Tokens of a prompt whose KV is not what it must be."""
        positions = np.arange(len(token_ids))
        table = np.array([ref.block for ref in blocks])
        rows, slots = table[positions // self._block_tokens], positions % self._block_tokens
        found = self._words[rows, :, :, :, slots, :]
        is_right = (found == oracle(token_ids, positions, self._cell_shape)).reshape(len(positions), -1).all(axis=1)
        return int(np.count_nonzero(~is_right))


class OracleExecutor:
    """Implements `StepExecutor`: the mock's, after the step's KV is written."""

    def __init__(self, executor: StepExecutor, pool: OraclePool, memory: KvMemory, wrong: Path) -> None:
        self.vocab_size = executor.vocab_size
        self.num_layers = executor.num_layers
        self._executor = executor
        self._pool = pool
        self._memory = memory
        self._wrong = wrong

    def execute(self, chunks: Any, layer_done: LayerCallback | None) -> StepResults:
        for chunk in chunks:
            self._write(chunk)
        return self._executor.execute(chunks, layer_done)

    def _write(self, chunk: ScheduledChunk) -> None:
        end_token = chunk.first_token + chunk.num_tokens
        if chunk.num_tokens > 1 and chunk.first_token:  # a prefix from a cache or a tier, or an earlier chunk's
            before = chunk.sequence.token_ids[: chunk.first_token]
            if num_wrong := self._pool.num_wrong(tuple(chunk.sequence.blocks), before):
                self._wrong.write_text(f"{num_wrong} of {len(before)} tokens that a chunk is computed behind")
        token_ids = chunk.sequence.token_ids[chunk.first_token : end_token]
        self._pool.write(chunk.sequence.blocks, token_ids, chunk.first_token)

    def copy_block(self, source: int, destination: int) -> None:
        self._memory.copy_block(source, destination)

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._memory.move_tokens(sources, destinations)

    def forget(self, sequence: Any) -> None:
        self._executor.forget(sequence)


def with_oracle(context: WorkerContext, parts: WorkerEngine) -> None:
    """Puts the oracle under a mock worker's engine."""
    engine, pool = parts.engine, OraclePool(parts.memory)
    wrong = wrong_path(context.settings.runtime_dir, context.settings.worker_id)
    engine._executor = OracleExecutor(engine._executor, pool, parts.memory, wrong)
    parts.pool._on_block_freed = parts.memory.poison
    for block in range(parts.memory.num_blocks):
        parts.memory.poison(block)
    submit = engine.submit

    def check_and_submit(request: EngineRequest) -> None:
        if request.landed is not None:
            num_wrong = pool.num_wrong(request.landed.blocks, request.token_ids)
            if num_wrong:
                message = f"{num_wrong} of {len(request.token_ids)} tokens of {request.request_id}"
                wrong.write_text(message)
        submit(request)

    engine.submit = check_and_submit  # type: ignore[method-assign]


class Cue:
    """Signals this process when a transfer enters the state that the file names, once."""

    def __init__(self, path: Path, apply: Callable[..., tuple[Any, Any]]) -> None:
        self._path = path
        self._apply = apply
        self.break_links: Callable[[], None] = lambda: None

    def apply(self, transfer: Any, event: Any, now: float) -> tuple[Any, Any]:
        after, actions = self._apply(transfer, event, now)
        if after.phase is not transfer.phase and self._path.exists():
            phase, name, moment = self._path.read_text().split()
            if phase == after.phase.value:
                self._path.unlink()
                if name == BREAK:
                    self.break_links()
                elif moment == "entered":
                    os.kill(os.getpid(), signal.Signals[name])
                else:
                    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.Signals[name])
        return after, actions


async def build(context: WorkerContext) -> WorkerNode:
    settings = context.settings
    parts = open_mock_engine(context, open_tiers)
    with_oracle(context, parts)
    path = cue_path(settings.runtime_dir, settings.worker_id)
    if settings.role == "prefill":
        cue = Cue(path, prefill_flow.apply)  # type: ignore[attr-defined]
        prefill_flow.apply = cue.apply  # type: ignore[attr-defined]
        node = PrefillNode(context, parts, Fallbacks())

        def break_links() -> None:
            for peer in node._service.connected.values():
                peer.pusher.destroy()

        cue.break_links = break_links
        return node
    prompt_landing.apply = Cue(path, prompt_landing.apply).apply  # type: ignore[attr-defined]
    return DecodeNode(context, parts, Fallbacks())


async def start(arguments: Sequence[str]) -> None:
    await run_worker(PROGRAM, arguments, build)


if __name__ == "__main__":
    run_process(PROGRAM, start)
