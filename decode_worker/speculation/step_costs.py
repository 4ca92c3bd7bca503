"""What a verification step costs on this machine: a few steps of 1 to 16 rows, measured before the engine starts."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from decode_worker.speculation.gate import StepCosts
from engine.step import ModelRunner, StepInput

MEASURED_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
NUM_REPEATS = 5
DRAFT_MS = 0.02  # a guess of the look-up drafters: a few dictionary reads


def measure_step_costs(
    runner: ModelRunner, num_blocks: int, block_tokens: int, clock: Callable[[], float] | None = None
) -> StepCosts:
    """Writes into the pool's first blocks, which nobody may own yet.

    The native backend computes on this thread, so its processor time is what counts: a busy machine, on which wall time
    has nothing to do with the number of rows, gives the same table. A GPU is waited for: wall time.
    """
    if clock is None:
        clock = time.thread_time if runner.backend == "native" else time.perf_counter
    rows = tuple(count for count in MEASURED_ROWS if count <= num_blocks * block_tokens)
    step_ms = []
    for count in rows:
        step = step_of_rows(count, block_tokens)
        runner.forward(step, None)  # the first one of a size pays for buffers
        times_ms = []
        for _ in range(NUM_REPEATS):
            started_s = clock()
            runner.forward(step, None)
            times_ms.append((clock() - started_s) * 1000)
        step_ms.append(min(times_ms))  # the least: what comes on top is of others
    return StepCosts(rows, tuple(step_ms), DRAFT_MS)


def step_of_rows(num_rows: int, block_tokens: int) -> StepInput:
    """One sequence with so many new tokens, all of whose logits are wanted."""
    ascending = np.arange(num_rows, dtype=np.int32)
    return StepInput(
        token_ids=np.zeros(num_rows, dtype=np.int32),
        positions=ascending,
        slots=ascending.astype(np.int64),
        query_starts=np.array([0, num_rows], dtype=np.int32),
        context_lens=np.array([num_rows], dtype=np.int32),
        block_tables=np.arange(-(-num_rows // block_tokens), dtype=np.int32)[None],
        logit_rows=ascending,
    )
