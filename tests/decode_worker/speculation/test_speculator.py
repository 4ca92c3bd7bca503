"""Which of several drafters is asked about a decode, and what of their guesses is verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cluster.identity import RequestId
from cluster.sampling_params import SamplingParams
from decode_worker.speculation.draft import Drafter
from decode_worker.speculation.gate import StepCosts, may_pay
from decode_worker.speculation.speculator import DraftingSpeculator
from engine.draft import ROOT, Draft
from engine.drafting import DraftWish
from engine.request import EngineRequest

# Four rows are hidden behind the weights' reading, the fifth computes; a trained guess costs a fiftieth of a step.
COSTS = StepCosts((1, 2, 3, 4, 5, 6, 8, 16), (10.0, 10.1, 10.2, 10.3, 11.4, 12.5, 14.5, 24.0), draft_ms=0.0)
TRAINED_MS = {"eagle": 0.2}
SURE, UNSURE = 16, 1  # lengths of a match


class LookUp:
    """Guesses a chain of one token behind a match of any length."""

    name = "ngram"

    def __init__(self, token_id: int = 7) -> None:
        self.token_id = token_id
        self.length = UNSURE
        self.known: dict[RequestId, list[int]] = {}

    def begin(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self.known[request_id] = list(token_ids)

    def extend(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self.known[request_id] += token_ids

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        return Draft.chain([self.token_id] * num_drafts if self.length else [])

    def match_length(self, request_id: RequestId) -> int:
        return self.length

    def forget(self, request_id: RequestId) -> None:
        self.known.pop(request_id, None)


class Trained:
    """Guesses two tokens, one behind the other, for all requests at once; reads rows of two layers."""

    name = "eagle"
    tap_layers = (1, 3)
    min_confidence = 0.0

    def __init__(self, *confidences: float) -> None:
        self.confidences = confidences
        self.asked: list[list[RequestId]] = []
        self.rows: list[Any] = []

    def begin(self, request_id: RequestId, token_ids: Sequence[int]) -> None: ...

    def extend(self, request_id: RequestId, token_ids: Sequence[int]) -> None: ...

    def propose(self, request_id: RequestId, num_drafts: int) -> Draft:
        return self.propose_all([(request_id, num_drafts)])[0]

    def propose_all(self, wanted: Sequence[tuple[RequestId, int]]) -> list[Draft]:
        self.asked.append([request_id for request_id, _ in wanted])
        return [Draft((20, 21), (ROOT, 0), confidences=self.confidences) for _ in wanted]

    def sampled(self, request_id: RequestId, position: int, token_ids: Sequence[int], taps: Any) -> None:
        self.rows.append(taps)

    def forget(self, request_id: RequestId) -> None: ...


def wish(name: str = "r", speculation: str = "", max_drafts: int = 8) -> DraftWish:
    sampling = SamplingParams(temperature=0.0, max_tokens=100, speculation=speculation)
    token_ids = np.array([1, 2, 3], np.int32)
    return DraftWish(
        EngineRequest(RequestId(name), token_ids, sampling=sampling, scope_key=b"s"), token_ids, max_drafts
    )


def cascade(
    look_up: LookUp, trained: Trained, costs: StepCosts | None = COSTS, *, num_drafts: int = 8
) -> DraftingSpeculator:
    drafters: dict[str, Drafter] = {"ngram": look_up, "eagle": trained}
    return DraftingSpeculator(drafters, ("ngram", "eagle"), num_drafts, costs, TRAINED_MS)


def test_a_sure_match_is_verified_alone_and_a_trained_drafter_costs_nothing() -> None:
    look_up, trained = LookUp(), Trained(0.6, 0.4)
    look_up.length = SURE
    (draft,) = cascade(look_up, trained).propose([wish()], 1)
    assert draft.token_ids == (7,) * 8
    assert not trained.asked


def test_beside_a_weak_match_the_trained_drafter_guesses_too_and_the_surest_are_verified() -> None:
    look_up, trained = LookUp(), Trained(0.6, 0.4)
    (draft,) = cascade(look_up, trained).propose([wish()], 1)
    assert draft.token_ids[:3] == (20, 21, 7)
    assert draft.parents[:3] == (ROOT, 0, ROOT)
    assert trained.asked == [[RequestId("r")]]


def test_without_a_match_the_trained_drafter_guesses_alone() -> None:
    look_up, trained = LookUp(), Trained(0.6, 0.4)
    look_up.length = 0
    (draft,) = cascade(look_up, trained).propose([wish()], 1)
    assert draft.token_ids == (20, 21)


def test_each_is_credited_with_what_it_guessed_itself() -> None:
    speculator = cascade(LookUp(), Trained(0.6, 0.4), None)
    (draft,) = speculator.propose([wish()], 1)
    speculator.verified(RequestId("r"), draft, [draft.token_ids.index(20), draft.token_ids.index(21)])
    counters = speculator.counters()
    assert counters["speculation_steps"] == counters["speculation_eagle_steps"] == 1
    assert (counters["speculation_eagle_accepted_at_1"], counters["speculation_eagle_accepted_at_2"]) == (1, 1)
    assert (counters["speculation_ngram_proposed_at_1"], counters["speculation_ngram_accepted_at_1"]) == (1, 0)
    assert counters["speculation_drafts_accepted"] == 2


def test_a_drafter_that_never_hits_is_left_alone_while_the_other_goes_on() -> None:
    look_up, trained = LookUp(), Trained(0.6, 0.4)
    speculator = cascade(look_up, trained)
    for _ in range(60):
        (draft,) = speculator.propose([wish()], 1)
        hits = [draft.token_ids.index(7)] if 7 in draft.token_ids else []
        speculator.verified(RequestId("r"), draft, hits)
    num_asked = len(trained.asked)
    assert num_asked < 40
    for _ in range(10):
        (draft,) = speculator.propose([wish()], 1)
        assert draft.token_ids[0] == 7
    assert len(trained.asked) == num_asked


def test_guesses_that_are_never_worth_a_row_send_their_drafter_to_rest() -> None:
    look_up, trained = LookUp(), Trained(0.001, 0.0001)
    look_up.length = 0
    speculator = cascade(look_up, trained)
    for _ in range(600):
        assert speculator.propose([wish()], 1) == [Draft()]
    assert len(trained.asked) < 180
    assert speculator.counters()["speculation_no_draft_does_not_pay"] > 0


def test_in_a_batch_where_nothing_pays_nobody_is_asked_and_no_row_is_kept() -> None:
    look_up, trained = LookUp(), Trained(0.9, 0.8)
    look_up.length = SURE
    speculator = cascade(look_up, trained, num_drafts=4)
    wishes = [wish(f"r{index}") for index in range(16)]
    assert speculator.propose(wishes, 16) == [Draft()] * 16
    assert not look_up.known
    speculator.sampled(wishes[0].request, 3, (5,), np.zeros((1, 2, 4), np.float32))
    assert not trained.rows
    assert speculator.counters()["speculation_no_draft_does_not_pay"] == 16


def test_a_request_that_names_a_drafter_gets_that_one_alone() -> None:
    look_up, trained = LookUp(), Trained(0.6, 0.4)
    speculator = cascade(look_up, trained)
    drafts = speculator.propose([wish("a", "ngram"), wish("b", "eagle"), wish("c", "off"), wish("d", "auto")], 1)
    assert set(drafts[0].token_ids) == {7}
    assert drafts[1].token_ids == (20, 21)
    assert drafts[2] == Draft()
    assert set(drafts[3].token_ids) == {7, 20, 21}
    assert trained.asked == [[RequestId("b"), RequestId("d")]], "all requests of a step in one call"


@pytest.mark.parametrize("speculation", ["", "auto", "eagle"])
def test_rows_reach_the_trained_drafter_whoever_guessed(speculation: str) -> None:
    look_up, trained = LookUp(), Trained(0.6, 0.4)
    look_up.length = SURE
    speculator = cascade(look_up, trained)
    request = wish(speculation=speculation).request
    speculator.sampled(request, 3, (5, 6), np.zeros((2, 2, 4), np.float32))
    assert [rows.shape for rows in trained.rows] == [(2, 2, 4)]


def test_where_no_trees_are_verified_the_surest_branch_is() -> None:
    drafters: dict[str, Drafter] = {"ngram": LookUp(), "eagle": Trained(0.6, 0.4)}
    speculator = DraftingSpeculator(drafters, ("ngram", "eagle"), 8, COSTS, TRAINED_MS, verifies_trees=False)
    (draft,) = speculator.propose([wish()], 1)
    assert draft.is_chain
    assert draft.token_ids == (20, 21)


@pytest.mark.parametrize(("batch_size", "num_kept"), [(8, 1), (9, 0)])
def test_where_only_perfect_guesses_would_pay_no_row_of_a_trained_drafter_is_kept(
    batch_size: int, num_kept: int
) -> None:
    """A copy may be right in every token, a small model's guesses are not."""
    look_up, trained = LookUp(), Trained(0.9, 0.8)
    speculator = cascade(look_up, trained)
    wishes = [wish(f"r{index}") for index in range(batch_size)]
    assert may_pay(batch_size, COSTS, 8)
    speculator.propose(wishes, batch_size)
    speculator.sampled(wishes[0].request, 3, (5,), np.zeros((1, 2, 4), np.float32))
    assert len(trained.rows) == num_kept


def test_where_all_rest_each_decode_is_counted_by_its_own_reason() -> None:
    speculator = cascade(LookUp(), Trained(0.9, 0.8))
    assert speculator.propose([wish("a"), wish("b", "off")], 64) == [Draft()] * 2
    counters = speculator.counters()
    assert (counters["speculation_no_draft_does_not_pay"], counters["speculation_no_draft_off"]) == (1, 1)
