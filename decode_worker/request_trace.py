"""A request's span on its decode worker, cut into stages from its timeline when it ends."""

from __future__ import annotations

from cluster.tracing import RequestSpan
from decode_worker.request_timeline import RequestMoment, RequestTimeline

# What lies between two moments; one that a request never reached leaves its stage out.
_STAGES = (
    ("reserve", RequestMoment.RECEIVED, RequestMoment.RESERVED),
    ("remote prefill", RequestMoment.REQUESTED, RequestMoment.VERIFIED),
    ("transfer", RequestMoment.FIRST_FRAME, RequestMoment.VERIFIED),
    ("first token", RequestMoment.RECEIVED, RequestMoment.FIRST_TOKEN),
    ("generate", RequestMoment.FIRST_TOKEN, RequestMoment.ENDED),
)


def end_span(span: RequestSpan, timeline: RequestTimeline, num_generated: int, error: str) -> None:
    for name, first, last in _STAGES:
        span.stage(name, timeline.moments.get(first, 0.0), timeline.moments.get(last, -1.0))
    attributes: dict[str, str | int | float] = {
        "tandem.worker_id": timeline.decode_worker_id,
        "tandem.prefill_worker_id": timeline.prefill_worker_id,
        "tandem.transport": timeline.transport,
        "tandem.kv_bytes": timeline.kv_bytes,
        "tandem.attempts": timeline.attempts,
        "gen_ai.usage.output_tokens": num_generated,
    }
    span.end(attributes, error)
