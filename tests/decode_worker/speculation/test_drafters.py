"""Drafters guess what stood before, incrementally, request by request."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.identity import RequestId
from decode_worker.speculation.draft import Drafter
from decode_worker.speculation.ngram import NgramDrafter
from decode_worker.speculation.suffix import SuffixDrafter

A, B = RequestId("a"), RequestId("b")
DRAFTERS = [NgramDrafter, SuffixDrafter]
TOKENS = st.lists(st.integers(0, 3), max_size=40)


@pytest.mark.parametrize("make", DRAFTERS)
def test_a_repeated_passage_is_guessed_on(make: type[Drafter]) -> None:
    drafter = make()
    drafter.begin(A, [1, 2, 3, 4, 5, 6, 9, 9, 1, 2, 3])
    assert drafter.propose(A, 3).token_ids == (4, 5, 6)
    drafter.extend(A, [4, 5])
    assert drafter.propose(A, 2).token_ids == (6, 9)


@pytest.mark.parametrize("make", DRAFTERS)
def test_nothing_is_guessed_from_nothing(make: type[Drafter]) -> None:
    drafter = make()
    drafter.begin(A, [1, 2, 3])
    assert len(drafter.propose(A, 4)) == 0
    drafter.begin(B, [])
    assert len(drafter.propose(B, 4)) == 0


@pytest.mark.parametrize("make", DRAFTERS)
def test_requests_do_not_hear_each_other(make: type[Drafter]) -> None:
    drafter = make()
    drafter.begin(A, [1, 2, 3, 4])
    drafter.begin(B, [7, 1, 2])
    assert len(drafter.propose(B, 2)) == 0
    drafter.forget(A)
    drafter.forget(A)
    with pytest.raises(KeyError):
        drafter.propose(A, 1)


def test_ngram_goes_on_with_a_repetition_beyond_the_end_of_the_context() -> None:
    drafter = NgramDrafter()
    drafter.begin(A, [5, 6, 5, 6, 5])
    assert drafter.propose(A, 5).token_ids == (6, 5, 6, 5, 6)


def test_suffix_dares_as_much_as_it_has_matched() -> None:
    drafter = SuffixDrafter()
    drafter.begin(A, [1, 2, 3, 4, 5, 6, 7, 8, 1, 2])
    assert drafter.propose(A, 8).token_ids == (3, 4)
    drafter.extend(A, [3, 4])
    assert drafter.propose(A, 8).token_ids == (5, 6, 7, 8)


@given(TOKENS, st.data())
def test_ngram_is_the_same_whether_it_grows_or_starts(tokens: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    grown, whole = NgramDrafter(), NgramDrafter()
    grown.begin(A, tokens[:cut])
    grown.extend(A, tokens[cut:])
    whole.begin(A, tokens)
    assert grown.propose(A, 8) == whole.propose(A, 8)


@given(TOKENS)
def test_ngram_finds_the_latest_place(tokens: list[int]) -> None:
    drafter = NgramDrafter(max_ngram=2, min_ngram=2)
    drafter.begin(A, tokens)
    ends = [index + 2 for index, pair in enumerate(pairwise(tokens)) if list(pair) == tokens[-2:]]
    earlier = [end for end in ends if end < len(tokens)]
    draft = drafter.propose(A, 1)
    assert draft.token_ids == ((tokens[earlier[-1]],) if earlier else ())


@given(TOKENS)
def test_suffix_finds_the_longest_repeated_end(tokens: list[int]) -> None:
    drafter = SuffixDrafter(min_match=1)
    drafter.begin(A, tokens)
    longest, start = 0, 0
    for end in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < end and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= longest:
            longest, start = length, end
    assert drafter.propose(A, 40).token_ids == tuple(tokens[start : start + longest])
