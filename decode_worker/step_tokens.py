"""One engine step as the message that a router reads: columns for the tokens, sparse events for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tandem.v1 import common_pb2, worker_pb2

from cluster.identity import RequestId
from engine.request import FinishReason

FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}


class StepEntry(NamedTuple):
    """One request's share of a step."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    event: worker_pb2.RequestEvent | None = None


def pack_step(entries: Sequence[StepEntry], load: worker_pb2.LoadReport) -> worker_pb2.DecodeMessage:
    """All requests of one router in one message."""
    step = worker_pb2.StepTokens(
        request_ids=[entry.request_id for entry in entries],
        token_counts=[len(entry.token_ids) for entry in entries],
        token_ids=[token_id for entry in entries for token_id in entry.token_ids],
        events=[entry.event for entry in entries if entry.event is not None],
        load=load,
    )
    return worker_pb2.DecodeMessage(step=step)
