"""A looked-up token is as sure as its match is long, by what was seen."""

from __future__ import annotations

import pytest

from decode_worker.speculation.match_acceptance import MAX_MATCH, PRIOR, MatchAcceptance


def test_a_chain_is_as_sure_as_the_product_along_the_table() -> None:
    confidences = MatchAcceptance().confidences(3, 4)
    assert confidences == pytest.approx(
        (PRIOR[2], PRIOR[2] * PRIOR[3], PRIOR[2] * PRIOR[3] * PRIOR[4], PRIOR[2] * PRIOR[3] * PRIOR[4] * PRIOR[5])
    )


def test_longer_matches_than_the_table_has_are_as_sure_as_its_last_row() -> None:
    table = MatchAcceptance()
    assert table.confidences(MAX_MATCH + 50, 3) == table.confidences(MAX_MATCH, 3)


def test_only_the_rows_that_were_tried_move() -> None:
    table = MatchAcceptance()
    table.saw(2, num_proposed=4, num_accepted=1, smoothing=0.5)
    assert table.rates[1] == pytest.approx((PRIOR[1] + 1) / 2)
    assert table.rates[2] == pytest.approx(PRIOR[2] / 2)
    assert (table.rates[0], *table.rates[3:]) == (PRIOR[0], *PRIOR[3:])


def test_what_always_holds_becomes_sure() -> None:
    table = MatchAcceptance()
    for _ in range(100):
        table.saw(MAX_MATCH, 8, 8, 0.1)
    assert table.confidences(MAX_MATCH, 8)[-1] > 0.99
