"""One drafter of a worker with all that decides whether it is asked: costs, records of requests and tenants, counts.

It knows no other drafter: which of several is asked, and what becomes of their guesses, is the speculator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cluster.identity import RequestId
from decode_worker.speculation.draft import (
    Drafter,
    FollowsSampling,
    GuessesTogether,
    KnowsConfidence,
    LooksUp,
    ReadsHiddenStates,
)
from decode_worker.speculation.gate import (
    MOST_OF_A_MODEL,
    SMOOTHING,
    GateState,
    StepCosts,
    after_step,
    is_worth_asking,
    may_pay,
    num_drafts_now,
)
from decode_worker.speculation.match_acceptance import MatchAcceptance
from decode_worker.speculation.routes import Routes, route_key
from engine.draft import Draft
from engine.drafting import DraftWish
from engine.request import EngineRequest


@dataclass(slots=True)
class _Record:
    """One request with this drafter."""

    route: bytes
    gate: GateState
    matches: MatchAcceptance
    match_length: int = 0  # of the last guess, where the drafter looks up
    num_read: int = 0  # tokens that the drafter knows


class GatedDrafter:
    """Used by the engine thread, but for `counters`."""

    def __init__(self, drafter: Drafter, costs: StepCosts | None, max_drafts: int) -> None:
        """Without `costs` there is no gate: it is always asked."""
        self.name = drafter.name
        self.tap_layers = drafter.tap_layers if isinstance(drafter, ReadsHiddenStates) else ()
        self.is_resting = False  # guessing cannot pay in a batch as large as the last one
        self._drafter = drafter
        self._together = drafter if isinstance(drafter, GuessesTogether) else None
        self._look_up = drafter if isinstance(drafter, LooksUp) else None
        self._reader = drafter if isinstance(drafter, ReadsHiddenStates) else None
        self._follower = drafter if isinstance(drafter, FollowsSampling) else None
        self._knows_confidence = isinstance(drafter, KnowsConfidence | LooksUp)
        self._costs = costs
        self._max_drafts = max_drafts
        self._records: dict[RequestId, _Record] = {}
        self._routes = Routes()
        self._num_steps = 0
        self._num_proposed_at = [0] * max_drafts
        self._num_accepted_at = [0] * max_drafts

    def see_batch(self, batch_size: int) -> None:
        """A step with so many decodes is at hand."""
        most = MOST_OF_A_MODEL if self._reader is not None else 1.0
        self.is_resting = self._costs is not None and not may_pay(batch_size, self._costs, self._max_drafts, most)

    def num_drafts(self, request: EngineRequest, in_hand: Draft, batch_size: int, most: int) -> int:
        """How many guesses to ask it for beside those in hand; 0 where that does not pay."""
        if self.is_resting:
            return 0
        if self._costs is None:
            return most
        record = self._record(request)
        gate = record.gate
        if in_hand and (
            gate.cool_down
            or not is_worth_asking(in_hand.confidences, round(gate.acceptance, 2), batch_size, self._costs, most)
        ):
            return 0
        num_drafts, record.gate = num_drafts_now(gate, batch_size, self._costs, most)
        if record.gate.cool_down > gate.cool_down:  # it rests from now on; then nothing is held against it
            record.matches = MatchAcceptance()
        return most if num_drafts and self._knows_confidence else num_drafts

    def propose(self, wanted: Sequence[tuple[DraftWish, int]]) -> list[Draft]:
        """For each wish at most so many guesses."""
        for wish, _ in wanted:
            self._catch_up(wish)
        asked = [(wish.request.request_id, num_drafts) for wish, num_drafts in wanted]
        if self._together is not None:
            return self._together.propose_all(asked)
        return [self._propose(request_id, num_drafts) for request_id, num_drafts in asked]

    def sampled(
        self, request: EngineRequest, position: int, token_ids: Sequence[int], taps: npt.NDArray[np.float32]
    ) -> None:
        """`taps` of its own layers. One that rests starts anew with the rows that come once guessing may pay again."""
        if not self.is_resting and self._reader is not None:
            self._reader.sampled(request.request_id, position, token_ids, taps)

    def verified(self, request_id: RequestId, num_levels: int, num_accepted: int) -> None:
        """So many levels of its guesses were verified, so many tokens of them accepted, one below the other."""
        if num_levels == 0:
            self.was_asked_in_vain(request_id)
            return
        self._num_steps += 1
        for index in range(num_levels):
            self._num_proposed_at[index] += 1
        for index in range(num_accepted):
            self._num_accepted_at[index] += 1
        record = self._records.get(request_id)
        if record is None:
            return
        record.gate = after_step(record.gate, num_levels, num_accepted)
        if record.match_length:
            record.matches.saw(record.match_length, num_levels, num_accepted, SMOOTHING)
        self._routes.saw(record.route, num_levels, num_accepted, record.match_length)

    def was_asked_in_vain(self, request_id: RequestId) -> None:
        """It guessed, and nothing of it was worth verifying: where it goes on like this, it is to rest."""
        record = self._records.get(request_id)
        if record is not None:
            record.gate = after_step(record.gate, 1, 0)

    def forget(self, request_id: RequestId) -> None:
        self._records.pop(request_id, None)
        self._drafter.forget(request_id)

    def counters(self) -> dict[str, float]:
        """Sums since the start, of levels that occurred."""
        prefix = f"speculation_{self.name}"
        counters: dict[str, float] = {f"{prefix}_steps": self._num_steps}
        for index, num_proposed in enumerate(self._num_proposed_at):
            if num_proposed:
                counters[f"{prefix}_proposed_at_{index + 1}"] = num_proposed
                counters[f"{prefix}_accepted_at_{index + 1}"] = self._num_accepted_at[index]
        return counters

    def _propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        """One that looks up is as sure of its guesses as the match is long."""
        draft = self._drafter.propose(request_id, num_drafts)
        if not draft or self._look_up is None:
            return draft
        record = self._records[request_id]
        record.match_length = self._look_up.match_length(request_id)
        return replace(draft, confidences=record.matches.confidences(record.match_length, len(draft)))

    def _record(self, request: EngineRequest) -> _Record:
        record = self._records.get(request.request_id)
        if record is None:
            key = route_key(request.scope_key, request.sampling.temperature)
            route = self._routes.of(key)
            gate, matches = GateState(route.acceptance), MatchAcceptance(route.matches.rates)
            record = self._records[request.request_id] = _Record(key, gate, matches)
            if self._follower is not None:
                num_prompt_tokens = len(request.token_ids) - request.num_generated
                self._follower.starts(request.request_id, request.sampling, num_prompt_tokens)
        return record

    def _catch_up(self, wish: DraftWish) -> None:
        record, request_id = self._record(wish.request), wish.request.request_id
        fresh = wish.token_ids[record.num_read :].tolist()
        if record.num_read == 0:
            self._drafter.begin(request_id, fresh)
        else:
            self._drafter.extend(request_id, fresh)
        record.num_read = len(wish.token_ids)
