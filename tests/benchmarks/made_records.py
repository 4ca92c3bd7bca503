"""Records of requests that never were: two tokens each, 100 ms to the first, 50 ms to the second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.request_record import Outcome, RequestRecord


def made_record(index: int, intended_s: float, **fields: Any) -> RequestRecord:
    """One record with its fields changed as asked."""
    base = RequestRecord(
        index=index,
        traffic_class="default",
        session=-1,
        turn=0,
        is_warmup=False,
        intended_s=intended_s,
        sent_s=intended_s,
        ended_s=intended_s + 0.15,
        outcome=Outcome.OK,
        http_status=200,
        chunk_times_s=(intended_s + 0.1, intended_s + 0.15),
        chunk_tokens=(1, 1),
        prompt_tokens=10,
    )
    return replace(base, **fields)
