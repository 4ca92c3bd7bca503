"""`python -m decode_worker --worker-id decode-0 --model ... --listen ...`: one decode worker process."""

from __future__ import annotations

from collections.abc import Sequence

import uvloop

from cluster.process_guard import run_process
from cluster.worker_process import WorkerContext, WorkerNode, run_worker


async def build(context: WorkerContext) -> WorkerNode:
    # Not at the top: numeric libraries read how many threads they may have when they are imported.
    from decode_worker.decode_node import DecodeNode

    return await DecodeNode.build(context)


async def start(arguments: Sequence[str]) -> None:
    await run_worker("decode_worker", arguments, build)


if __name__ == "__main__":
    run_process("decode_worker", start, loop_factory=uvloop.new_event_loop)
