"""One request's events on this worker's clock; every figure that anybody reports is a difference of two of them.

What the prefill worker measured comes in as durations (its clock is not ours).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.v1 import common_pb2

from cluster.identity import WorkerId


class RequestMoment(enum.Enum):
    """The boundaries of a request's life here, in order."""

    RECEIVED = "received"
    RESERVED = "reserved"  # blocks are taken
    REQUESTED = "requested"  # the last prefill worker was asked
    FIRST_FRAME = "first_frame"
    VERIFIED = "verified"
    FIRST_TOKEN = "first_token"  # noqa: S105  handed to the stream
    FIRST_DECODE_STEP = "first_decode_step"
    ENDED = "ended"


@dataclass(slots=True)
class RequestTimeline:
    """Owned by one request's flow."""

    clock: Callable[[], float]
    decode_worker_id: WorkerId
    moments: dict[RequestMoment, float] = field(default_factory=dict)
    prefill_worker_id: str = ""
    prefill_queued_s: float = 0.0
    prefill_compute_s: float = 0.0
    kv_bytes: int = 0
    kv_frames: int = 0
    transport: str = ""
    attempts: int = 0

    def mark(self, moment: RequestMoment, at: float | None = None) -> None:
        self.moments[moment] = self.clock() if at is None else at

    def begin_attempt(self) -> None:
        """A prefill worker is asked; what the attempt before it measured is void."""
        self.attempts += 1
        self.moments.pop(RequestMoment.FIRST_FRAME, None)
        self.mark(RequestMoment.REQUESTED)

    def mark_once(self, moment: RequestMoment) -> None:
        self.moments.setdefault(moment, self.clock())

    @property
    def reserved_s(self) -> float:
        return self._since_received(RequestMoment.RESERVED)

    @property
    def first_token_s(self) -> float:
        return self._since_received(RequestMoment.FIRST_TOKEN)

    @property
    def exposed_transfer_s(self) -> float:
        """What the request waited from asking P to verified, beyond P's own queue and compute: the part of the
        transfer that no compute hid, with both messages' way."""
        waited = self._between(RequestMoment.REQUESTED, RequestMoment.VERIFIED)
        return max(0.0, waited - self.prefill_queued_s - self.prefill_compute_s)

    @property
    def total_transfer_s(self) -> float:
        return self._between(RequestMoment.FIRST_FRAME, RequestMoment.VERIFIED)

    def to_message(self) -> common_pb2.Timeline:
        return common_pb2.Timeline(
            reserved_us=_us(self.reserved_s),
            prefill_queued_us=_us(self.prefill_queued_s),
            prefill_compute_us=_us(self.prefill_compute_s),
            transfer_exposed_us=_us(self.exposed_transfer_s),
            transfer_total_us=_us(self.total_transfer_s),
            decode_wait_us=_us(self._between(RequestMoment.VERIFIED, RequestMoment.FIRST_DECODE_STEP)),
            first_token_us=_us(self.first_token_s),
            kv_bytes=self.kv_bytes,
            kv_frames=self.kv_frames,
            transport=self.transport,
            prefill_worker_id=self.prefill_worker_id,
            decode_worker_id=self.decode_worker_id,
            attempts=self.attempts,
        )

    def _since_received(self, moment: RequestMoment) -> float:
        return self._between(RequestMoment.RECEIVED, moment)

    def _between(self, first: RequestMoment, second: RequestMoment) -> float:
        if first not in self.moments or second not in self.moments:
            return 0.0
        return max(0.0, self.moments[second] - self.moments[first])


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
