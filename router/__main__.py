"""`python -m router --model ... --runtime-dir ...`: one router process."""

from __future__ import annotations

import uvloop

from cluster.process_guard import run_process
from router.router_process import start

if __name__ == "__main__":
    run_process("router", start, loop_factory=uvloop.new_event_loop)
