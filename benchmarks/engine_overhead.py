"""What the engine's own work costs in a step: scheduler, array builder, and everything but the model.

    python -m benchmarks.engine_overhead

The model is left out by a runner that gives constant logits, so the figures are pure overhead. Medians of CPU time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from cluster.identity import RequestId
from cluster.sampling_params import SamplingParams
from engine.block_pool import BlockPool
from engine.kv_memory import KvMemory, layout_of
from engine.model_config import ModelConfig
from engine.model_executor import ModelExecutor
from engine.request import EngineLimits, EngineRequest
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step import LayerCallback, StepInput, StepOutput
from engine.step_builder import StepBuilder
from engine.step_plan import StepPlan

Result = TypeVar("Result")

BATCH_SIZES = (1, 16, 64)
QUEUE_LENGTHS = (0, 16, 5000)  # the first 8 that do not fit are looked past in each step, however many wait
VOCAB_SIZE = 49_152
BLOCK_TOKENS = 16
PROMPT_TOKENS = 128
NUM_STEPS = 300
LIMITS = EngineLimits(max_batch_tokens=16_384, max_sequences=64, max_model_len=4096, max_waiting=10_000)
CONFIG = ModelConfig(
    architecture="llama", name="constant", vocab_size=VOCAB_SIZE, hidden_size=1, intermediate_size=1, num_layers=1,
    num_heads=1, num_kv_heads=1, head_dim=1, rope_theta=1e4, rms_norm_eps=1e-5, max_model_len=4096, tie_embeddings=True,
)  # fmt: skip


class ConstantRunner:
    """Implements `engine.step.ModelRunner` without computing anything."""

    def __init__(self) -> None:
        self.config = CONFIG
        self.backend = "constant"
        self.verifies_trees = False
        self._logits = torch.zeros(LIMITS.max_sequences, VOCAB_SIZE)

    def forward(self, step: StepInput, layer_done: LayerCallback | None) -> StepOutput:
        num_rows = len(step.logit_rows)
        return StepOutput(self._logits[:num_rows], torch.zeros(num_rows, 1))


def main() -> None:
    """Prints one line for each batch size and queue length."""
    torch.set_num_threads(1)
    print(f"{'batch':>6} {'queue':>6} {'schedule us':>12} {'build us':>9} {'greedy sample us':>17}")
    for batch_size in BATCH_SIZES:
        for queue_length in QUEUE_LENGTHS:
            schedule_us, build_us, execute_us = measure(batch_size, queue_length)
            sample_us = execute_us - build_us
            print(f"{batch_size:6} {queue_length:6} {schedule_us:12.1f} {build_us:9.1f} {sample_us:17.1f}")


def measure(batch_size: int, queue_length: int) -> tuple[float, float, float]:
    """Microseconds of schedule, build, and build + sample, in decode steps of one batch in front of one queue."""
    prompt_blocks = batch_size * PROMPT_TOKENS // BLOCK_TOKENS
    decode_blocks = batch_size * (NUM_STEPS // BLOCK_TOKENS + 2)
    pool = BlockPool(prompt_blocks + decode_blocks, BLOCK_TOKENS, "constant")
    scheduler = Scheduler(pool, replace(LIMITS, watermark_blocks=decode_blocks))
    for index in range(batch_size):
        scheduler.add(_sequence(pool, index, PROMPT_TOKENS))
    _advance(scheduler.schedule())
    for index in range(queue_length):  # the watermark keeps them out
        scheduler.add(_sequence(pool, batch_size + index, PROMPT_TOKENS))
    builder = StepBuilder(LIMITS, BLOCK_TOKENS)
    executor = ModelExecutor(
        ConstantRunner(), LIMITS, BLOCK_TOKENS, KvMemory(layout_of(CONFIG, "float32", BLOCK_TOKENS), 1)
    )
    times: list[tuple[float, float, float]] = []
    for _ in range(NUM_STEPS):
        plan, schedule_us = _timed(scheduler.schedule)
        _, build_us = _timed(partial(builder.build, plan.chunks))
        _, execute_us = _timed(partial(executor.execute, plan.chunks, None))
        times.append((schedule_us, build_us, execute_us))
        _advance(plan)
    schedule, build, execute = zip(*times, strict=True)
    return statistics.median(schedule), statistics.median(build), statistics.median(execute)


def _sequence(pool: BlockPool, index: int, num_tokens: int) -> Sequence:
    request = EngineRequest(
        RequestId(f"r{index}"),
        np.arange(index, index + num_tokens, dtype=np.int32),
        SamplingParams(max_tokens=LIMITS.max_model_len, temperature=0.0),
        scope_key=b"",
    )
    return Sequence(request, pool.new_chain(b""), LIMITS.max_model_len, index, 0.0)


def _advance(plan: StepPlan) -> None:
    for chunk in plan.chunks:
        chunk.sequence.num_computed += chunk.num_tokens
        chunk.sequence.append(1)


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    started_ns = time.process_time_ns()
    result = work()
    return result, (time.process_time_ns() - started_ns) / 1000


if __name__ == "__main__":
    main()
