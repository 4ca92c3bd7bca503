"""Carries each engine step from the engine's thread to the event loop and to the routers it belongs to.

    engine thread: sink(outputs) ──call_soon_threadsafe──> loop: each request's flow ──> one message for each router

What can wait between the two is bounded by what the engine runs: a sequence's tokens never exceed its max_tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cluster.worker_counters import WorkerCounters
from decode_worker.live_requests import LiveRequests
from decode_worker.router_session import RouterSession
from decode_worker.step_tokens import StepEntry
from engine.request import SequenceOutput


class EngineOutputs:
    """Made on the event loop; `sink` is the engine's."""

    def __init__(self, live: LiveRequests, counters: WorkerCounters) -> None:
        self._live = live
        self._counters = counters
        self._loop = asyncio.get_running_loop()

    def sink(self, outputs: Sequence[SequenceOutput]) -> None:
        """Called from the engine thread; returns at once."""
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: Sequence[SequenceOutput]) -> None:
        # Counted here and not by the engine's thread, which has a step to begin.
        self._counters.engine_step(len(outputs), sum(len(output.token_ids) for output in outputs))
        entries: dict[RouterSession, list[StepEntry]] = {}
        for output in outputs:
            flow = self._live.of_engine(output.request_id)
            entry = flow.on_output(output) if flow is not None else None
            if flow is not None and entry is not None:
                entries.setdefault(flow.session, []).append(entry)
        for session, session_entries in entries.items():
            session.send_step(session_entries)
