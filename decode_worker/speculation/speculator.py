"""The speculator of one worker: whom of its drafters to ask about each decode, and what of the guesses to verify.

    wish ─> look-ups ─ guesses as sure as their match ─> trained drafter, if worth asking ─> one tree ─> cut ─> draft

A request has one drafter, or several in this order: who costs nothing is asked first, who reads weights only where that
is expected to give more tokens a second beside the guesses in hand. Of all guesses together the surest are verified, as
many as are worth their rows. It knows no model and no clock: the costs of steps are measured before (`step_costs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.errors import InvalidRequest, shown
from cluster.identity import RequestId
from cluster.sampling_params import SamplingParams
from decode_worker.speculation.draft import Drafter
from decode_worker.speculation.gate import StepCosts, best_cut
from decode_worker.speculation.gated_drafter import GatedDrafter
from decode_worker.speculation.mixed_tree import mixed, share_of
from engine.draft import NO_DRAFT, Draft
from engine.drafting import DraftWish, NoDraftReason
from engine.request import EngineRequest

OFF = "off"
AUTO = ("", "auto")


class _Guess(NamedTuple):
    drafter: GatedDrafter
    draft: Draft


@dataclass(slots=True)
class _Guessing:
    """One decode of the step at hand."""

    wish: DraftWish
    way: tuple[GatedDrafter, ...]  # whom to ask, in this order
    most: int
    was_asked: bool = False
    guesses: list[_Guess] = field(default_factory=list)
    in_hand: Draft = NO_DRAFT  # of all guesses

    def add(self, drafter: GatedDrafter, draft: Draft) -> None:
        self.was_asked = True
        if draft:
            self.guesses.append(_Guess(drafter, draft))
            self.in_hand = mixed([self.in_hand, draft], self.most) if self.in_hand else draft


class DraftingSpeculator:
    """Implements `engine.drafting.Speculator`."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        default_way: tuple[str, ...],
        max_drafts: int,
        costs: StepCosts | None,
        draft_ms: Mapping[str, float] | None = None,
        *,
        verifies_trees: bool = True,
    ) -> None:
        """`drafters` stand in the order in which a request's are asked. Requests that name none get `default_way`;
        if these are several, each knows how sure it is. Without `costs` there is no gate: always guess.

        `draft_ms`: what a guess of a drafter takes where it is not what `costs` say.
        """
        own_ms = draft_ms or {}
        self._costs = costs
        self._drafters = {
            name: GatedDrafter(
                drafter,
                costs if costs is None or name not in own_ms else replace(costs, draft_ms=own_ms[name]),
                max_drafts,
            )
            for name, drafter in drafters.items()
        }
        self._ways = {name: (drafter,) for name, drafter in self._drafters.items()} | dict.fromkeys(
            AUTO, tuple(self._drafters[name] for name in default_way)
        )
        self.tap_layers = tuple(sorted({layer for each in self._drafters.values() for layer in each.tap_layers}))
        # A drafter that reads all of them is given the array as it is: no copy.
        self._columns_of = {
            name: slice(None)
            if drafter.tap_layers == self.tap_layers
            else [self.tap_layers.index(layer) for layer in drafter.tap_layers]
            for name, drafter in self._drafters.items()
            if drafter.tap_layers
        }
        self._verifies_trees = verifies_trees
        self._max_drafts = max_drafts
        self._guesses: dict[RequestId, list[_Guess]] = {}  # behind each request's last draft
        self._num_verified_steps = 0
        self._num_proposed = 0
        self._num_proposed_at = [0] * max_drafts
        self._num_accepted_at = [0] * max_drafts
        self._num_without = dict.fromkeys(NoDraftReason, 0)

    def check(self, params: SamplingParams) -> None:
        if params.speculation == OFF or params.speculation in self._ways:
            return
        here = ", ".join((OFF, "auto", *self._drafters))
        raise InvalidRequest(
            f"speculation is {shown(params.speculation)}, this worker has {here}",
            param="speculation",
        )

    def propose(self, wishes: Sequence[DraftWish], batch_size: int) -> list[Draft]:
        for drafter in self._drafters.values():
            drafter.see_batch(batch_size)
        if all(drafter.is_resting for drafter in self._drafters.values()):
            for wish in wishes:
                self.no_draft(_reason_at_rest(wish))
            return [NO_DRAFT] * len(wishes)
        guessings = [self._guessing(wish) for wish in wishes]
        for drafter in self._drafters.values():
            if not drafter.is_resting:
                _ask(drafter, [guessing for guessing in guessings if drafter in guessing.way], batch_size)
        return [self._decided(guessing, batch_size) for guessing in guessings]

    def _guessing(self, wish: DraftWish) -> _Guessing:
        params = wish.request.sampling
        most = min(wish.max_drafts, self._max_drafts, params.num_drafts or self._max_drafts)
        return _Guessing(wish, self._way_of(params), most)

    def _way_of(self, params: SamplingParams) -> tuple[GatedDrafter, ...]:
        return () if params.speculation == OFF else self._ways[params.speculation]

    def _decided(self, guessing: _Guessing, batch_size: int) -> Draft:
        """What is verified of the guesses; a reason is counted where nothing is."""
        draft, request_id = guessing.in_hand, guessing.wish.request.request_id
        if not draft:
            self.no_draft(_reason(guessing))
            return NO_DRAFT
        if not self._verifies_trees:
            draft = draft.first_chain()
        if draft.confidences and self._costs is not None:
            draft = draft.first(best_cut(draft.confidences, batch_size, self._costs))
        if not draft:
            for guess in guessing.guesses:
                guess.drafter.was_asked_in_vain(request_id)
            self.no_draft(NoDraftReason.DOES_NOT_PAY)
            return NO_DRAFT
        self._guesses[request_id] = guessing.guesses
        return draft

    def sampled(
        self, request: EngineRequest, position: int, token_ids: Sequence[int], taps: npt.NDArray[np.float32]
    ) -> None:
        for drafter in self._way_of(request.sampling):
            if not drafter.is_resting and drafter.name in self._columns_of:
                drafter.sampled(request, position, token_ids, taps[:, self._columns_of[drafter.name]])

    def no_draft(self, reason: NoDraftReason) -> None:
        self._num_without[reason] += 1

    def verified(self, request_id: RequestId, draft: Draft, accepted: Sequence[int]) -> None:
        num_levels = draft.num_levels
        self._num_verified_steps += 1
        self._num_proposed += len(draft)
        for index in range(num_levels):
            self._num_proposed_at[index] += 1
        for index in range(len(accepted)):
            self._num_accepted_at[index] += 1
        guesses = self._guesses.pop(request_id)
        if len(guesses) == 1:
            guesses[0].drafter.verified(request_id, num_levels, len(accepted))
            return
        for drafter, own in guesses:
            drafter.verified(request_id, *share_of(own, draft, accepted))

    def forget(self, request_id: RequestId) -> None:
        self._guesses.pop(request_id, None)
        for drafter in self._drafters.values():
            drafter.forget(request_id)

    def counters(self) -> dict[str, float]:
        """Sums since the start. `accepted_at_i` over `proposed_at_i` is the acceptance of the i-th draft of a chain.

        The same by drafter (`speculation_eagle_accepted_at_1`): of its own guesses, where several guessed for a step.
        """
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
        for drafter in self._drafters.values():
            counters.update(drafter.counters())
        return counters


def _ask(drafter: GatedDrafter, guessings: Sequence[_Guessing], batch_size: int) -> None:
    """Adds its guesses to those decodes for which asking pays."""
    wanted: list[tuple[DraftWish, int]] = []
    asked: list[_Guessing] = []
    for guessing in guessings:
        wish = guessing.wish
        if num_drafts := drafter.num_drafts(wish.request, guessing.in_hand, batch_size, guessing.most):
            wanted.append((wish, num_drafts))
            asked.append(guessing)
    if wanted:
        for guessing, draft in zip(asked, drafter.propose(wanted), strict=True):
            guessing.add(drafter, draft)


def _reason_at_rest(wish: DraftWish) -> NoDraftReason:
    return NoDraftReason.OFF if wish.request.sampling.speculation == OFF else NoDraftReason.DOES_NOT_PAY


def _reason(guessing: _Guessing) -> NoDraftReason:
    if not guessing.way:
        return NoDraftReason.OFF
    return NoDraftReason.NO_MATCH if guessing.was_asked else NoDraftReason.DOES_NOT_PAY
