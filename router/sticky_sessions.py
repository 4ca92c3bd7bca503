"""The same worker for the requests of one session: rendezvous hashing with bounded loads. No cache is looked at.

Each session ranks the workers by a hash of (session, worker) and takes the first that has room: who has more than
`LOAD_FACTOR` of the mean is passed over, so a hot session cannot bury a worker. A worker that joins or leaves moves
only the sessions that it wins or had. Requests that name no session go to the least loaded.
Source: Thaler and Ravishankar 1998; Mirrokni, Thorup, Zadimoghaddam 2018 for the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from router.load_policies import MAX_PREFILL_CHOICES, LeastLoaded
from router.placement import (
    ClusterSnapshot,
    Placement,
    RequestView,
    eligible_decode,
    eligible_prefill,
    is_fallback,
)
from router.timing_model import TimingModel
from router.worker_state import WorkerState

LOAD_FACTOR = 1.25


class StickySessions:
    """Has no state of its own: any number of routers agree."""

    name = "session"

    def __init__(self, timing: TimingModel) -> None:
        self._timing = timing
        self._least_loaded = LeastLoaded(timing)

    def place(self, request: RequestView, snapshot: ClusterSnapshot, now_s: float) -> Placement:
        if not request.session_key:
            return self._least_loaded.place(request, snapshot, now_s)
        decode = _ranked(eligible_decode(request, snapshot), request.session_key)[0]
        prefills = _ranked(eligible_prefill(request, snapshot, decode), request.session_key)
        return Placement(
            policy=self.name,
            decode=decode,
            prefill=prefills[:MAX_PREFILL_CHOICES],
            expected_prefill_ms=self._timing.prefill_ms(request.num_prompt_tokens, 0),
            reason="where its session is",
            is_fallback=is_fallback(decode, prefills),
        )


def _ranked(workers: Sequence[WorkerState], session_key: str) -> list[WorkerState]:
    """The session's own order, those above the bound last."""
    if not workers:
        return []
    bound = LOAD_FACTOR * (sum(worker.num_in_flight for worker in workers) + 1) / len(workers)
    return sorted(
        workers, key=lambda worker: (worker.num_in_flight + 1 > max(1.0, bound), _weight(session_key, worker))
    )


def _weight(session_key: str, worker: WorkerState) -> bytes:
    return blake2b(f"{session_key}\0{worker.worker_id}".encode(), digest_size=8).digest()
