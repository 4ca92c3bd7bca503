"""The speculator of one worker: picks a request's drafter, asks the gate, keeps the counts.

It knows no model and no clock: the costs of steps are measured before (`step_costs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from cluster.errors import InvalidRequest, shown
from cluster.identity import RequestId
from cluster.sampling_params import SamplingParams
from decode_worker.speculation.draft import (
    Drafter,
    FollowsSampling,
    GuessesTogether,
    KnowsConfidence,
    ReadsHiddenStates,
)
from decode_worker.speculation.gate import (
    GateState,
    RouteAcceptance,
    StepCosts,
    after_step,
    best_cut,
    may_pay,
    num_drafts_now,
)
from engine.draft import NO_DRAFT, Draft
from engine.drafting import DraftWish, NoDraftReason
from engine.request import EngineRequest

OFF = "off"
AUTO = ("", "auto")


@dataclass(slots=True)
class _Record:
    """One request with its drafter."""

    drafter: Drafter
    costs: StepCosts | None
    scope_key: bytes
    num_read: int = 0  # tokens that the drafter knows
    gate: GateState = field(default_factory=GateState)


class DraftingSpeculator:
    """Implements `engine.drafting.Speculator`."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        default_drafter: str,
        max_drafts: int,
        costs: StepCosts | None,
        draft_ms: Mapping[str, float] | None = None,
        *,
        verifies_trees: bool = True,
    ) -> None:
        """Requests that name no drafter get `default_drafter`. Without `costs` there is no gate: always guess.

        `draft_ms`: what a guess of a drafter takes where it is not what `costs` say.
        """
        self._drafters = dict(drafters)
        own_ms = draft_ms or {}
        self._costs_of = {
            name: costs if costs is None or name not in own_ms else replace(costs, draft_ms=own_ms[name])
            for name in drafters
        }
        self.tap_layers = _all_taps(self._drafters)
        self._taps_of = {
            name: [self.tap_layers.index(layer) for layer in drafter.tap_layers]
            for name, drafter in drafters.items()
            if isinstance(drafter, ReadsHiddenStates)
        }
        self._confident = {name for name, drafter in drafters.items() if isinstance(drafter, KnowsConfidence)}
        self._verifies_trees = verifies_trees
        self._default = self._drafters[default_drafter]
        self._max_drafts = max_drafts
        self._records: dict[RequestId, _Record] = {}
        self._routes = RouteAcceptance()
        self._num_verified_steps = 0
        self._num_proposed = 0
        self._num_proposed_at = [0] * max_drafts
        self._num_accepted_at = [0] * max_drafts
        self._num_without = dict.fromkeys(NoDraftReason, 0)
        self._resting: set[str] = set()  # drafters that cannot pay in a batch as large as the last one

    def check(self, params: SamplingParams) -> None:
        if params.speculation in (*AUTO, OFF) or params.speculation in self._drafters:
            return
        here = ", ".join((OFF, "auto", *self._drafters))
        raise InvalidRequest(
            f"speculation is {shown(params.speculation)}, this worker has {here}",
            param="speculation",
        )

    def propose(self, wishes: Sequence[DraftWish], batch_size: int) -> list[Draft]:
        drafts = [NO_DRAFT] * len(wishes)
        asked: dict[str, list[tuple[int, int]]] = {}
        self._resting = {name for name in self._drafters if not self._may_pay(name, batch_size)}
        for index, wish in enumerate(wishes):
            if num_drafts := self._num_drafts(wish, batch_size):
                asked.setdefault(self._drafter_of(wish.request).name, []).append((index, num_drafts))
        for name, some in asked.items():
            wanted = [(wishes[index].request.request_id, num_drafts) for index, num_drafts in some]
            proposed = _propose_all(self._drafters[name], wanted)
            for (index, _), (request_id, _), draft in zip(some, wanted, proposed, strict=True):
                drafts[index] = self._worth_verifying(self._records[request_id], draft, batch_size)
        return drafts

    def _may_pay(self, name: str, batch_size: int) -> bool:
        costs = self._costs_of[name]
        return costs is None or may_pay(batch_size, costs, self._max_drafts)

    def _drafter_of(self, request: EngineRequest) -> Drafter:
        return self._drafters.get(request.sampling.speculation, self._default)

    def _num_drafts(self, wish: DraftWish, batch_size: int) -> int:
        """How many guesses to ask for, its drafter being told what it missed; a reason is counted for none."""
        request, params = wish.request, wish.request.sampling
        if params.speculation == OFF:
            self.no_draft(NoDraftReason.OFF)
            return 0
        if self._drafter_of(request).name in self._resting:
            self.no_draft(NoDraftReason.DOES_NOT_PAY)
            return 0
        most = num_drafts = min(wish.max_drafts, self._max_drafts, params.num_drafts or self._max_drafts)
        record = self._record(request)
        if record.costs is not None:
            num_drafts, record.gate = num_drafts_now(record.gate, batch_size, record.costs, most)
        if num_drafts == 0:
            self.no_draft(NoDraftReason.DOES_NOT_PAY)
            return 0
        self._catch_up(record, request.request_id, wish.token_ids)
        return most if record.drafter.name in self._confident else num_drafts

    def _worth_verifying(self, record: _Record, draft: Draft, batch_size: int) -> Draft:
        if not self._verifies_trees:
            draft = draft.first_chain()
        if not draft:
            self.no_draft(NoDraftReason.NO_MATCH)
        elif draft.confidences and record.costs is not None:
            draft = draft.first(best_cut(draft.confidences, batch_size, record.costs))
            if not draft:  # guessing took its time all the same: where it goes on like this, it is to rest
                record.gate = after_step(record.gate, 1, 0)
                self.no_draft(NoDraftReason.DOES_NOT_PAY)
        return draft

    def sampled(
        self, request: EngineRequest, position: int, token_ids: Sequence[int], taps: npt.NDArray[np.float32]
    ) -> None:
        drafter = self._drafter_of(request)
        # One that rests starts anew with the rows that come once guessing may pay again.
        if request.sampling.speculation == OFF or drafter.name in self._resting:
            return
        columns = self._taps_of.get(drafter.name)
        if columns is not None and isinstance(drafter, ReadsHiddenStates):
            drafter.sampled(request.request_id, position, token_ids, taps[:, columns])

    def no_draft(self, reason: NoDraftReason) -> None:
        self._num_without[reason] += 1

    def verified(self, request_id: RequestId, draft: Draft, num_accepted: int) -> None:
        num_levels = draft.num_levels
        self._num_verified_steps += 1
        self._num_proposed += len(draft)
        for index in range(num_levels):
            self._num_proposed_at[index] += 1
        for index in range(num_accepted):
            self._num_accepted_at[index] += 1
        record = self._records[request_id]
        record.gate = after_step(record.gate, num_levels, num_accepted)
        self._routes.saw(record.drafter.name, record.scope_key, num_levels, num_accepted)

    def forget(self, request_id: RequestId) -> None:
        record = self._records.pop(request_id, None)
        if record is not None:
            record.drafter.forget(request_id)

    def counters(self) -> dict[str, float]:
        """Sums since the start. `accepted_at_i` over `proposed_at_i` is the acceptance of the i-th draft of a chain."""
        counters: dict[str, float] = {
            "speculation_steps": self._num_verified_steps,
            "speculation_drafts_proposed": self._num_proposed,
            "speculation_drafts_accepted": sum(self._num_accepted_at),
        }
        for index in range(self._max_drafts):
            counters[f"speculation_proposed_at_{index + 1}"] = self._num_proposed_at[index]
            counters[f"speculation_accepted_at_{index + 1}"] = self._num_accepted_at[index]
        for reason, count in self._num_without.items():
            counters[f"speculation_no_draft_{reason.value}"] = count
        return counters

    def _record(self, request: EngineRequest) -> _Record:
        record = self._records.get(request.request_id)
        if record is None:
            drafter = self._drafter_of(request)
            start = GateState(self._routes.of(drafter.name, request.scope_key))
            record = _Record(drafter, self._costs_of[drafter.name], request.scope_key, gate=start)
            if isinstance(drafter, FollowsSampling):
                num_prompt_tokens = len(request.token_ids) - request.num_generated
                drafter.starts(request.request_id, request.sampling, num_prompt_tokens)
            self._records[request.request_id] = record
        return record

    @staticmethod
    def _catch_up(record: _Record, request_id: RequestId, token_ids: npt.NDArray[np.int32]) -> None:
        fresh = token_ids[record.num_read :].tolist()
        if record.num_read == 0:
            record.drafter.begin(request_id, fresh)
        else:
            record.drafter.extend(request_id, fresh)
        record.num_read = len(token_ids)


def _propose_all(drafter: Drafter, wanted: Sequence[tuple[RequestId, int]]) -> list[Draft]:
    if isinstance(drafter, GuessesTogether):
        return drafter.propose_all(wanted)
    return [drafter.propose(request_id, num_drafts) for request_id, num_drafts in wanted]


def _all_taps(drafters: Mapping[str, Drafter]) -> tuple[int, ...]:
    layers = (drafter.tap_layers for drafter in drafters.values() if isinstance(drafter, ReadsHiddenStates))
    return tuple(sorted({layer for taps in layers for layer in taps}))
