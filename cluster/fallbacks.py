"""Second choices that were taken: logged once for each reason, counted, shown in a worker's status. Never silent."""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple

from tandem.v1 import worker_pb2

# Reasons are codes, not sentences: more kinds than this means that somebody put an id into one.
MAX_KINDS = 256

logger = logging.getLogger(__name__)


class FallbackKind(NamedTuple):
    component: str  # what fell back: prefill, transport, kernel, drafter
    wanted: str
    used: str
    reason: str


class Fallbacks:
    """One process's list. Safe to call from any thread."""

    def __init__(self) -> None:
        self._counts: dict[FallbackKind, int] = {}
        self._lock = threading.Lock()

    def took(self, component: str, *, wanted: str, used: str, reason: str) -> None:
        kind = FallbackKind(component, wanted, used, reason)
        with self._lock:
            is_new = kind not in self._counts
            if is_new and len(self._counts) >= MAX_KINDS:
                kind, is_new = FallbackKind(component, wanted, used, "other"), False
            self._counts[kind] = self._counts.get(kind, 0) + 1
        if is_new:
            logger.warning("%s falls back from %s to %s: %s", component, wanted, used, reason)

    def count(self, component: str) -> int:
        with self._lock:
            return sum(count for kind, count in self._counts.items() if kind.component == component)

    def to_messages(self) -> list[worker_pb2.Fallback]:
        with self._lock:
            return [worker_pb2.Fallback(**kind._asdict(), count=count) for kind, count in self._counts.items()]
