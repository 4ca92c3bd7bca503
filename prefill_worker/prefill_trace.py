"""A transfer's span on its prefill worker: waiting, computing, and sending what computing did not hide."""

from __future__ import annotations

import time

from cluster.tracing import RequestSpan
from prefill_worker.prefill_flow import PrefillFlow


def end_span(span: RequestSpan, flow: PrefillFlow, worker_id: str) -> None:
    """The engine tells durations; they are laid end to end before the moment at which its output came."""
    output = flow.computed
    if output is not None:
        ended_s = flow.output_at_s
        started_s = ended_s - output.compute_s
        span.stage("queue", started_s - output.queued_s, started_s)
        span.stage("compute", started_s, ended_s)
        span.stage("send", ended_s, time.monotonic())
    attributes: dict[str, str | int | float] = {
        "tandem.worker_id": worker_id,
        "tandem.kv_bytes": flow.num_bytes_sent,
        "tandem.cached_tokens": flow.cached_tokens,
        "gen_ai.usage.input_tokens": flow.num_tokens,
    }
    span.end(attributes, "" if flow.is_acknowledged else "not acknowledged")
