"""`python -m tests.integration.eager_worker --role decode ...`: a worker on which every guess seems to pay.

Whether guesses are made follows from measured costs of steps, so on a busy or an unusual machine there may be none.
Here the costs are given; all else is the worker's own program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from cluster.process_guard import run_process
from cluster.worker_process import WorkerContext, WorkerNode, run_worker

PROGRAM: Final = "eager_worker"
GUESS_MS: Final = 0.001


async def build(context: WorkerContext) -> WorkerNode:
    # Not at the top: numeric libraries read how many threads they may have when they are imported.
    from decode_worker.decode_node import DecodeNode
    from decode_worker.speculation import opening
    from decode_worker.speculation.gate import StepCosts
    from prefill_worker.prefill_node import PrefillNode

    def flat_costs(*_: Any) -> StepCosts:
        return StepCosts(rows=(1, 16), step_ms=(10.0, 10.1), draft_ms=GUESS_MS)

    def cheap_guess(*_: Any) -> float:
        return GUESS_MS

    opening.__dict__.update(measure_step_costs=flat_costs, measure_guess_ms=cheap_guess)
    if context.settings.role == "prefill":
        return await PrefillNode.build(context)
    return await DecodeNode.build(context)


async def start(arguments: Sequence[str]) -> None:
    await run_worker(PROGRAM, arguments, build)


if __name__ == "__main__":
    run_process(PROGRAM, start)
