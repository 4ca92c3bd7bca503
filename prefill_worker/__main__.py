"""`python -m prefill_worker --worker-id prefill-0 --model ... --listen ...`: one prefill worker process."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.process_guard import run_process
from cluster.worker_process import WorkerContext, WorkerNode, run_worker


async def build(context: WorkerContext) -> WorkerNode:
    # Not at the top: numeric libraries read how many threads they may have when they are imported.
    from prefill_worker.prefill_node import PrefillNode

    return await PrefillNode.build(context)


async def start(arguments: Sequence[str]) -> None:
    await run_worker("prefill_worker", arguments, build)


if __name__ == "__main__":
    run_process("prefill_worker", start)
