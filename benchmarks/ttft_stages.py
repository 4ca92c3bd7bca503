"""Where the time to the first token went, as a server that knows its own timeline says it at the end of a stream."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from google.protobuf import json_format
from tandem.v1 import common_pb2

# In the order in which they follow each other.
STAGES = ("route", "prefill_queue", "prefill_compute", "exposed_transfer", "decode_wait")


@dataclass(frozen=True, slots=True)
class TtftStages:
    """One request's timeline. What the stages leave of the measured TTFT is the client's and the wire's."""

    route_ms: float
    prefill_queue_ms: float
    prefill_compute_ms: float
    exposed_transfer_ms: float
    decode_wait_ms: float
    transfer_total_ms: float
    kv_bytes: int
    transport: str  # empty: prefilled where it was decoded

    def stage_ms(self, stage: str) -> float:
        return float(getattr(self, f"{stage}_ms"))


def stages_from_json(timeline: dict[str, Any]) -> TtftStages:
    """From a `tandem.v1.Timeline` in protobuf's JSON form."""
    message = json_format.ParseDict(timeline, common_pb2.Timeline(), ignore_unknown_fields=True)
    return TtftStages(
        route_ms=message.placed_us / 1e3,
        prefill_queue_ms=message.prefill_queued_us / 1e3,
        prefill_compute_ms=message.prefill_compute_us / 1e3,
        exposed_transfer_ms=message.transfer_exposed_us / 1e3,
        decode_wait_ms=message.decode_wait_us / 1e3,
        transfer_total_ms=message.transfer_total_us / 1e3,
        kv_bytes=message.kv_bytes,
        transport=message.transport,
    )


def stages_from_row(row: dict[str, Any] | None) -> TtftStages | None:
    """From a records file."""
    return None if row is None else TtftStages(**{one.name: row[one.name] for one in fields(TtftStages)})
