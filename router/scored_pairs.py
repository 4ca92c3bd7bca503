"""A worker with its score, and a prefill and a decode worker together, as a decision compares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.placement import Candidate
from router.worker_state import WorkerState


class Scored(NamedTuple):
    """A worker's terms, in the order of their names. Tuples, for a thousand of them are made for a decision."""

    total_ms: float
    last_chosen_s: float  # breaks ties between those that are idle alike
    order: int  # its place in the snapshot; no two are equal: workers are never compared
    worker: WorkerState
    terms_ms: tuple[float, ...]

    def explained(self, names: Sequence[str]) -> Candidate:
        return Candidate(self.worker, dict(zip(names, self.terms_ms, strict=True)), self.total_ms)


@dataclass(frozen=True, slots=True)
class Pair:
    decode: Scored
    prefill: Scored | None  # None: the decode worker prefills by itself
    total_ms: float
    is_tied: bool = False  # with others: it was not the lowest time that decided

    @property
    def num_in_flight(self) -> int:
        return self.decode.worker.num_in_flight + (self.prefill.worker.num_in_flight if self.prefill else 0)

    @property
    def order(self) -> tuple[int, int]:
        return self.decode.order, self.prefill.order if self.prefill else 0

    @property
    def last_chosen_s(self) -> float:
        return max(self.decode.last_chosen_s, self.prefill.last_chosen_s if self.prefill else 0.0)
