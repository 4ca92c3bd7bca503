"""An engine with its pool, runner and a sink that collects, for tests. Nothing here replaces a part of the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.identity import RequestId
from cluster.sampling_params import SamplingParams
from engine.block_pool import BlockPool
from engine.block_store import BlockStore
from engine.drafting import Speculator
from engine.engine import Engine
from engine.grammar_compiler import GrammarCompiler
from engine.kv_tiering import KvTiering
from engine.model_executor import ModelExecutor
from engine.request import EngineLimits, EngineRequest, FinishReason, SequenceOutput
from engine.swap_space import SwapSpace
from engine.waiting_queue import SchedulingPolicy
from tests.engine.hash_runner import CONFIG, HashRunner

DEADLINE_S = 60.0


class Collector:
    """A sink. `wait_until` polls on its condition, with a deadline."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.steps: list[list[SequenceOutput]] = []
        self._deadline_s = deadline_s
        self._changed = threading.Condition()

    def __call__(self, outputs: Sequence[SequenceOutput]) -> None:
        with self._changed:
            self.steps.append(list(outputs))
            self._changed.notify_all()

    def of(self, request_id: str) -> list[SequenceOutput]:
        with self._changed:
            return [output for step in self.steps for output in step if output.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.of(request_id) for token in output.token_ids]

    def end(self, request_id: str) -> SequenceOutput:
        """The last output of a request; waits for it."""
        self.wait_until(lambda: any(output.finish_reason is not None for output in self.of(request_id)))
        last = self.of(request_id)[-1]
        assert last.finish_reason is not None, "an output after the end"
        return last

    def wait_until(self, predicate: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(predicate, self._deadline_s), "the engine did not get there"


class EngineBench:
    """Use as a context manager: the engine stops and every block must be back."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_tokens: int = 4,
        policy: SchedulingPolicy = SchedulingPolicy.PRIORITY,
        is_gated: bool = False,
        clock: Any = time.monotonic,
        speculator: Speculator | None = None,
        grammars: GrammarCompiler | None = None,
        swap_bytes: int = 0,
        store: BlockStore | None = None,
        **limits: Any,
    ) -> None:
        self.runner = HashRunner(num_blocks, block_tokens)
        if is_gated:
            self.runner.gate = threading.Semaphore(0)
        self.pool = BlockPool(num_blocks, block_tokens, CONFIG.fingerprint, on_block_freed=self.runner.poison)
        self.limits = EngineLimits(**{"max_model_len": 256, "max_sequences": 16, "max_batch_tokens": 64, **limits})
        executor = ModelExecutor(self.runner, self.limits, block_tokens, self.runner)
        self.swap = SwapSpace(self.runner, 8 * block_tokens, swap_bytes) if swap_bytes else None
        self.tiering = KvTiering(self.pool, self.runner, store, clock) if store is not None else None
        self.engine = Engine(
            executor,
            self.pool,
            self.limits,
            policy=policy,
            speculator=speculator,
            grammars=grammars,
            swap=self.swap,
            tiering=self.tiering,
            clock=clock,
        )
        self.sink = Collector()
        self.owned_outside = 0  # blocks that the test keeps

    def __enter__(self) -> EngineBench:
        self.engine.start(self.sink)
        return self

    def __exit__(self, *error: object) -> None:
        self.permit(100_000)
        self.engine.stop(DEADLINE_S)
        if error[0] is None:
            census = self.pool.census()
            assert census.conservation_error == 0
            assert census.owned == self.owned_outside, "blocks leaked"
            assert self.swap is None or self.swap.used_bytes == 0, "swapped KV leaked"

    def permit(self, steps: int) -> None:
        if self.runner.gate is not None:
            self.runner.gate.release(steps)

    def submit(self, request_id: str, prompt: Sequence[int], **fields: Any) -> EngineRequest:
        request = make_request(request_id, prompt, **fields)
        self.engine.submit(request)
        return request

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        """All prompts at once; gives their tokens."""
        for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            self.submit(f"r{index}", prompt, sampling=sampling)
        for index in range(len(prompts)):
            end = self.sink.end(f"r{index}")
            assert end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), end
        return [self.sink.tokens(f"r{index}") for index in range(len(prompts))]


def make_request(request_id: str, prompt: Sequence[int], **fields: Any) -> EngineRequest:
    """`max_tokens`, `temperature` and so on may stand beside the request's own fields."""
    own = {name: fields.pop(name) for name in tuple(fields) if name in EngineRequest.__slots__}
    if "sampling" not in own:
        own["sampling"] = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **fields})
    own.setdefault("scope_key", b"tenant")
    return EngineRequest(RequestId(request_id), np.array(prompt, dtype=np.int32), **own)
