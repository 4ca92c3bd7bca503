"""Which workers a router knows, as a pure function of what Redis listed and what the router saw itself.

    listed(records, now)   a healthy Redis answered: new, changed and missing workers
    peer_gone(...)         a stream to a worker broke: it is dead now, whatever Redis still says

A worker that a healthy Redis does not list is dropped only after `grace_s`: a flushed or restarted Redis is empty until
the next heartbeats. While Redis does not answer nothing is dropped at all.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tandem.v1 import membership_pb2

from cluster.identity import Incarnation, WorkerId

# Three heartbeats of 1 s for the record to expire, as long again for an emptied Redis to be filled.
DEFAULT_GRACE_S = 3.0


class ChangeKind(enum.Enum):
    JOINED = "joined"
    UPDATED = "updated"  # a newer heartbeat of the same incarnation
    RESTARTED = "restarted"  # same name, new incarnation: everything known of the old one is void
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """One worker's change; `record` is the newest known (for LEFT the last one)."""

    kind: ChangeKind
    record: membership_pb2.WorkerRecord


class MembershipState:
    """The known workers. Owned by one event loop; time is an argument."""

    def __init__(self, grace_s: float = DEFAULT_GRACE_S) -> None:
        self._grace_s = grace_s
        self._records: dict[WorkerId, membership_pb2.WorkerRecord] = {}
        self._missing_since: dict[WorkerId, float] = {}
        # Incarnations that died: their records may linger in Redis and must not come back.
        self._dead: dict[WorkerId, Incarnation] = {}

    @property
    def workers(self) -> Mapping[WorkerId, membership_pb2.WorkerRecord]:
        return MappingProxyType(self._records)

    def listed(self, records: Iterable[membership_pb2.WorkerRecord], now: float) -> list[MembershipChange]:
        """A healthy Redis listed exactly these workers."""
        changes: list[MembershipChange] = []
        seen: set[WorkerId] = set()
        for record in records:
            worker_id = WorkerId(record.identity.worker_id)
            seen.add(worker_id)
            if self._dead.get(worker_id) != record.identity.incarnation:
                changes += self._known(worker_id, record)
        for worker_id in [known for known in self._records if known not in seen]:
            if now - self._missing_since.setdefault(worker_id, now) >= self._grace_s:
                changes.append(MembershipChange(ChangeKind.LEFT, self._forget(worker_id)))
        for worker_id in [dead for dead in self._dead if dead not in seen]:
            del self._dead[worker_id]
        return changes

    def redis_lost(self) -> None:
        """Redis did not answer: what is known stays, and absence is counted anew once it is back."""
        self._missing_since.clear()

    def peer_gone(self, worker_id: WorkerId, incarnation: Incarnation) -> list[MembershipChange]:
        """That process ended. A later incarnation under the same name is not touched."""
        record = self._records.get(worker_id)
        if record is None or record.identity.incarnation != incarnation:
            return []
        self._dead[worker_id] = incarnation
        return [MembershipChange(ChangeKind.LEFT, self._forget(worker_id))]

    def _known(self, worker_id: WorkerId, record: membership_pb2.WorkerRecord) -> list[MembershipChange]:
        self._missing_since.pop(worker_id, None)
        before = self._records.get(worker_id)
        if before is not None and before.heartbeat_seq == record.heartbeat_seq and _same_process(before, record):
            return []
        self._records[worker_id] = record
        if before is None:
            return [MembershipChange(ChangeKind.JOINED, record)]
        kind = ChangeKind.UPDATED if _same_process(before, record) else ChangeKind.RESTARTED
        return [MembershipChange(kind, record)]

    def _forget(self, worker_id: WorkerId) -> membership_pb2.WorkerRecord:
        self._missing_since.pop(worker_id, None)
        return self._records.pop(worker_id)


def _same_process(a: membership_pb2.WorkerRecord, b: membership_pb2.WorkerRecord) -> bool:
    return bool(a.identity.incarnation == b.identity.incarnation)
