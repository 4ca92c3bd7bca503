"""The last placements with their reasons, for `/explain/{request_id}`: candidates, terms, choice, what then happened.

Bounded: the oldest request is forgotten first. Holds numbers and names only, never tokens or text. Where several
router processes share a port, whichever is asked asks the others.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from tandem.v1 import worker_pb2

from cluster.errors import TandemError
from cluster.identity import RequestId
from router.fair_queue import Tier
from router.placement import Candidate, Placement
from router.router_siblings import RouterSiblings
from router.sequence import Sequence

MAX_REQUESTS = 1024
MAX_CANDIDATES_SHOWN = 8  # of each role, the best ones
QUESTION = "explain"
_ID = re.compile(r"[\x21-\x7e]{1,128}")  # ours, or what a client may call its request


@dataclass(slots=True)
class _Decision:
    """One placement of one choice."""

    choice: int
    attempt: int
    placement: Placement
    num_prompt_tokens: int
    no_match_because: str
    outcome: dict[str, Any] = field(default_factory=dict)


class DecisionLog:
    """Hears placements; owned by the router process."""

    def __init__(self, siblings: RouterSiblings, max_requests: int = MAX_REQUESTS) -> None:
        self._siblings = siblings
        self._max_requests = max_requests
        self._requests: OrderedDict[str, list[_Decision]] = OrderedDict()
        self._admissions: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._own_ids: OrderedDict[str, RequestId] = OrderedDict()  # by what clients call their requests
        siblings.answer(QUESTION, self._tell)

    def known_as(self, client_request_id: str, request_id: RequestId) -> None:
        """The client's own name for a request; of several with one name the last one is found by it."""
        self._own_ids[client_request_id] = request_id
        self._own_ids.move_to_end(client_request_id)
        while len(self._own_ids) > self._max_requests:
            self._own_ids.popitem(last=False)

    def let_in(self, request_id: RequestId, tier: Tier, waited_s: float) -> None:
        """From admission: it had to wait, and is placed now."""
        self._admissions[request_id] = {"tier": tier.name.lower(), "waited_ms": round(waited_s * 1000, 3)}
        while len(self._admissions) > self._max_requests:
            self._admissions.popitem(last=False)

    def placed(self, sequence: Sequence, placement: Placement) -> None:
        decisions = self._requests.setdefault(_request_id(sequence), [])
        spec = sequence.spec
        decisions.append(
            _Decision(spec.index, sequence.fence, placement, len(spec.token_ids), sequence.no_match_because)
        )
        while len(self._requests) > self._max_requests:
            self._requests.popitem(last=False)

    def started(self, sequence: Sequence, event: worker_pb2.RequestEvent) -> None:
        if (decision := self._latest(sequence)) is not None:
            timeline = event.timeline
            decision.outcome = {
                "prefill_worker_id": timeline.prefill_worker_id,
                "cached_tokens": event.cached_tokens,
                "queue_ms": timeline.prefill_queued_us / 1000,
                "prefill_ms": timeline.prefill_compute_us / 1000,
                "transfer_exposed_ms": timeline.transfer_exposed_us / 1000,
                "first_token_ms": timeline.first_token_us / 1000,
            }

    def moved(self, sequence: Sequence, error: TandemError) -> None:
        if (decision := self._latest(sequence)) is not None:
            decision.outcome["moved_because"] = error.error_code

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        """What is known of a request's placements, here or in a process beside; None when nobody knows it.

        `request_id`: ours, or the one that its client gave it.
        """
        explained = self._explain(request_id)
        if explained is None and _ID.fullmatch(request_id):
            told = await self._siblings.ask(QUESTION, request_id)
            explained = json.loads(told[0]) if told else None
        return explained

    def _tell(self, request_id: str) -> bytes:
        explained = self._explain(request_id)
        return b"" if explained is None else json.dumps(explained).encode()

    def _explain(self, request_id: str) -> dict[str, Any] | None:
        if request_id not in self._requests:
            request_id = self._own_ids.get(request_id, request_id)
        decisions = self._requests.get(request_id)
        if decisions is None:
            return None
        return {
            "request_id": request_id,
            "admission": self._admissions.get(request_id, {"waited_ms": 0.0}),
            "placements": [_explained(decision) for decision in decisions],
        }

    def _latest(self, sequence: Sequence) -> _Decision | None:
        decisions = self._requests.get(_request_id(sequence), ())
        return next((one for one in reversed(decisions) if one.choice == sequence.spec.index), None)


def _request_id(sequence: Sequence) -> str:
    """A submission is named `<request id>-<choice>`."""
    return sequence.submission_id.rpartition("-")[0]


def _explained(decision: _Decision) -> dict[str, Any]:
    placement = decision.placement
    return {
        "choice": decision.choice,
        "attempt": decision.attempt,
        "policy": placement.policy,
        "reason": placement.reason,
        "is_fallback": placement.is_fallback,
        "prompt_tokens": decision.num_prompt_tokens,
        "decode_worker_id": placement.decode.worker_id,
        "prefill_worker_ids": [worker.worker_id for worker in placement.prefill],
        "expected_cached_tokens": placement.expected_cached_tokens,
        "no_match_because": decision.no_match_because,
        "expected_prefill_ms": round(placement.expected_prefill_ms, 3),
        "candidates": _ranked(placement),
        "outcome": decision.outcome,
    }


def _ranked(placement: Placement) -> dict[str, list[dict[str, Any]]]:
    """By role, the best first: the second one is the runner-up. `local`: the decode worker computing the prompt."""
    by_role: dict[str, list[dict[str, Any]]] = {}
    for candidate in sorted(placement.candidates, key=lambda one: one.total_ms):
        shown = by_role.setdefault(candidate.worker.role.value, [])
        if len(shown) < MAX_CANDIDATES_SHOWN:
            shown.append(_row(candidate))
    if placement.local is not None:
        by_role["local"] = [_row(placement.local)]
    return by_role


def _row(candidate: Candidate) -> dict[str, Any]:
    terms = {name: round(value, 3) for name, value in candidate.terms_ms.items()}
    return {"worker_id": candidate.worker.worker_id, "total_ms": round(candidate.total_ms, 3), "terms_ms": terms}
